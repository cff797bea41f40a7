"""Many simulated nodes behind the gateway's router.

    arrivals ─▶ Router.pick ─▶ world 1 … world n       each with a desk, an engine and a clock
                   ▲    ▲          │
       figures, probed  └ refused ─┘                   tried elsewhere, as far as retries may go

Router and retry rules are the gateway's own. As there, the figures that routing sees are as old as
the last probe, and what was sent since then is added to them. Time goes on in slices: what arrives
in a slice is routed first, then all nodes work until its end. A request that a node refuses finds
its next node in the slice after. Latencies are not told to the router, as the nodes are alike.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random

from kvota.core.errors import Outcome
from kvota.gateway.policy.affinity import NO_PREFIX, PrefixChain, prefix_chain
from kvota.gateway.policy.retries import Attempts, Failure, RetryBudget, RetrySettings
from kvota.gateway.policy.routing import Choice, Replica, Router, RoutingSettings
from kvota.sim.checkers import Checker
from kvota.sim.records import RequestRecord, Targets, quantile
from kvota.sim.world import DoorFactory, World, WorldSettings
from kvota.traffic.arrival import Arrival

SLICE_S = 0.25
PROBE_EVERY_S = 2.0  # as the gateway does by default
CHARACTERS_PER_TOKEN = 4
_BUSY = frozenset({Outcome.REFUSED, Outcome.QUEUE_TIMEOUT})  # what a node answers with a 503


@dataclass(frozen=True, slots=True)
class FleetResult:
    """`is_cut`: it was stopped when the goal was out of reach, so the figures are of a part."""

    num_replicas: int
    num_requests: int
    num_good: int
    late_attainment: float  # of the last third to arrive: low where a backlog only grows
    is_cut: bool
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    num_refused: int
    busy_share: float  # of all executors, from the first arrival to the last ending

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_requests


@dataclass(slots=True)
class _Tally:
    late_from: int  # number of the first request that arrives late
    num_good: int = 0
    num_bad: int = 0
    num_late: int = 0
    num_late_good: int = 0
    num_refused: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    def add(self, record: RequestRecord, *, is_good: bool) -> None:
        self.num_good += is_good
        self.num_bad += not is_good
        if record.number >= self.late_from:
            self.num_late += 1
            self.num_late_good += is_good
        self.num_refused += record.outcome in _BUSY
        if record.ttft_s is not None:
            self.ttft_s.append(record.ttft_s)
        if len(record.token_at_s) > 1:
            self.tpot_s.append(record.tpot_s)


class Fleet:
    """`num_replicas` alike nodes. Run it once."""

    def __init__(
        self,
        num_replicas: int,
        settings: WorldSettings,
        door: DoorFactory | None,
        *,
        seed: int,
        targets: Targets,
        probe_every_s: float = PROBE_EVERY_S,
    ) -> None:
        self._probe_slices = max(1, round(probe_every_s / SLICE_S))
        self._targets = targets
        self._tally = _Tally(0)
        self._router = Router(RoutingSettings(), Random(f"router {seed}"))
        retries = RetrySettings()
        self._retries = retries
        self._budget = RetryBudget(retries)
        self._attempts: dict[int, Attempts] = {}
        self._refused: list[tuple[RequestRecord, float]] = []  # with the moment
        self._worlds = {
            f"replica-{number}": World(
                (), settings, seed=seed + number, door=door, checkers=[_Ending(self._ended)]
            )
            for number in range(num_replicas)
        }
        self._replicas: list[Replica] = []

    def run(self, arrivals: Sequence[Arrival], bad_max: int | None = None) -> FleetResult:
        """Until all have ended, or more than `bad_max` were not good.

        Raises AssertionError when an invariant of a node breaks.
        """
        self._tally = _Tally(late_from=2 * len(arrivals) // 3)
        following = iter(enumerate(arrivals))
        waiting = next(following, None)
        slices = next_probe = 0
        while waiting is not None or self._refused or any(self._busy()):
            if waiting is not None and not self._refused and not any(self._busy()):
                slices = max(slices, int(waiting[1].at_s / SLICE_S))  # nothing happens until then
            if slices >= next_probe:
                self._probe()
                next_probe = slices + self._probe_slices
            slices += 1
            end_s = slices * SLICE_S
            self._reroute()
            while waiting is not None and waiting[1].at_s < end_s:
                number, arrival = waiting
                self._arrive(RequestRecord(number, arrival))
                waiting = next(following, None)
            for world in self._busy():
                world.advance(end_s)
            if bad_max is not None and self._tally.num_bad > bad_max:
                return self._result(len(arrivals), is_cut=True)
        return self._result(len(arrivals), is_cut=False)

    def _busy(self) -> Iterator[World]:
        return (world for world in self._worlds.values() if world.has_more)

    def _probe(self) -> None:
        self._replicas = [_replica(name, world) for name, world in self._worlds.items()]
        for name in self._worlds:
            self._router.refreshed(name)

    def _arrive(self, record: RequestRecord) -> None:
        self._budget.note_request(record.arrival.at_s)
        self._attempts[record.number] = Attempts(self._retries, self._budget)
        self._route(record)

    def _reroute(self) -> None:
        refused, self._refused = self._refused, []
        for record, at_s in refused:
            first_s = record.first_at_s
            again = RequestRecord(record.number, replace(record.arrival, at_s=at_s))
            again.attempt = record.attempt + 1
            again.first_at_s = record.arrival.at_s if first_s is None else first_s
            if not self._route(again):
                self._close(record)

    def _route(self, record: RequestRecord) -> bool:
        """False when no other node may be tried."""
        attempts, arrival = self._attempts[record.number], record.arrival
        chain, tokens = _chain_of(arrival), arrival.prompt_tokens + arrival.n * arrival.max_tokens
        choice = self._pick(arrival, tokens, chain, attempts.tried)
        if choice is None:
            return False
        self._router.sent(choice, tokens, chain)
        attempts.begin(choice.replica.id)
        world = self._worlds[choice.replica.id]
        if world.now > arrival.at_s:  # it is ahead by the end of its last step, or the slice
            record.first_at_s = arrival.at_s if record.first_at_s is None else record.first_at_s
            record.arrival = replace(arrival, at_s=world.now)
        world.expect(record)
        return True

    def _pick(
        self, arrival: Arrival, tokens: int, chain: PrefixChain, tried: Sequence[str]
    ) -> Choice | None:
        session = arrival.session
        return self._router.pick(
            self._replicas,
            ticket_tokens=tokens,
            prefix=chain,
            conversation=None if session is None else f"{arrival.tenant}/{session}",
            tried=tried,
        )

    def _ended(self, record: RequestRecord, now: float) -> None:
        if record.outcome in _BUSY:
            stop = self._attempts[record.number].after(Failure.BUSY, content_sent=False, now=now)
            if stop is None:
                self._refused.append((record, now))
                return
        self._close(record)

    def _close(self, record: RequestRecord) -> None:
        del self._attempts[record.number]
        self._tally.add(record, is_good=self._targets.is_met(record))
        record.token_at_s = []  # a million of them would not fit

    def _result(self, num_requests: int, *, is_cut: bool) -> FleetResult:
        worlds = list(self._worlds.values())
        busy_s = span_s = 0.0
        if not is_cut:
            results = [world.finish() for world in worlds]
            busy_s = sum(one.busy_s for one in results)
            span_s = max(one.ended_s for one in results) * len(worlds)
        tally = self._tally
        return FleetResult(
            num_replicas=len(worlds),
            num_requests=num_requests,
            num_good=tally.num_good,
            late_attainment=tally.num_late_good / tally.num_late if tally.num_late else 0.0,
            is_cut=is_cut,
            ttft_p50_s=quantile(tally.ttft_s, 0.5),
            ttft_p99_s=quantile(tally.ttft_s, 0.99),
            tpot_p99_s=quantile(tally.tpot_s, 0.99),
            num_refused=tally.num_refused,
            busy_share=busy_s / span_s if span_s else 0.0,
        )


class _Ending(Checker):
    """Hears how each request of a world ended."""

    def __init__(self, tell: Callable[[RequestRecord, float], None]) -> None:
        self._tell = tell

    def ended(self, record: RequestRecord, now: float) -> None:
        self._tell(record, now)


def _replica(name: str, world: World) -> Replica:
    load = world.load
    return Replica(
        id=name,
        free_kv_tokens=round(world.kv_tokens * (1 - load.kv_used)),
        running=load.num_running,
        waiting=load.num_waiting,
        kv_usage=load.kv_used,
    )


def _chain_of(arrival: Arrival) -> PrefixChain:
    """What the gateway would see of the prompt: text of which equal blocks are equal."""
    if not arrival.prefix:
        return NO_PREFIX
    size = arrival.prefix_block * CHARACTERS_PER_TOKEN
    text = "".join(_text_of(block, size) for block in arrival.prefix)
    return prefix_chain(text[: arrival.prompt_tokens * CHARACTERS_PER_TOKEN])


@lru_cache(maxsize=4096)
def _text_of(block: int, size: int) -> str:
    word = f"{block:x} "
    return (word * (size // len(word) + 1))[:size]
