"""Does it only grow? A slope with its confidence, and a verdict. Pure.

Memory and latency series are not independent samples: allocators keep what they got, collections
come in waves. So the time after the warm-up is cut into `NUM_BLOCKS` blocks, each block is
represented by its median, and a line is fitted to those (least squares). The confidence interval
is Student's with blocks − 2 degrees of freedom. The second half of that time, cut into as many
blocks of its own, gets a line as well: what the series does lately.

    |- warm-up: a third -|- judged ------------------------|
                                          |- lately -------|

Growth of less than `growth_min` over the judged time is nobody's worry; as a rate, that is the
resolution of the run. Verdicts, the first that holds:

LEAK        the judged time grows: its interval is above 0, and the growth is worth mentioning; it
            does not level off: lately it grows at least `STEADY_SHARE` as fast as the whole; and it
            is no single step: without its largest rise, at least half of that share remains
STEADY      the interval of the judged time is below the resolution
SETTLED     it did grow, but lately the interval is below that same resolution
UNDECIDED   the run was too short or too noisy to tell

STEADY and SETTLED name a rate that a leak may still have: the upper end of the interval. A series
that grows at the resolution or faster is called one of them in at most 1 run of 100. What changes
more slowly than the run is long looks like a leak: a cache that fills for hours, a rare collection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import nan, sqrt
from statistics import median

Points = Sequence[tuple[float, float]]

NUM_BLOCKS = 16
NUM_LATE_BLOCKS_MIN = 8  # of requests, which are few, some blocks may have none
WARM_UP_SHARE = 1 / 3
LATE_SHARE = 2 / 3  # of the run, where "lately" begins
STEADY_SHARE = 0.7
NORMAL_QUANTILE = 2.5758293035489004  # 99 %, two-sided


class Verdict(StrEnum):
    LEAK = "leak"
    STEADY = "steady"
    SETTLED = "settled"
    UNDECIDED = "undecided"

    @property
    def is_good(self) -> bool:
        return self in (Verdict.STEADY, Verdict.SETTLED)


@dataclass(frozen=True, slots=True)
class Slope:
    """Of a straight line, per second of the run; the true one is within ± `margin`, 99 % sure."""

    per_s: float
    margin: float
    level: float  # of the line, at its middle

    @property
    def most_per_s(self) -> float:
        """The upper end of the interval."""
        return self.per_s + self.margin


@dataclass(frozen=True, slots=True)
class Trend:
    """What a series does after its warm-up. `span_s` is what was judged."""

    slope: Slope
    later: Slope  # of the second half alone
    span_s: float
    growth_min: float
    verdict: Verdict

    @property
    def growth(self) -> float:
        """Over the judged time, in the series' unit."""
        return self.slope.per_s * self.span_s

    @property
    def growth_margin(self) -> float:
        return self.slope.margin * self.span_s

    @property
    def resolution_per_s(self) -> float:
        """Growth of less is nobody's worry."""
        return self.growth_min / self.span_s if self.span_s else nan

    @property
    def leak_max_per_s(self) -> float:
        """What leaks faster is excluded, 99 % sure: by the whole time, or by its second half."""
        steady = self.verdict is Verdict.STEADY
        return max(0.0, (self.slope if steady else self.later).most_per_s)


def trend(points: Points, growth_min: float) -> Trend:
    """`points`: (seconds, value), in order of time. Growth below `growth_min` is nobody's worry."""
    blocks, late_blocks = _blocks(points, WARM_UP_SHARE), _blocks(points, LATE_SHARE)
    if len(blocks) < NUM_BLOCKS or len(late_blocks) < NUM_LATE_BLOCKS_MIN:
        unknown = Slope(nan, nan, nan)
        return Trend(unknown, unknown, 0.0, growth_min, Verdict.UNDECIDED)
    later = fit(late_blocks)
    verdict = _verdict(blocks, later, growth_min)
    return Trend(fit(blocks), later, _span_s(blocks), growth_min, verdict)


def fit(points: Points) -> Slope:
    """Least squares with Student's interval; at least three points at different times."""
    num = len(points)
    mean_x = sum(x for x, _ in points) / num
    mean_y = sum(y for _, y in points) / num
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    per_s = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    squares = sum((y - mean_y - per_s * (x - mean_x)) ** 2 for x, y in points)
    error = sqrt(squares / (num - 2) / spread)
    return Slope(per_s, student_quantile(num - 2) * error, mean_y)


def student_quantile(degrees: int) -> float:
    """The 99.5 % point of Student's t: Hill's expansion in 1/degrees around the normal one.

    Abramowitz and Stegun 26.7.5; within 0.5 % from 6 degrees on.
    """
    z = NORMAL_QUANTILE
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / float(degrees) ** power for power, term in enumerate(terms))


def _verdict(blocks: Points, later: Slope, growth_min: float) -> Verdict:
    whole, span_s = fit(blocks), _span_s(blocks)
    grows = whole.per_s > whole.margin and whole.per_s * span_s >= growth_min
    levels_off = later.per_s < STEADY_SHARE * whole.per_s
    if grows and not levels_off and not _is_one_step(blocks, whole):
        return Verdict.LEAK
    if whole.most_per_s * span_s < growth_min:
        return Verdict.STEADY
    is_flat_lately = later.most_per_s * span_s < growth_min
    return Verdict.SETTLED if is_flat_lately else Verdict.UNDECIDED


def _is_one_step(blocks: Points, whole: Slope) -> bool:
    """Is most of the growth one rise, between one block and the next?"""
    rises = [after - before for (_, before), (_, after) in pairwise(blocks)]
    largest = max(rises)
    first_after = rises.index(largest) + 1
    levelled = [
        (at, value - (largest if number >= first_after else 0.0))
        for number, (at, value) in enumerate(blocks)
    ]
    return fit(levelled).per_s < STEADY_SHARE / 2 * whole.per_s


def _span_s(blocks: Points) -> float:
    return blocks[-1][0] - blocks[0][0]


def _blocks(points: Points, begin_share: float) -> list[tuple[float, float]]:
    """The middle and the median of each block from that share of the time on.

    Blocks without points are left out.
    """
    if len(points) < 2:
        return []
    start, end = points[0][0], points[-1][0]
    begin = start + begin_share * (end - start)
    width = (end - begin) / NUM_BLOCKS
    if width <= 0:
        return []
    values: list[list[float]] = [[] for _ in range(NUM_BLOCKS)]
    for at, value in points:
        if at >= begin:
            values[min(NUM_BLOCKS - 1, int((at - begin) / width))].append(value)
    return [
        (begin + (number + 0.5) * width, median(block))
        for number, block in enumerate(values)
        if block
    ]
