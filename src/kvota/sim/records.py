"""What became of every request of a simulated world, and what that says of the whole.

A request is *good* when it completed with its first token within `ttft_s` and its later tokens at
`tpot_s` each on average. Goodput is the good ones per second of the arrivals' span, so refusing or
losing a request costs as much as serving it badly.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvota.core.errors import Outcome, Refusal
from kvota.sim.faults import Strike
from kvota.traffic.arrival import Arrival, Scaling


@dataclass(slots=True)
class RequestRecord:
    """One request from arrival to ending. Seconds are durations unless named `_at_s`."""

    number: int  # place in the workload
    arrival: Arrival
    attempt: int = 0  # how often its client has been refused before
    first_at_s: float | None = None  # the client's first attempt; None: this is it
    outcome: Outcome | None = None  # None while it is open
    refusal: Refusal | None = None
    retry_after_s: float | None = None  # told with a refusal
    eta_s: float | None = None  # told on joining the line: the wait for a lease
    latest_s: float | None = None  # told instead, while nothing is known: the longest such wait
    granted_at_s: float | None = None  # the door let it through to the engine
    queued_s: float | None = None  # arrival to the first chunk
    token_at_s: list[float] = field(default_factory=list)  # of the first choice
    output_tokens: int = 0  # over all choices
    cached_tokens: int = 0
    preemptions: int = 0  # pauses among them
    pauses: int = 0  # asked for by the door
    ended_at_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """The client's first attempt to the first token of the first choice."""
        began_s = self.arrival.at_s if self.first_at_s is None else self.first_at_s
        return self.token_at_s[0] - began_s if self.token_at_s else None

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 when there is none."""
        times = self.token_at_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    @property
    def slowest_gaps_s(self) -> float:
        """Mean of the longest tenth of the gaps between tokens: it shows stalls (Mooncake)."""
        times = self.token_at_s
        gaps = sorted(after - before for before, after in pairwise(times))
        longest = gaps[-max(1, len(gaps) // 10) :] if gaps else [0.0]
        return sum(longest) / len(longest)

    @property
    def eta_error_s(self) -> float | None:
        """Told minus true wait for the lease; None when nothing was told or none was given."""
        if self.eta_s is None or self.granted_at_s is None:
            return None
        return self.eta_s - (self.granted_at_s - self.arrival.at_s)

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that two runs from one seed must agree on."""
        return (
            self.number, self.attempt, self.outcome, self.refusal, self.retry_after_s, self.eta_s,
            self.granted_at_s, self.queued_s, tuple(self.token_at_s),
            self.cached_tokens, self.preemptions, self.pauses, self.ended_at_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must get to count as good."""

    ttft_s: float
    tpot_s: float

    def is_met(self, record: RequestRecord) -> bool:
        return (
            record.outcome is Outcome.COMPLETED
            and record.ttft_s is not None
            and record.ttft_s <= self.ttft_s
            and record.tpot_s <= self.tpot_s
        )


IsGood = Callable[[RequestRecord], bool]


@dataclass(frozen=True, slots=True)
class WorldResult:
    """A finished world. Requests of its warm-up are not among the records."""

    records: Sequence[RequestRecord]
    scaling: Scaling
    seed: int
    span_s: float  # first to last arrival among them
    ended_s: float  # when the last request had ended
    num_steps: int
    busy_s: float  # of the executor
    kv_used_mean: float  # share of all blocks, over that time
    recomputed_tokens: int
    num_checks: int  # how often the invariants were proved
    num_faults: int
    struck: Sequence[Strike] = ()  # faults that were planned for a moment

    def count(self, outcome: Outcome) -> int:
        return sum(record.outcome is outcome for record in self.records)

    @property
    def outcomes(self) -> dict[str, int]:
        found = Counter(record.outcome.value for record in self.records if record.outcome)
        return dict(sorted(found.items()))

    def goodput_rps(self, is_good: IsGood) -> float:
        return sum(map(is_good, self.records)) / self.span_s if self.span_s else 0.0

    def attainment(self, is_good: IsGood) -> float:
        """The share of all requests that are good."""
        return sum(map(is_good, self.records)) / len(self.records) if self.records else 0.0

    @property
    def completed_rps(self) -> float:
        return self.count(Outcome.COMPLETED) / self.span_s if self.span_s else 0.0

    @property
    def preempted_share(self) -> float:
        """Requests preempted at least once, of those that ran."""
        ran = [record for record in self.records if record.queued_s is not None]
        return sum(record.preemptions > 0 for record in ran) / len(ran) if ran else 0.0

    @property
    def eta_errors_s(self) -> list[float]:
        return [e for record in self.records if (e := record.eta_error_s) is not None]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.num_steps, self.busy_s, *(record.key for record in self.records))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
