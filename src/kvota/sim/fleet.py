"""Many simulated nodes behind the gateway's router.

    arrivals ─▶ Router.pick ─▶ world 1 … world n       each with a desk, an engine and a clock
                   ▲    ▲          │
       figures, probed  └ refused ─┘                   tried elsewhere, as far as retries may go

Router and retry rules are the gateway's own. As there, the figures that routing sees are as old as
the last probe, and what was sent since then is added to them. Time goes on in slices: what arrives
in a slice is routed first, then all nodes work until its end, here or in other processes. A request
that a node refuses finds its next node in the slice after. Latencies are not told to the router, as
the nodes are alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random

from kvota.core.errors import Outcome
from kvota.gateway.policy.affinity import NO_PREFIX, PrefixChain, prefix_chain
from kvota.gateway.policy.retries import Attempts, Failure, RetryBudget, RetrySettings
from kvota.gateway.policy.routing import Choice, Replica, Router, RoutingSettings
from kvota.sim.crew import Crew
from kvota.sim.records import quantile
from kvota.sim.shard import Arriving, EndedAt, Nodes, NodesPlan, Shard
from kvota.sim.world import NodeLoad
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
    num_unserved: int  # ended without a whole answer, the refused ones among them
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
    num_unserved: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    def add(self, one: EndedAt) -> None:
        self.num_good += one.is_good
        self.num_bad += not one.is_good
        if one.number >= self.late_from:
            self.num_late += 1
            self.num_late_good += one.is_good
        self.num_refused += one.outcome in _BUSY
        self.num_unserved += one.outcome is not Outcome.COMPLETED
        if one.ttft_s is not None:
            self.ttft_s.append(one.ttft_s)
        if one.tpot_s is not None:
            self.tpot_s.append(one.tpot_s)


@dataclass(slots=True)
class _Open:
    """A request that has not ended for its client."""

    asked: Arriving
    attempts: Attempts


class Fleet:
    """`num_replicas` alike nodes, in the processes of `crew` or in this one. Run it once."""

    def __init__(
        self,
        num_replicas: int,
        plan: NodesPlan,
        *,
        probe_every_s: float = PROBE_EVERY_S,
        crew: Crew | None = None,
    ) -> None:
        self._num_replicas = num_replicas
        self._probe_slices = max(1, round(probe_every_s / SLICE_S))
        self._nodes: Nodes = (
            Shard(plan, range(num_replicas)) if crew is None else crew.fleet(plan, num_replicas)
        )
        capacity = plan.settings.node.capacity
        self._kv_tokens = capacity.num_blocks * capacity.block_size
        self._loads: Sequence[NodeLoad] = [NodeLoad(0, 0, 0.0)] * num_replicas
        self._has_more = False
        self._tally = _Tally(0)
        self._router = Router(RoutingSettings(), Random(f"router {plan.seed}"))
        self._retry_settings = RetrySettings()
        self._budget = RetryBudget(self._retry_settings)
        self._open: dict[int, _Open] = {}
        self._refused: list[EndedAt] = []
        self._arriving: list[Arriving] = []  # in the slice that comes
        self._replicas: list[Replica] = []

    def run(
        self,
        arrivals: Sequence[Arrival],
        bad_max: int | None = None,
        on_arrived: Callable[[int], None] = lambda _: None,
    ) -> FleetResult:
        """Until all have ended, or more than `bad_max` were not good.

        `on_arrived` hears after each slice how many have come so far. Raises AssertionError when an
        invariant of a node breaks.
        """
        self._tally = _Tally(late_from=2 * len(arrivals) // 3)
        num_arrived = slices = next_probe = 0
        while num_arrived < len(arrivals) or self._refused or self._has_more:
            if not self._refused and not self._has_more:  # nothing happens until the next arrival
                slices = max(slices, int(arrivals[num_arrived].at_s / SLICE_S))
            if slices >= next_probe:
                self._probe()
                next_probe = slices + self._probe_slices
            slices += 1
            end_s = slices * SLICE_S
            self._reroute()
            while num_arrived < len(arrivals) and arrivals[num_arrived].at_s < end_s:
                self._arrive(num_arrived, arrivals[num_arrived])
                num_arrived += 1
            self._work(end_s)
            on_arrived(num_arrived)
            if bad_max is not None and self._tally.num_bad > bad_max:
                return self._result(len(arrivals), is_cut=True)
        return self._result(len(arrivals), is_cut=False)

    def _probe(self) -> None:
        self._replicas = [
            Replica(
                id=_name(number),
                free_kv_tokens=round(self._kv_tokens * (1 - load.kv_used)),
                running=load.num_running,
                waiting=load.num_waiting,
                kv_usage=load.kv_used,
            )
            for number, load in enumerate(self._loads)
        ]
        for replica in self._replicas:
            self._router.refreshed(replica.id)

    def _work(self, end_s: float) -> None:
        arriving, self._arriving = self._arriving, []
        self._nodes.begin(end_s, arriving)
        done = self._nodes.result()
        self._loads, self._has_more = done.loads, done.has_more
        for ended in done.ended:
            for one in ended:
                self._ended(one)

    def _arrive(self, number: int, arrival: Arrival) -> None:
        self._budget.note_request(arrival.at_s)
        attempts = Attempts(self._retry_settings, self._budget)
        self._route(_Open(Arriving(0, number, arrival, 0, None), attempts))

    def _reroute(self) -> None:
        refused, self._refused = self._refused, []
        for ended in refused:
            one = self._open[ended.number]
            asked = one.asked
            first_s = asked.arrival.at_s if asked.first_at_s is None else asked.first_at_s
            one.asked = asked._replace(
                arrival=replace(asked.arrival, at_s=ended.at_s),
                attempt=asked.attempt + 1,
                first_at_s=first_s,
            )
            if not self._route(one):
                self._close(ended)

    def _route(self, one: _Open) -> bool:
        """False when no other node may be tried."""
        arrival = one.asked.arrival
        chain, tokens = _chain_of(arrival), arrival.prompt_tokens + arrival.n * arrival.max_tokens
        choice = self._pick(arrival, tokens, chain, one.attempts.tried)
        if choice is None:
            return False
        self._router.sent(choice, tokens, chain)
        one.attempts.begin(choice.replica.id)
        self._open[one.asked.number] = one
        self._arriving.append(one.asked._replace(replica=_number(choice.replica.id)))
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

    def _ended(self, one: EndedAt) -> None:
        if one.outcome in _BUSY:
            attempts = self._open[one.number].attempts
            stop = attempts.after(Failure.BUSY, content_sent=False, now=one.at_s)
            if stop is None:
                self._refused.append(one)
                return
        self._close(one)

    def _close(self, one: EndedAt) -> None:
        del self._open[one.number]
        self._tally.add(one)

    def _result(self, num_requests: int, *, is_cut: bool) -> FleetResult:
        busy_s = span_s = 0.0
        if not is_cut:
            worked = self._nodes.finish()
            busy_s = sum(one.busy_s for one in worked)
            span_s = max(one.ended_s for one in worked) * len(worked)
        tally = self._tally
        return FleetResult(
            num_replicas=self._num_replicas,
            num_requests=num_requests,
            num_good=tally.num_good,
            late_attainment=tally.num_late_good / tally.num_late if tally.num_late else 0.0,
            is_cut=is_cut,
            ttft_p50_s=quantile(tally.ttft_s, 0.5),
            ttft_p99_s=quantile(tally.ttft_s, 0.99),
            tpot_p99_s=quantile(tally.tpot_s, 0.99),
            num_refused=tally.num_refused,
            num_unserved=tally.num_unserved,
            busy_share=busy_s / span_s if span_s else 0.0,
        )


def _name(number: int) -> str:
    return f"replica-{number}"


def _number(name: str) -> int:
    return int(name.removeprefix("replica-"))


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
