"""The same traffic from more users, or from fewer.

    factor 3     each request three times: as recorded, and by two other users
    factor 0.3   three conversations of ten

Other users are of the same kind and have texts of their own. Their requests come within half a
minute of the recorded one (less in a trace of a few minutes), at random, so that minutes and hours
keep their shape in proportion and only what happened within a minute is mixed. A conversation is
moved, or left out, as a whole. Blocks that open at least half of all prompts are a system prompt,
which everybody has.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import floor
from random import Random

from kvota.traffic.arrival import Arrival

NEAR_S = 30.0  # before and behind
NEAR_SHARE = 0.05  # of the trace, at most
COMMON_SHARE = 0.5  # of the prompts, for a system prompt


def grown(arrivals: Sequence[Arrival], factor: float, seed: int) -> list[Arrival]:
    """By time. A factor of 1 is the traffic itself; no time leaves the recorded span."""
    if factor == 1:
        return list(arrivals)
    users = _Users(arrivals, seed)
    num_whole = floor(factor)
    copies = [one for copy in range(num_whole) for one in users.copy(copy, 1.0)]
    copies += users.copy(num_whole, factor - num_whole)
    return sorted(copies, key=lambda one: one.at_s)


class _Users:
    def __init__(self, arrivals: Sequence[Arrival], seed: int) -> None:
        self._arrivals = arrivals
        self._seed = seed
        self._span_s = max((one.at_s for one in arrivals), default=0.0)
        self._near_s = min(NEAR_S, NEAR_SHARE * self._span_s)
        self._common = _common_blocks(arrivals)
        self._fresh = count(1 + max((max(one.prefix, default=0) for one in arrivals), default=0))

    def copy(self, number: int, share: float) -> Iterator[Arrival]:
        """That share of the conversations, once more; number 0 is the recorded one."""
        chance = Random(f"users {self._seed} {number}")
        ids: dict[int, int] = {}
        moves: dict[object, float | None] = {}
        for at, one in enumerate(self._arrivals):
            kin = _kin(one, self._common) or at
            if kin not in moves:
                moves[kin] = (
                    chance.uniform(-self._near_s, self._near_s) if chance.random() < share else None
                )
            move_s = moves[kin]
            if move_s is None:
                continue
            yield one if number == 0 else self._moved(one, move_s, ids)

    def _moved(self, one: Arrival, move_s: float, ids: dict[int, int]) -> Arrival:
        prefix = tuple(
            block if block in self._common else ids.setdefault(block, next(self._fresh))
            for block in one.prefix
        )
        return replace(one, at_s=self._within(one.at_s + move_s), prefix=prefix)

    def _within(self, at_s: float) -> float:
        """What would leave the span is reflected at its ends: nothing piles up there."""
        return self._span_s - abs(self._span_s - abs(at_s))


def _common_blocks(arrivals: Sequence[Arrival]) -> frozenset[int]:
    uses = Counter(block for one in arrivals for block in set(one.prefix))
    least = COMMON_SHARE * len(arrivals)
    return frozenset(block for block, num in uses.items() if num >= least)


def _kin(one: Arrival, common: frozenset[int]) -> object | None:
    """What all requests of one conversation have in common; None: it is alone."""
    if one.session is not None:
        return one.session
    return next((("block", block) for block in one.prefix if block not in common), None)
