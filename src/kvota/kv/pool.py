"""Blocks of KV memory: who counts on each one, which are free, which may be evicted next.

    free ──take──▶ used (references ≥ 1) ──last drop──▶ free
                     ▲                        └─ when it is in the prefix index ─▶ evictable
                     └────────share───────────────────────────────────────────────────┘
                                                            evictable ──take──▶ used, forgotten

Every block is in exactly one of the three states. Every operation is O(1).

Eviction order is least recently dropped first. Whoever drops a chain of blocks drops its tail
first, and whoever holds a block holds the blocks before it, so a block always becomes evictable
after its children: leaves go first, and what most prompts share goes last.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """`num_blocks` blocks, numbered from 0. `forget(block)` is called when one is evicted."""

    def __init__(self, num_blocks: int, forget: Callable[[int], None]) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._forget = forget
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is on top
        self._num_untouched = num_blocks
        self._references = [0] * num_blocks
        self._is_indexed = bytearray(num_blocks)
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """How many `take` calls in a row would succeed now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_touched(self) -> int:
        """Blocks that were ever taken. The free ones are a stack: the rest lies at its bottom."""
        return self.num_blocks - self._num_untouched

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def is_evictable(self, block: int) -> bool:
        return block in self._evictable

    def take(self) -> int:
        """A block of its own for the caller, evicting the oldest cached one if none is free."""
        if self._free:
            block = self._free.pop()
            self._num_untouched = min(self._num_untouched, len(self._free))
        else:
            block, _ = self._evictable.popitem(last=False)
            self._is_indexed[block] = False
            self.num_evictions += 1
            self._forget(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that is used or evictable."""
        if self._references[block] == 0:
            del self._evictable[block]
        self._references[block] += 1

    def drop(self, block: int) -> None:
        """One reference less; the last one makes the block free, or evictable if indexed."""
        assert self._references[block] > 0, f"block {block} was dropped more often than taken"
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._is_indexed[block]:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def mark_indexed(self, block: int) -> None:
        """From now on the block outlives its last reference, until it is evicted."""
        assert self._references[block] > 0, f"block {block} is not used by anyone"
        self._is_indexed[block] = True

    def eviction_order(self) -> tuple[int, ...]:
        return tuple(self._evictable)

    def check(self, tables: Iterable[Iterable[int]], indexed: Iterable[int]) -> None:
        """Prove the pool against the block tables that exist and the blocks in the index.

        Raises AssertionError naming the first contradiction. O(blocks).
        """
        held = Counter(block for table in tables for block in table)
        free = set(self._free)
        used = {block for block in range(self.num_blocks) if self._references[block]}
        evictable = set(self._evictable)
        assert len(free) == len(self._free), "the free list has a block twice"
        assert not free & used, f"blocks both free and used: {free & used}"
        assert not evictable & (free | used), f"evictable blocks in use or free: {evictable}"
        total = len(free) + len(used) + len(evictable)
        assert total == self.num_blocks, f"free + used + cached = {total} ≠ {self.num_blocks}"
        for block, references in enumerate(self._references):
            assert held[block] == references, (
                f"block {block}: {references} references, but in {held[block]} block tables"
            )
        marked = {block for block in range(self.num_blocks) if self._is_indexed[block]}
        assert marked == set(indexed), "the pool and the prefix index disagree on what is cached"
        assert evictable <= marked, "a block is evictable without being cached"
        assert not free & marked, "a free block is still in the prefix index"
