"""The KV pool as a car park: every bay stands for the same number of blocks.

    ┌───────────────────────┐
    │A A A B B C . . . . . .│      A to Z  held by one request       +  by several in one bay
    │D D . . . . . . . . . .│      #       in use, nobody's by name  ░  cached   ·  free
    └───────────────────────┘

The drawing is true to proportion, not to place: where a block lies in memory means nothing.
"""

import math
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

LETTERS = string.ascii_uppercase + string.ascii_lowercase
SEVERAL = "+"
UNNAMED = "#"


class Spot(StrEnum):
    """What a block is used for."""

    USED = "used"
    CACHED = "cached"  # free to take, but still holding a prefix that may be asked for again
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many blocks are what."""

    used: int = 0
    cached: int = 0
    free: int = 0

    @property
    def total(self) -> int:
        return self.used + self.cached + self.free


@dataclass(frozen=True, slots=True)
class Bay:
    """One cell of the drawing. `letter` is set exactly when `spot` is USED."""

    spot: Spot
    letter: str | None = None


def blocks_per_bay(num_blocks: int, num_bays: int) -> int:
    """How many blocks a bay must stand for so that all of them find room."""
    return max(1, math.ceil(num_blocks / max(1, num_bays)))


def park(blocks: Blocks, holdings: Sequence[tuple[str, int]], num_bays: int) -> list[Bay]:
    """At most `num_bays` bays: requests' blocks in order, other used ones, cached, free.

    `holdings` are letters with the blocks they hold. Blocks that several requests share are
    counted by each of them, so holdings may add up to more than is used; then they are scaled.
    """
    width = blocks_per_bay(blocks.total, num_bays)
    line = list(_line(blocks, holdings))
    return [_bay(line[at : at + width]) for at in range(0, len(line), width)]


def _line(blocks: Blocks, holdings: Sequence[tuple[str, int]]) -> Iterable[Bay]:
    """One Bay for each block."""
    held = sum(count for _, count in holdings)
    scale = min(1.0, blocks.used / held) if held else 0.0
    so_far, parked = 0, 0
    for letter, count in holdings:
        so_far += count
        end = math.floor(so_far * scale + 0.5)
        yield from [Bay(Spot.USED, letter)] * (end - parked)
        parked = end
    yield from [Bay(Spot.USED, UNNAMED)] * (blocks.used - parked)
    yield from [Bay(Spot.CACHED)] * blocks.cached
    yield from [Bay(Spot.FREE)] * blocks.free


def _bay(content: Sequence[Bay]) -> Bay:
    """What most of a bay is; used before cached before free where that is even."""
    spots = Counter(block.spot for block in content)
    spot = max(Spot, key=lambda spot: spots[spot])
    if spot is not Spot.USED:
        return Bay(spot)
    letters = Counter(block.letter for block in content if block.letter)
    letter, most = letters.most_common(1)[0]
    return Bay(spot, letter if 2 * most >= letters.total() else SEVERAL)


class Letters:
    """Gives each request a letter for as long as it is there.

    A letter that comes free is the last to be given again, so that eyes can follow.
    """

    def __init__(self) -> None:
        self._of: dict[str, str] = {}
        self._free = list(LETTERS)

    def assign(self, ids: Sequence[str]) -> dict[str, str]:
        """The letters of exactly these requests; SEVERAL for those beyond the alphabet."""
        for gone in self._of.keys() - set(ids):
            letter = self._of.pop(gone)
            if letter != SEVERAL:
                self._free.append(letter)
        for id_ in ids:
            if self._of.get(id_, SEVERAL) == SEVERAL:
                self._of[id_] = self._free.pop(0) if self._free else SEVERAL
        return dict(self._of)
