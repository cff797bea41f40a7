"""Where the knee is: the highest rate at which at least 90 % of all requests are served well.

Rates rise by doubling until one fails; between the last that held and the first that failed the
geometric middle is tried, `num_halvings` times. The knee is the highest rate that held below the
lowest that failed. A rate that narrowly fails is tried once more with other requests, and fails
only if it fails again: one unlucky run must not hide the half of the range above it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

ATTAINMENT_MIN = 0.9
UNLUCKY_MIN = 0.75  # with fewer, it was not bad luck
NUM_RISES_MAX = 8


@dataclass(frozen=True, slots=True)
class Knee:
    """`failed_rps`: the lowest rate that failed; None when none did."""

    rate_rps: float
    failed_rps: float | None


class NoKnee(Exception):
    """Not even the first rate was served well."""


def find_knee(
    attainment: Callable[[float, int], float], first_rps: float, num_halvings: int
) -> Knee:
    """`attainment(rate_rps, attempt)` runs one load, with other requests for each attempt."""

    def has_held(rate_rps: float) -> bool:
        found = attainment(rate_rps, 0)
        if UNLUCKY_MIN <= found < ATTAINMENT_MIN:
            found = attainment(rate_rps, 1)
        return found >= ATTAINMENT_MIN

    if not has_held(first_rps):
        raise NoKnee(f"at {first_rps:g} requests/s fewer than {ATTAINMENT_MIN:.0%} are good")
    held, failed = first_rps, None
    for _ in range(NUM_RISES_MAX):
        if not has_held(2 * held):
            failed = 2 * held
            break
        held *= 2
    for _ in range(num_halvings if failed is not None else 0):
        assert failed is not None
        middle = sqrt(held * failed)
        held, failed = (middle, failed) if has_held(middle) else (held, middle)
    return Knee(held, failed)
