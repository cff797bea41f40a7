"""Does it only grow? A slope with its confidence, and a verdict. Pure.

Memory and latency series are not independent samples: allocators keep what they got, collections
come in waves. So the time after the warm-up is cut into `NUM_BLOCKS` blocks, each block is
represented by its median, and a line is fitted to those (least squares). The confidence interval
is Student's with blocks − 2 degrees of freedom.

Verdicts. LEAK: the whole interval is above 0, the growth over the run is worth mentioning
(`growth_min`), and it does not level off: the second half alone grows at least `STEADY_SHARE` as
fast as the whole. STEADY: growth of `growth_min` is outside the interval. UNDECIDED: neither;
the run was too short or too noisy to tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import nan, sqrt
from statistics import median

NUM_BLOCKS = 16
WARM_UP_SHARE = 1 / 3
STEADY_SHARE = 0.7
NORMAL_QUANTILE = 2.5758293035489004  # 99 %, two-sided


class Verdict(StrEnum):
    LEAK = "leak"
    STEADY = "steady"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Slope:
    """Of a straight line, per second of the run; the true one is within ± `margin`, 99 % sure."""

    per_s: float
    margin: float
    level: float  # of the line, at its middle


@dataclass(frozen=True, slots=True)
class Trend:
    """What a series does after its warm-up. `span_s` is what was judged."""

    slope: Slope
    later_per_s: float  # of the second half alone
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


def trend(points: Sequence[tuple[float, float]], growth_min: float) -> Trend:
    """`points`: (seconds, value), in order of time. Growth below `growth_min` is nobody's worry."""
    blocks = _blocks(points)
    if len(blocks) < NUM_BLOCKS:
        return Trend(Slope(nan, nan, nan), nan, 0.0, growth_min, Verdict.UNDECIDED)
    slope = fit(blocks)
    later = fit(blocks[NUM_BLOCKS // 2 :])
    span_s = blocks[-1][0] - blocks[0][0]
    verdict = _verdict(slope, later.per_s, span_s, growth_min)
    return Trend(slope, later.per_s, span_s, growth_min, verdict)


def fit(points: Sequence[tuple[float, float]]) -> Slope:
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


def _verdict(slope: Slope, later_per_s: float, span_s: float, growth_min: float) -> Verdict:
    growth, margin = slope.per_s * span_s, slope.margin * span_s
    is_worth = growth >= growth_min
    if growth - margin > 0 and is_worth and later_per_s >= STEADY_SHARE * slope.per_s:
        return Verdict.LEAK
    return Verdict.STEADY if growth + margin < growth_min else Verdict.UNDECIDED


def _blocks(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The middle and the median of each block after the warm-up; blocks without points left out."""
    if len(points) < 2:
        return []
    start, end = points[0][0], points[-1][0]
    begin = start + WARM_UP_SHARE * (end - start)
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
