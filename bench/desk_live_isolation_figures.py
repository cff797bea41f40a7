"""What isolation amounts to: repeats pooled, and how far they are from each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.desk_live_bench import Finding
from bench.desk_live_judge import LAG_P99_MAX_S
from bench.desk_live_load import Seen
from kvota.sim.records import quantile

TTFT_RATIO_MAX = 1.5
LONG_RATIO_MAX = 2.0

HEADER = (
    "| beside the short ones | short requests | not served | TTFT p50, ms | p95 | p99 "
    "| p99 of each repeat | long ended | median, s | slowest, s | lag p99, ms |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


@dataclass(slots=True)
class Repeat:
    """What was seen once."""

    short: list[Seen] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)  # sent to end, of those that were served


@dataclass(slots=True)
class Phase:
    """What was seen with a number of long requests beside the short ones."""

    name: str
    num_together: int = 1  # long ones that were sent at once
    repeats: list[Repeat] = field(default_factory=list)
    num_long_failed: int = 0

    @property
    def short(self) -> list[Seen]:
        return [one for repeat in self.repeats for one in repeat.short]

    def ttft_s(self, share: float) -> float:
        """A quantile over all repeats; 0 where nobody got a token."""
        return _ttft_s(self.short, share)

    def ttft_ratio(self, share: float, alone: "Phase") -> float:
        return _ratio(self.ttft_s(share), alone.ttft_s(share))

    def p99_ratios(self, alone: "Phase") -> list[float]:
        """Of each repeat to its own one without."""
        pairs = zip(self.repeats, alone.repeats, strict=True)
        return [_ratio(_ttft_s(a.short, 0.99), _ttft_s(b.short, 0.99)) for a, b in pairs]

    @property
    def long_times_s(self) -> list[float]:
        """How long one takes; of those sent together, until the last had ended."""
        if self.num_together == 1:
            return [long_s for repeat in self.repeats for long_s in repeat.long_s]
        return [max(repeat.long_s) for repeat in self.repeats if repeat.long_s]

    @property
    def num_lost(self) -> int:
        return sum(not one.is_whole for one in self.short)

    @property
    def lag_p99_s(self) -> float:
        return quantile([one.lag_s for one in self.short], 0.99)

    def line(self) -> str:
        long_s = [one for repeat in self.repeats for one in repeat.long_s]
        times = f"{median(long_s):.1f} | {max(long_s):.1f}" if long_s else "– | –"
        p99s = ", ".join(f"{1000 * _ttft_s(one.short, 0.99):.0f}" for one in self.repeats)
        quantiles = " | ".join(f"{1000 * self.ttft_s(share):.0f}" for share in (0.5, 0.95, 0.99))
        return (
            f"| {self.name} | {len(self.short)} | {self.num_lost} | {quantiles} | {p99s} "
            f"| {len(long_s)} | {times} | {1000 * self.lag_p99_s:.1f} |"
        )


def findings(lone_s: float, alone: Phase, one: Phase, five: Phase) -> Iterator[Finding]:
    """The targets of isolation. `lone_s`: of a long request that is alone."""
    for phase in (one, five):
        yield _short_finding(phase, alone)
        yield _long_finding(phase, lone_s)
    phases = (alone, one, five)
    num_lost = sum(phase.num_lost + phase.num_long_failed for phase in phases)
    yield Finding(num_lost == 0, f"{num_lost} requests were not served (0)")
    if max(phase.lag_p99_s for phase in phases) > LAG_P99_MAX_S:
        yield Finding(False, "the generator was late: these figures say nothing of the server")


def _short_finding(phase: Phase, alone: Phase) -> Finding:
    ratio = phase.ttft_ratio(0.99, alone)
    return Finding(
        ratio <= TTFT_RATIO_MAX,
        f"{phase.name}: p99 TTFT of the short ones {ratio:.2f} × without (at most 1.5; "
        f"repeats {_listed(phase.p99_ratios(alone))}; p95 {phase.ttft_ratio(0.95, alone):.2f} ×, "
        f"median {phase.ttft_ratio(0.5, alone):.2f} ×)",
    )


def _long_finding(phase: Phase, lone_s: float) -> Finding:
    num = phase.num_together
    ratios = [time_s / (num * lone_s) for time_s in phase.long_times_s]
    slow = median(ratios) if ratios else float("inf")
    whose = "a long one takes" if num == 1 else "all of them take"
    return Finding(
        slow <= LONG_RATIO_MAX,
        f"{phase.name}: {whose} {slow:.2f} × {num} lone times (at most 2; {_listed(ratios)})",
    )


def _ttft_s(short: Sequence[Seen], share: float) -> float:
    return quantile([one.first_s for one in short if one.first_s is not None], share)


def _ratio(with_s: float, without_s: float) -> float:
    return with_s / without_s if without_s else float("inf")


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{one:.2f}" for one in ratios) or "none"
