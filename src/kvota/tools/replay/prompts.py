"""Prompts that share exactly what a trace says they share.

A trace holds ids of blocks and no text. Each id is the seed of its block's content, so equal ids
become equal tokens and the server's prefix cache really hits; the rest of a prompt is its own.

    ids       [   0   ][   7   ][   8   ]                   content = what the id's own chance draws
    prompt    [ of 0  ][ of 7  ][ of 8  ][ this request's own ]
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from kvota.tools.load.prompts import Estimated, Prompts
from kvota.traffic.arrival import Arrival

_OfBlock = Callable[[int, int, Sequence[Any]], list[Any]]  # id, number of pieces, pieces


class SharedPrompts:
    """Prompts of one run, out of whatever pieces the server counts: token ids or words.

    Another seed makes other prompts, which a cache that saw the first run does not know.
    """

    def __init__(self, prompts: Prompts, seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._tokens_per_piece = prompts.tokens_per_word if isinstance(prompts, Estimated) else 1.0
        self._blocks: dict[tuple[int, int], list[Any]] = {}

    def make(self, arrival: Arrival, number: int) -> str | list[int]:
        """`number` tells what is this request's own from everybody else's."""
        size = max(1, round(arrival.prefix_block / self._tokens_per_piece))
        chance = _BlockwiseChance(arrival.prefix, size, f"{self._seed} own {number}", self._block)
        return self._prompts.make(arrival.prompt_tokens, chance)

    def _block(self, block: int, size: int, population: Sequence[Any]) -> list[Any]:
        found = self._blocks.get((block, size))
        if found is None:
            found = Random(f"{self._seed} block {block}").choices(population, k=size)
            self._blocks[block, size] = found
        return found


class _BlockwiseChance(Random):
    """Chance whose choices follow a prompt's blocks, and are its own behind them."""

    def __init__(self, ids: Sequence[int], size: int, own: str, block: _OfBlock) -> None:
        super().__init__(own)
        self._ids = ids
        self._size = size
        self._block = block

    def choices(
        self,
        population: Any,
        weights: Any = None,
        *,
        cum_weights: Any = None,
        k: int = 1,
    ) -> list[Any]:
        pieces: list[Any] = []
        for block in self._ids[: -(-k // self._size)]:
            pieces += self._block(block, self._size, population)
        del pieces[k:]
        own = super().choices(population, weights, cum_weights=cum_weights, k=k - len(pieces))
        return pieces + own
