"""What a fit cannot know of a step: how much longer or shorter it took than expected.

Factors are played back as they were recorded, so that what is slow together stays together, and a
step meets only what happened to steps about as long: the same stall triples a short step and hardly
shows in a long one.

    recorded   s  s  L  s  s  s  L  s  s          s: short, L: long, by what was expected of them
                  ▲     place: one further with every step; a long one now takes the factor of
                  └──▶  the next L, a short one that of the next s
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np

NUM_KINDS: Final = 4  # equally many steps each


@dataclass(frozen=True, slots=True)
class Jitter:
    """`factors` of all recorded steps in their order; for each kind where its next step is.

    A step is of the first kind whose `longest` (seconds, expected) it does not exceed, or the last.
    """

    factors: Sequence[float]
    longest: Sequence[float]
    following: Sequence[Sequence[int]]  # by kind, by place

    @classmethod
    def of(cls, expected_s: Sequence[float], taken_s: Sequence[float]) -> "Jitter":
        """From recorded steps: what was expected of each, and what it took. At least one."""
        expected, taken = np.asarray(expected_s), np.asarray(taken_s)
        shares = [at / NUM_KINDS for at in range(1, NUM_KINDS)]
        longest = sorted({float(one) for one in np.quantile(expected, shares)})
        kinds = np.searchsorted(longest, expected)
        following = [_following(kinds, kind) for kind in range(len(longest) + 1)]
        return cls((taken / expected).tolist(), longest, following)

    def player(self, rng: Random) -> "Player":
        """Begins anywhere."""
        return Player(self, rng.randrange(len(self.factors)))


class Player:
    """One playback. It goes round and round."""

    def __init__(self, jitter: Jitter, place: int) -> None:
        self._jitter = jitter
        self._place = place

    def next(self, seconds: float) -> float:
        """By what a step that is expected to take so long is to be multiplied."""
        jitter, place = self._jitter, self._place
        kind = sum(seconds > one for one in jitter.longest)
        self._place = (place + 1) % len(jitter.factors)
        return jitter.factors[jitter.following[kind][place]]


def _following(kinds: "np.typing.NDArray[np.int64]", kind: int) -> list[int]:
    """For each place the first one from there, round the end, that holds a step of this kind."""
    places = np.flatnonzero(kinds == kind)
    if not len(places):  # all its steps are as long as the kind before
        return list(range(len(kinds)))
    found = places[np.searchsorted(places, np.arange(len(kinds))) % len(places)]
    return [int(one) for one in found]
