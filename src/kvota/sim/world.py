"""The real engine, scheduler, KV cache and desk, in a world that one seed decides.

    arrivals ─▶ door ─▶ mailbox ─▶ engine ─▶ step-cost executor (moves the clock)
       ▲          ▲                   │
       └ agenda ──┴──── events ◀──────┘          checkers hear of everything

Where nothing is decided for some steps, and it is allowed, `leap.py` takes them at once. Otherwise
the loop is: do what is due, take a turn of the engine, do what became due meanwhile, then take
what the engine published. So an arrival in the middle of a step meets a door that does not know
yet what the step produced, as in the live node. When nothing runs, the clock jumps to whatever
happens next.

Nothing here decides anything a node decides: the door, the engine and what is under them are the
ones that serve.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import attrgetter
from random import Random

from kvota.core.clock import ManualClock
from kvota.core.errors import Outcome
from kvota.core.request import (
    Delta,
    Ended,
    EngineEvent,
    Paused,
    PromptRead,
    Request,
    SamplingParams,
)
from kvota.kv.cache import KVCache
from kvota.sim.agenda import Agenda
from kvota.sim.checkers import AllCheckers, Checker, Conservation, NoStarvation, OneEnding
from kvota.sim.desk_door import DeskDoor
from kvota.sim.door import Door, Moves, No, OpenDoor, Wait
from kvota.sim.executor import END
from kvota.sim.fairness import Fairness
from kvota.sim.faults import FaultPlan, Jump, SlowStep, StepError, Storm, Strike
from kvota.sim.leap import Leaper, Leapt, Runner
from kvota.sim.node import NodeSettings, SimulatedNode
from kvota.sim.records import RequestRecord, WorldResult
from kvota.traffic.arrival import Arrival, Scaling, prompt_of

TICK_S = 0.05  # the door is asked at least this often while nothing can be computed
IDLE_TURNS_MAX = 1_000_000  # in a row, before a world counts as stuck
_RETURNED = 1 << 30  # requests of clients that came back are numbered from here

DoorFactory = Callable[[KVCache], Door]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    """The node, and what clients put up with. Timeouts of None never come."""

    node: NodeSettings
    queue_timeout_s: float | None = 30.0
    request_timeout_s: float | None = 120.0
    returns_max: int = 0  # a refused client comes back after Retry-After so often, as a new request
    warm_up_s: float = 0.0  # what arrives before is served and not judged
    proof_every: int = 1  # steps between two full proofs of all invariants
    leaps: bool = False  # many steps at once where nothing is decided, with the same result
    faults: FaultPlan = field(default_factory=FaultPlan)
    scaling: Scaling = field(default_factory=Scaling)  # of the arrivals, already applied


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """What a node says of itself when it is asked."""

    num_running: int
    num_waiting: int
    kv_used: float  # share of all blocks


def open_door(settings: NodeSettings, num_waiting_max: int = 256) -> DoorFactory:
    """No desk: all go to the engine's line, as far as it may grow."""
    return lambda _: OpenDoor(settings.limits.max_running_requests + num_waiting_max)


class World:
    """One workload, run once. Without a `door` there is no desk, as many servers do it.

    Without `keeps_records` only checkers hear what became of whom: a million would not fit.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        settings: WorldSettings,
        *,
        seed: int,
        door: DoorFactory | None = None,
        checkers: Sequence[Checker] = (),
        keeps_records: bool = True,
    ) -> None:
        self._settings = settings
        self._keeps_records = keeps_records
        self._seed = seed
        self._rng = Random(f"world {seed}")
        self._clock = ManualClock()
        self._node = SimulatedNode(settings.node, settings.faults, self._clock, self._rng)
        self._door = (door or open_door(settings.node))(self._node.cache)
        self._conservation = Conservation(self._node.scheduler, self._door, settings.proof_every)
        starvation = NoStarvation(settings.queue_timeout_s, settings.request_timeout_s)
        always: list[Checker] = [self._conservation, OneEnding(), starvation, *self._fairness()]
        self._checkers = AllCheckers([*always, *checkers])
        self._arrivals: Iterator[tuple[int, Arrival]] = iter(enumerate(arrivals))
        self._agenda = Agenda()
        self._records: list[RequestRecord] = []
        self._open: dict[str, RequestRecord] = {}
        self._at_door: dict[str, Request] = {}  # in line there, fresh or paused
        self._stopped: dict[str, Outcome] = {}  # by the door: how they are to end
        self._struck: list[Strike] = []  # storms and jumps
        self._num_returned = 0
        self._last_arrival_s = 0.0
        self._kv_used_s = 0.0  # integral of the used share over the time of the arrivals
        self._num_idle = 0
        self._leaper = (
            Leaper(self._node, self._door, self._agenda, self._clock)
            if settings.leaps and self._can_leap(checkers)
            else None
        )

    def run(self) -> WorldResult:
        """Until the last request has ended. Raises AssertionError when an invariant breaks."""
        faults = self._settings.faults
        for storm in faults.storms:
            self._agenda.note(storm.at_s, partial(self._storm, storm))
        for jump in faults.jumps:
            self._agenda.note(jump.at_s, partial(self._jump, jump))
        for fault in faults.of_steps:
            self._agenda.note(fault.at_s, partial(self._strike_step, fault))
        self._note_next_arrival()
        self.advance(inf)
        return self.finish()

    # --- for a world among others --------------------------------------------------------------

    @property
    def now(self) -> float:
        return self._clock.now()

    @property
    def has_more(self) -> bool:
        """Something runs, waits or is still to happen."""
        return bool(self._open) or self._agenda.next_s is not None or self._node.engine.has_work()

    @property
    def load(self) -> NodeLoad:
        num_waiting = len(self._at_door)
        return NodeLoad(len(self._open) - num_waiting, num_waiting, self._node.kv_used)

    def expect(self, record: RequestRecord) -> None:
        """Besides the workload, it arrives at its moment, which must not be over."""
        self._last_arrival_s = max(self._last_arrival_s, record.arrival.at_s)
        self._agenda.note(record.arrival.at_s, partial(self._enter, record))

    def advance(self, until_s: float) -> None:
        """Take turns until then, or until there is nothing more. The last one may end later."""
        while self.has_more and self._clock.now() < until_s:
            started_s = self._clock.now()
            leapt = self._leaper.leap(until_s) if self._leaper is not None else None
            if leapt is None:
                self._turn()
            else:
                self._take_leap(leapt, started_s)

    def finish(self) -> WorldResult:
        """Prove that nothing is left over."""
        self._checkers.finished(self._clock.now())
        return self._result()

    # --- the loop -----------------------------------------------------------------------------

    def _turn(self) -> None:
        """One turn of the engine and all around it."""
        started_s = self._clock.now()
        self._do_due()
        has_computed = self._node.engine.step()
        self._do_due()
        events = self._node.take()
        self._take(events, self._clock.now())
        moves = self._door.tick(self._clock.now())
        self._carry_out(moves, self._clock.now())
        if has_computed or events or moves.granted:
            self._num_idle = 0
        else:
            self._wait()
        self._note_use(started_s, self._clock.now(), self._node.kv_used)
        self._checkers.stepped(self._clock.now())

    def _fairness(self) -> Sequence[Checker]:
        """Only a desk promises it."""
        if not isinstance(self._door, DeskDoor):
            return ()
        capacity, settings = self._settings.node.capacity, self._door.desk.settings
        fairness = Fairness(
            capacity.num_blocks * capacity.block_size,
            weights=settings.tenant_weights,
            long_above=settings.long_request_threshold,
        )
        return (fairness,)

    def _can_leap(self, checkers: Sequence[Checker]) -> bool:
        """Nothing fails, the door is a known one, and nobody wants to hear of every token."""
        hears_all = any(
            type(one).produced is not Checker.produced or type(one).stepped is not Checker.stepped
            for one in checkers
        )
        is_known = isinstance(self._door, DeskDoor | OpenDoor)
        return is_known and not hears_all and self._settings.faults == FaultPlan()

    def _take_leap(self, leapt: Leapt, started_s: float) -> None:
        """All that is around the engine in a turn; what happens, happens after the last step."""
        assert self._leaper is not None
        now, num_steps, next_s = self._clock.now(), leapt.num_steps, self._agenda.next_s
        self._note_tokens(leapt, now)
        if leapt.ended or (next_s is not None and next_s <= now):
            self._leaper.tell_desk(leapt, 0, num_steps - 1, leapt.runners)
            self._do_due()
            self._take_last_step(leapt, now)
        else:
            self._leaper.tell_desk(leapt, 0, num_steps, leapt.runners)
        self._carry_out(self._door.tick(now), now)
        self._num_idle = 0
        for end_s, used in zip(leapt.ends_s, leapt.used, strict=True):
            self._note_use(started_s, end_s, used)
            started_s = end_s
        self._checkers.leapt(leapt.ends_s)

    def _note_tokens(self, leapt: Leapt, now: float) -> None:
        """For the records. The last tokens are events, and noted when they are taken."""
        for one in leapt.runners:
            ends_s = leapt.ends_s[:-1] if one.request_id in leapt.ended else leapt.ends_s
            if ends_s:
                record = self._open[one.request_id]
                record.output_tokens += len(ends_s)
                record.token_at_s.extend(ends_s)
                self._checkers.produced(record, len(ends_s), now)

    def _take_last_step(self, leapt: Leapt, now: float) -> None:
        """In the order of events: who ends makes room, and those after it have no token yet."""
        assert self._leaper is not None
        num_steps, events = leapt.num_steps, self._node.take()
        between: list[Runner] = []
        for one in leapt.runners:
            if one.request_id not in leapt.ended:
                between.append(one)
                continue
            self._leaper.tell_desk(leapt, num_steps - 1, num_steps, between)
            between = []
            self._take([each for each in events if each[0] == one.request_id], now)
        self._leaper.tell_desk(leapt, num_steps - 1, num_steps, between)

    def _do_due(self) -> None:
        """Everything that was to happen until now, in order, each at its own moment."""
        while due := self._agenda.pop_until(self._clock.now()):
            at_s, action = due
            action(at_s)

    def _wait(self) -> None:
        """Nothing could be computed: on to the next moment at which anything may happen."""
        self._num_idle += 1
        assert self._num_idle < IDLE_TURNS_MAX, f"nothing moves at {self._clock.now():.3f} s"
        now, next_s = self._clock.now(), self._agenda.next_s
        if self._open:
            next_s = now + TICK_S if next_s is None else min(now + TICK_S, next_s)
        if next_s is not None:
            self._clock.advance(max(next_s - now, 0.0))

    def _note_use(self, started_s: float, ended_s: float, used: float) -> None:
        if self._settings.warm_up_s < ended_s <= self._last_arrival_s:
            self._kv_used_s += (ended_s - started_s) * used

    # --- what clients do ----------------------------------------------------------------------

    def _note_next_arrival(self) -> None:
        following = next(self._arrivals, None)
        if following is not None:
            number, arrival = following
            self._last_arrival_s = max(self._last_arrival_s, arrival.at_s)
            self._agenda.note(arrival.at_s, partial(self._arrive, number, arrival))

    def _arrive(self, number: int, arrival: Arrival, now: float) -> None:
        self._note_next_arrival()
        self._enter(RequestRecord(number, arrival), now)

    def _come_back(self, refused: RequestRecord, now: float) -> None:
        """The client of a refused request asks again: a new request, for an old wish."""
        arrival = replace(refused.arrival, at_s=now)
        again = RequestRecord(_RETURNED + self._num_returned, arrival)
        again.attempt = refused.attempt + 1
        first_at_s = refused.first_at_s
        again.first_at_s = refused.arrival.at_s if first_at_s is None else first_at_s
        self._num_returned += 1
        self._enter(again, now)

    def _enter(self, record: RequestRecord, now: float) -> None:
        if self._keeps_records:
            self._records.append(record)
        self._checkers.arrived(record, now)
        request = self._request_of(record)
        self._open[request.id] = record
        faults = self._settings.faults
        if faults.leave_rate and self._rng.random() < faults.leave_rate:
            leaves_s = now + self._rng.uniform(0, faults.leave_after_s)
            self._agenda.note(leaves_s, partial(self._leave, request.id))
        self._knock(request, record, now)

    def _knock(self, request: Request, record: RequestRecord, now: float) -> None:
        verdict = self._door.arrive(request, record.arrival, now)
        match verdict:
            case No(reason, retry_after_s):
                record.refusal, record.retry_after_s = reason, retry_after_s
                self._end(request.id, Outcome.REFUSED, now)
                if record.attempt < self._settings.returns_max:
                    self._agenda.note(now + retry_after_s, partial(self._come_back, record))
            case Wait(_, eta_s, is_latest):
                record.eta_s, record.latest_s = (None, eta_s) if is_latest else (eta_s, None)
                self._at_door[request.id] = request
            case _:
                self._grant(request, now)

    def _leave(self, request_id: str, now: float) -> None:
        if request_id in self._at_door:
            self._end_at_door(request_id, Outcome.CLIENT_CLOSED, now)
            self._carry_out(self._door.leave(request_id, now), now)
        elif request_id in self._open:
            self._node.cancel(request_id)

    def _storm(self, storm: Storm, now: float) -> None:
        num_open, num_gone = len(self._open), int(storm.share * len(self._open))
        effect = f"{num_gone} of {num_open} open requests cancelled"
        self._struck.append(Strike(storm, self._clock.now(), effect))
        for request_id in self._rng.sample(list(self._open), num_gone):
            self._leave(request_id, now)

    def _jump(self, jump: Jump, now: float) -> None:
        self._struck.append(Strike(jump, self._clock.now(), f"stood still for {jump.seconds:g} s"))
        self._clock.advance(jump.seconds)

    def _strike_step(self, fault: StepError | SlowStep, now: float) -> None:
        self._node.faulty.strike_next(fault)

    # --- between door and engine --------------------------------------------------------------

    def _grant(self, request: Request, now: float) -> None:
        record = self._open[request.id]
        if record.granted_at_s is None:
            record.granted_at_s = now
            self._checkers.granted(record, now)
        self._node.submit(request)

    def _carry_out(self, moves: Moves, now: float) -> None:
        for request_id in moves.granted:
            self._grant(self._at_door.pop(request_id), now)
        for request_id, outcome in moves.expired:
            self._end_at_door(request_id, outcome, now)
        for request_id, outcome in moves.overdue:
            self._stopped[request_id] = outcome
            self._node.cancel(request_id)
        for request_id in moves.pauses:
            self._node.pause(request_id)

    def _end_at_door(self, request_id: str, outcome: Outcome, now: float) -> None:
        del self._at_door[request_id]
        if self._open[request_id].granted_at_s is not None:
            self._node.forget(request_id)
        self._end(request_id, outcome, now)

    def _take(self, events: Sequence[tuple[str, EngineEvent]], now: float) -> None:
        for request_id, event in events:
            record = self._open[request_id]
            if type(event) is Delta:
                self._produced(record, request_id, event, now)
            elif isinstance(event, Ended):
                self._close(record, request_id, event, now)
            elif isinstance(event, PromptRead) and record.queued_s is None:
                record.cached_tokens, record.queued_s = event.cached_tokens, event.queued_s
            elif isinstance(event, Paused):
                record.pauses += 1
                self._at_door[request_id] = self._request_of(record)
                self._carry_out(self._door.paused(request_id, now), now)

    def _produced(self, record: RequestRecord, request_id: str, delta: Delta, now: float) -> None:
        record.output_tokens += len(delta.token_ids)
        if delta.choice == 0:
            record.token_at_s.append(now)
        self._checkers.produced(record, len(delta.token_ids), now)
        self._door.progress(request_id, delta, now)

    def _close(self, record: RequestRecord, request_id: str, event: Ended, now: float) -> None:
        record.preemptions = event.num_preemptions
        self._at_door.pop(request_id, None)
        outcome = self._stopped.pop(request_id, event.outcome)
        self._end(request_id, outcome, now)
        self._carry_out(self._door.ended(request_id, outcome, now), now)

    def _end(self, request_id: str, outcome: Outcome, now: float) -> None:
        record = self._open.pop(request_id)
        record.outcome = outcome
        record.ended_at_s = now
        self._checkers.ended(record, now)

    # --- in and out ---------------------------------------------------------------------------

    def _request_of(self, record: RequestRecord) -> Request:
        arrival, number = record.arrival, record.number
        queue_s, request_s = self._settings.queue_timeout_s, self._settings.request_timeout_s
        return Request(
            id=f"r{number}",
            prompt=prompt_of(arrival, number),
            max_tokens=arrival.max_tokens,
            n=arrival.n,
            sampling=SamplingParams(
                min_tokens=arrival.output_tokens, stop_token_ids=frozenset({END})
            ),
            arrived_s=arrival.at_s,
            band=arrival.band,
            queue_deadline_s=None if queue_s is None else arrival.at_s + queue_s,
            deadline_s=None if request_s is None else arrival.at_s + request_s,
        )

    def _result(self) -> WorldResult:
        warm_up_s = self._settings.warm_up_s
        judged = [one for one in self._records if one.arrival.at_s >= warm_up_s]
        first_s = warm_up_s or (judged[0].arrival.at_s if judged else 0.0)
        span_s = max(self._last_arrival_s - first_s, 0.0)
        return WorldResult(
            records=judged,
            scaling=self._settings.scaling,
            seed=self._seed,
            span_s=span_s,
            ended_s=self._clock.now(),
            num_steps=self._node.steps.num_steps,
            busy_s=self._node.executor.busy_s,
            kv_used_mean=self._kv_used_s / span_s if span_s else 0.0,
            recomputed_tokens=self._node.scheduler.snapshot().recomputed_tokens,
            num_checks=self._conservation.num_proofs,
            num_faults=self._node.faulty.num_faults,
            struck=sorted((*self._struck, *self._node.faulty.struck), key=attrgetter("at_s")),
        )
