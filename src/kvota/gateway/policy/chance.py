"""Chance enters kvota through an object that is handed in, so that tests and the simulator own it.

`random.Random` is one. The composition root seeds it; policies never import `random`.
"""

from typing import Protocol


class Chance(Protocol):
    """A source of random numbers."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...


def jittered(value: float, jitter: float, chance: Chance) -> float:
    """`value` times something uniform in [1 − jitter, 1 + jitter)."""
    return value * (1 + jitter * (2 * chance.random() - 1))
