"""Exact percentiles of samples, and how far few samples can be believed.

A percentile is a sample: the smallest one that at least that share of all is not above. Nothing is
interpolated, so an infinite sample (a request that failed) is as good as any other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, lgamma, log, nan

CONFIDENCE = 0.95


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of samples in ascending order; NaN without any."""
    if not ordered:
        return nan
    return ordered[max(0, ceil(share * len(ordered) - 1e-9) - 1)]


def bounds(
    ordered: Sequence[float], share: float, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Between which samples the true percentile lies, whatever the distribution is.

    The number of samples below the true percentile is binomial, so two ranks enclose it
    (Hahn and Meeker, Statistical Intervals, 5.2). Where the samples are too few for a rank to
    be above it with such confidence, the upper bound is infinite.
    """
    num = len(ordered)
    if num == 0:
        return nan, inf
    tail = (1 - confidence) / 2
    lower, upper = None, None
    below = 0.0  # P(at most `rank` samples are below the percentile)
    for rank in range(num + 1):
        below += _binomial(num, rank, share)
        if lower is None and below > tail:
            lower = rank  # samples before this one are below it, but in `tail` of all cases
        if upper is None and below >= 1 - tail:
            upper = rank + 1
    low = ordered[lower - 1] if lower else min(0.0, ordered[0])
    return low, ordered[upper - 1] if upper is not None and upper <= num else inf


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one figure. The true p99 is from `p99_low` to `p99_high`, 95 % sure."""

    num: int
    mean: float
    p50: float
    p95: float
    p99: float
    p99_low: float
    p99_high: float
    highest: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> "Spread | None":
        """None without samples."""
        ordered = sorted(samples)
        if not ordered:
            return None
        low, high = bounds(ordered, 0.99)
        return cls(
            num=len(ordered),
            mean=sum(ordered) / len(ordered),
            p50=percentile(ordered, 0.5),
            p95=percentile(ordered, 0.95),
            p99=percentile(ordered, 0.99),
            p99_low=low,
            p99_high=high,
            highest=ordered[-1],
        )

    @property
    def is_p99_sure(self) -> bool:
        """There are enough samples to bound p99 from above: 368 of them."""
        return self.p99_high < inf


def _binomial(num: int, hits: int, share: float) -> float:
    """P(exactly `hits` of `num`), each with probability `share`."""
    choose = lgamma(num + 1) - lgamma(hits + 1) - lgamma(num - hits + 1)
    return exp(choose + hits * log(share) + (num - hits) * log(1 - share))
