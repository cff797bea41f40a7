"""A mean with its error, from pieces that are independent, while what is inside of one is not.

The tokens of one window depend on each other, so the window is the unit of chance, not the token.
With totals S and sizes n of W windows, the mean is the ratio estimator of cluster sampling
(Cochran, Sampling Techniques, 1977, section 6.3):

    mean = ΣS / Σn            error² = W/(W−1) · Σ(S − mean·n)² / (Σn)²

Bounds use Student's t with W − 1 degrees of freedom, exact by the finite series of Abramowitz and
Stegun (26.7.3 and 26.7.4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import atan, cos, inf, pi, sin, sqrt
from statistics import NormalDist

NORMAL_FROM = 400  # degrees of freedom; t and normal quantiles then differ by under 1 %
STEPS = 80  # of bisection: more than doubles can tell apart


@dataclass(frozen=True, slots=True)
class Estimate:
    """`error` is the standard error, and infinite for fewer than two pieces."""

    mean: float
    error: float
    num_pieces: int

    def low(self, confidence: float = 0.95) -> float:
        """The true mean is above this with the given confidence."""
        return self.mean - self._reach(confidence)

    def high(self, confidence: float = 0.95) -> float:
        """The true mean is below this with the given confidence."""
        return self.mean + self._reach(confidence)

    def _reach(self, confidence: float) -> float:
        if self.error in (0.0, inf):
            return self.error
        return student_quantile(confidence, self.num_pieces - 1) * self.error


def ratio(totals: Sequence[float], sizes: Sequence[float]) -> Estimate:
    """The mean per unit of size, over pieces of different size. There must be one at least."""
    assert len(totals) == len(sizes), "a size for each total"
    num, size = len(totals), sum(sizes)
    assert size > 0, "nothing was measured"
    mean = sum(totals) / size
    if num < 2:
        return Estimate(mean, inf, num)
    squares = sum((total - mean * own) ** 2 for total, own in zip(totals, sizes, strict=True))
    return Estimate(mean, sqrt(num / (num - 1) * squares) / size, num)


def student_quantile(probability: float, freedom: int) -> float:
    """t with P(T ≤ t) = probability, for 0.5 ≤ probability < 1 and freedom ≥ 1."""
    assert 0.5 <= probability < 1, probability
    assert freedom >= 1, freedom
    if freedom >= NORMAL_FROM:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, pi / 2  # the angle atan(t / √freedom)
    for _ in range(STEPS):
        middle = (low + high) / 2
        if (1 + _central(middle, freedom)) / 2 < probability:
            low = middle
        else:
            high = middle
    return sqrt(freedom) * sin(low) / cos(low)


def student_probability(t: float, freedom: int) -> float:
    """P(T ≤ t) for t ≥ 0."""
    return (1 + _central(atan(t / sqrt(freedom)), freedom)) / 2


def _central(angle: float, freedom: int) -> float:
    """P(|T| ≤ t), with angle = atan(t / √freedom)."""
    is_odd = freedom % 2 == 1
    term = cos(angle) if is_odd else 1.0
    total = 0.0
    for step in range(freedom // 2):
        total += term
        above, below = (2 * step + 2, 2 * step + 3) if is_odd else (2 * step + 1, 2 * step + 2)
        term *= cos(angle) ** 2 * above / below
    if is_odd:
        return 2 / pi * (angle + sin(angle) * total)
    return sin(angle) * total
