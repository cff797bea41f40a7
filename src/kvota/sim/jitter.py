"""What a fit cannot know of a step: how much longer or shorter it took than expected.

Factors are played back as they were recorded, so that what is slow together stays together, and a
step meets only what happened to steps about as long: the same stall triples a short step and hardly
shows in a long one. So a kind of steps is an octave of what was expected of them, however many
they are. (Kinds of equally many steps would put the few that read prompts, which are the ones that
first tokens wait for, together with the longest of the many that do not.)

    recorded   s  s  L  s  s  s  L  s  s          s: short, L: long, by what was expected of them
                  ▲     place: one further with every step; a long one now takes the factor of
                  └──▶  the next L, a short one that of the next s

Where several prompts come at once there are long steps in a row, and the next L would be the same
for all of them. They would be fast or slow as one, which is rarer in a machine. So a step does not
take what the one of its kind before it took, but what was recorded before that.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np
import numpy.typing as npt

WIDEST: Final = 2.0  # the longest of a kind over its shortest, where it has enough of them
STEPS_MIN: Final = 30  # of a kind: with fewer, one accident is played again and again
Places = Sequence[Sequence[int]]  # by kind, by place: where a step of the kind was recorded


@dataclass(frozen=True, slots=True)
class Jitter:
    """`factors` of all recorded steps in their order; for each kind where its next step is.

    A step is of the first kind whose `longest` (seconds, expected) it does not exceed, or the last.
    """

    factors: Sequence[float]
    longest: Sequence[float]
    following: Places
    preceding: Places  # the last of its kind before `following`

    @classmethod
    def of(cls, expected_s: Sequence[float], taken_s: Sequence[float]) -> "Jitter":
        """From recorded steps: what was expected of each, and what it took. At least one."""
        expected, taken = np.asarray(expected_s), np.asarray(taken_s)
        longest = _longest(np.sort(expected))
        kinds = np.searchsorted(longest, expected)
        found = [np.flatnonzero(kinds == kind) for kind in range(len(longest) + 1)]
        following = [_around(places, len(kinds), 0) for places in found]
        preceding = [_around(places, len(kinds), -1) for places in found]
        return cls((taken / expected).tolist(), longest, following, preceding)

    def player(self, rng: Random) -> "Player":
        """Begins anywhere."""
        return Player(self, rng.randrange(len(self.factors)))


class Player:
    """One playback. It goes round and round."""

    def __init__(self, jitter: Jitter, place: int) -> None:
        self._jitter = jitter
        self._place = place
        self._taken = [-1] * len(jitter.following)  # by kind: the latest

    def next(self, seconds: float) -> float:
        """By what a step that is expected to take so long is to be multiplied."""
        jitter, place = self._jitter, self._place
        self._place = (place + 1) % len(jitter.factors)
        kind = bisect_left(jitter.longest, seconds)
        found = jitter.following[kind][place]
        if found == self._taken[kind]:
            found = jitter.preceding[kind][place]
        self._taken[kind] = found
        return jitter.factors[found]


def _longest(ordered: npt.NDArray[np.float64]) -> list[float]:
    """Of each kind but the last, the seconds of its longest step. `ordered`: of all steps."""
    longest: list[float] = []
    end = 0
    while True:
        wide = int(np.searchsorted(ordered, WIDEST * ordered[end], side="right"))
        last = ordered[min(max(wide, end + STEPS_MIN), len(ordered)) - 1]
        end = int(np.searchsorted(ordered, last, side="right"))  # equal ones are of one kind
        if len(ordered) - end < STEPS_MIN:
            return longest
        longest.append(float(last))


def _around(places: npt.NDArray[np.int64], num: int, offset: int) -> list[int]:
    """For each of `num` places the first of `places` from there, or one `offset` from that one."""
    at = np.searchsorted(places, np.arange(num)) + offset
    return [int(one) for one in places[at % len(places)]]
