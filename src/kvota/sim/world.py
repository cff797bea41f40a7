"""The real engine, scheduler, KV cache and desk, in a world that one seed decides.

    arrivals ─▶ door ─▶ mailbox ─▶ engine ─▶ step-cost executor (moves the clock)
       ▲          ▲                   │
       └ agenda ──┴──── events ◀──────┘          checkers hear of everything

The loop is: do what is due, take a turn of the engine, do what became due meanwhile, then take
what the engine published. So an arrival in the middle of a step meets a door that does not know
yet what the step produced, as in the live node. When nothing runs, the clock jumps to whatever
happens next.

Nothing here decides anything a node decides: the door, the engine and what is under them are the
ones that serve.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from kvota.core.clock import ManualClock
from kvota.core.errors import Outcome
from kvota.core.plan import Capacity, Executor
from kvota.core.request import Delta, Ended, Event, PromptRead, Request, SamplingParams
from kvota.engine.engine import Engine
from kvota.engine.mailbox import Cancel, Mailbox, Submit
from kvota.engine.text import Vocabulary
from kvota.kv.cache import KVCache
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Scheduler
from kvota.sim.agenda import Agenda
from kvota.sim.arrival import Arrival, Scaling, prompt_of
from kvota.sim.checkers import (
    AllCheckers,
    BudgetedExecutor,
    Checker,
    Conservation,
    NoStarvation,
    OneEnding,
)
from kvota.sim.door import Door, Moves, No, OpenDoor, Wait
from kvota.sim.executor import END, StepCost, StepCostExecutor
from kvota.sim.faults import FaultPlan, FaultyExecutor, Jump, Storm
from kvota.sim.records import RequestRecord, WorldResult

VOCABULARY = Vocabulary(())  # every token reads as nothing: text costs next to nothing
IDLE_TURNS_MAX = 1000  # turns in a row that compute nothing though there is work
BLOCKED_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    """The machine, the limits, and what clients put up with."""

    capacity: Capacity
    cost: StepCost
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    prefix_cache: bool = True
    queue_timeout_s: float | None = 30.0
    request_timeout_s: float | None = 120.0
    proof_every: int = 1  # steps between two full proofs of all invariants
    faults: FaultPlan = field(default_factory=FaultPlan)
    scaling: Scaling = field(default_factory=Scaling)  # of the arrivals, already applied


class StepCount:
    """A StepObserver that counts."""

    def __init__(self) -> None:
        self.num_steps = 0

    def observe_step(
        self, *, executor_s: float, overhead_s: float, num_sequences: int, num_prefilled: int,
        num_sampled: int, num_preemptions: int,
    ) -> None:  # fmt: skip
        self.num_steps += 1

    def observe_failure(self, error: Exception) -> None:
        """Injected; the fault plan counts them."""


class World:
    """One workload, run once. `door` None: no desk, as many servers do it."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        settings: WorldSettings,
        *,
        seed: int,
        door: Door | None = None,
        checkers: Sequence[Checker] = (),
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._rng = Random(f"world {seed}")
        self._clock = ManualClock()
        self._arrivals: Iterator[tuple[int, Arrival]] = iter(enumerate(arrivals))
        self._agenda = Agenda()
        self._door = door or OpenDoor(num_open_max=settings.limits.max_running_requests + 256)
        self._records: list[RequestRecord] = []
        self._open: dict[str, RequestRecord] = {}
        self._at_door: dict[str, Request] = {}
        self._published: list[tuple[str, Event]] = []
        self._mailbox = Mailbox()
        self._steps = StepCount()
        self._compose(checkers)
        self._last_arrival_s = 0.0
        self._kv_used_s = 0.0  # integral of the used share over time

    def _compose(self, checkers: Sequence[Checker]) -> None:
        """Build the node: the same parts as the live one, over an executor that only counts."""
        settings, capacity = self._settings, self._settings.capacity
        self._executor = StepCostExecutor(capacity, settings.cost, self._clock)
        self._faulty = FaultyExecutor(self._executor, self._clock, settings.faults, self._rng)
        executor: Executor = BudgetedExecutor(self._faulty, settings.limits)
        cache = KVCache(
            capacity.num_blocks, capacity.block_size, prefix_cache=settings.prefix_cache
        )
        self._scheduler = Scheduler(cache, settings.limits)
        self._conservation = Conservation(self._scheduler, self._door, settings.proof_every)
        starvation = NoStarvation(settings.queue_timeout_s, settings.request_timeout_s)
        self._checkers = AllCheckers([self._conservation, OneEnding(), starvation, *checkers])
        self._engine = Engine(
            executor,
            self._scheduler,
            vocabulary=VOCABULARY,
            clock=self._clock,
            mailbox=self._mailbox,
            publish=self._published.extend,
            observer=self._steps,
        )

    def run(self) -> WorldResult:
        """Until the last request has ended. Raises AssertionError when an invariant breaks."""
        faults = self._settings.faults
        for storm in faults.storms:
            self._agenda.note(storm.at_s, partial(self._storm, storm))
        for jump in faults.jumps:
            self._agenda.note(jump.at_s, partial(self._jump, jump))
        self._note_next_arrival()
        num_idle = 0
        while self._engine.has_work() or self._open or self._agenda.next_s is not None:
            num_idle = 0 if self._turn() else num_idle + 1
            assert num_idle < IDLE_TURNS_MAX, f"nothing moves at {self._clock.now():.3f} s"
        self._checkers.finished(self._clock.now())
        return self._result()

    # --- the loop -----------------------------------------------------------------------------

    def _turn(self) -> bool:
        """One turn of the engine and all around it. False when nothing happened."""
        started_s = self._clock.now()
        has_happened = self._do_due()
        has_computed = self._engine.step()
        self._do_due()
        has_published = bool(self._published)
        self._take_published(self._clock.now())
        if not has_computed:
            self._wait()
        self._note_use(self._clock.now() - started_s)
        self._checkers.stepped(self._clock.now())
        return has_happened or has_computed or has_published

    def _do_due(self) -> bool:
        """Everything that was to happen until now, in order, each at its own moment."""
        has_happened = False
        while due := self._agenda.pop_until(self._clock.now()):
            at_s, action = due
            action(at_s)
            has_happened = True
        self._carry_out(self._door.tick(self._clock.now()), self._clock.now())
        return has_happened

    def _wait(self) -> None:
        """Nothing can be computed: on to the next moment at which anything happens."""
        now = self._clock.now()
        moments = [at for at in (self._agenda.next_s, self._door.wake_s) if at is not None]
        if self._engine.has_work() or not moments:
            moments.append(now + BLOCKED_S)
        self._clock.advance(max(min(moments) - now, 0.0))

    def _note_use(self, elapsed_s: float) -> None:
        if self._clock.now() <= self._last_arrival_s:
            gauges = self._engine.gauges
            self._kv_used_s += elapsed_s * gauges.num_blocks_used / gauges.num_blocks

    # --- what clients do ----------------------------------------------------------------------

    def _note_next_arrival(self) -> None:
        following = next(self._arrivals, None)
        if following is not None:
            number, arrival = following
            self._last_arrival_s = max(self._last_arrival_s, arrival.at_s)
            self._agenda.note(arrival.at_s, partial(self._arrive, number, arrival))

    def _arrive(self, number: int, arrival: Arrival, now: float) -> None:
        self._note_next_arrival()
        record = RequestRecord(number, arrival)
        self._records.append(record)
        self._checkers.arrived(record, now)
        request = self._request(number, arrival, now)
        self._open[request.id] = record
        faults = self._settings.faults
        if faults.leave_rate and self._rng.random() < faults.leave_rate:
            leaves_s = now + self._rng.uniform(0, faults.leave_after_s)
            self._agenda.note(leaves_s, partial(self._leave, request.id))
        self._knock(request, record, now)

    def _knock(self, request: Request, record: RequestRecord, now: float) -> None:
        verdict = self._door.arrive(request, record.arrival.tenant, now)
        match verdict:
            case No(reason, retry_after_s):
                record.refusal, record.retry_after_s = reason, retry_after_s
                self._end(request.id, Outcome.REFUSED, now)
            case Wait(_, eta_s):
                record.eta_s = eta_s
                self._at_door[request.id] = request
            case _:
                self._grant(request, now)

    def _leave(self, request_id: str, now: float) -> None:
        if self._at_door.pop(request_id, None) is not None:
            self._end(request_id, Outcome.CLIENT_CLOSED, now)
            self._carry_out(self._door.leave(request_id, now), now)
        elif request_id in self._open:
            self._mailbox.post(Cancel(request_id))

    def _storm(self, storm: Storm, now: float) -> None:
        waiting = list(self._open)
        for request_id in self._rng.sample(waiting, int(storm.share * len(waiting))):
            self._leave(request_id, now)

    def _jump(self, jump: Jump, now: float) -> None:
        self._clock.advance(jump.seconds)

    # --- between door and engine --------------------------------------------------------------

    def _grant(self, request: Request, now: float) -> None:
        record = self._open[request.id]
        record.granted_at_s = now
        self._checkers.granted(record, now)
        self._mailbox.post(Submit(request))

    def _carry_out(self, moves: Moves, now: float) -> None:
        for request_id in moves.granted:
            self._grant(self._at_door.pop(request_id), now)
        for request_id in moves.expired:
            del self._at_door[request_id]
            self._end(request_id, Outcome.QUEUE_TIMEOUT, now)
        for request_id in moves.paused:
            self._scheduler.pause(request_id)

    def _take_published(self, now: float) -> None:
        published, self._published[:] = self._published.copy(), []
        for request_id, event in published:
            if type(event) is Delta:
                self._produced(request_id, event, now)
            elif isinstance(event, Ended):
                self._close(request_id, event, now)
            elif isinstance(event, PromptRead):
                self._open[request_id].cached_tokens = event.cached_tokens

    def _produced(self, request_id: str, delta: Delta, now: float) -> None:
        record = self._open[request_id]
        record.output_tokens += len(delta.token_ids)
        if delta.choice == 0:
            record.token_at_s.append(now)
        self._checkers.produced(record, len(delta.token_ids), now)
        self._door.progress(request_id, record.output_tokens, now)

    def _close(self, request_id: str, event: Ended, now: float) -> None:
        record = self._open[request_id]
        record.preemptions = event.num_preemptions
        record.ttft_s = event.first_token_s
        if event.outcome is not Outcome.QUEUE_TIMEOUT:
            record.queued_s = event.queued_s
        self._end(request_id, event.outcome, now)
        self._carry_out(self._door.ended(request_id, event.outcome, now), now)

    def _end(self, request_id: str, outcome: Outcome, now: float) -> None:
        record = self._open.pop(request_id)
        record.outcome = outcome
        record.ended_at_s = now
        self._checkers.ended(record, now)

    # --- in and out ---------------------------------------------------------------------------

    def _request(self, number: int, arrival: Arrival, now: float) -> Request:
        queue_s, request_s = self._settings.queue_timeout_s, self._settings.request_timeout_s
        return Request(
            id=f"r{number}",
            prompt=prompt_of(arrival, number),
            max_tokens=arrival.max_tokens,
            n=arrival.n,
            sampling=SamplingParams(
                min_tokens=arrival.output_tokens, stop_token_ids=frozenset({END})
            ),
            arrived_s=now,
            band=arrival.band,
            queue_deadline_s=None if queue_s is None else now + queue_s,
            deadline_s=None if request_s is None else now + request_s,
        )

    def _result(self) -> WorldResult:
        records = self._records
        first_s = records[0].arrival.at_s if records else 0.0
        return WorldResult(
            records=records,
            scaling=self._settings.scaling,
            seed=self._seed,
            span_s=self._last_arrival_s - first_s,
            ended_s=self._clock.now(),
            num_steps=self._steps.num_steps,
            busy_s=self._executor.busy_s,
            kv_used_mean=self._kv_used_s / self._last_arrival_s if self._last_arrival_s else 0.0,
            recomputed_tokens=self._scheduler.snapshot().recomputed_tokens,
            num_checks=self._conservation.num_proofs,
            num_faults=self._faulty.num_faults,
        )
