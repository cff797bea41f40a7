"""KV memory as the scheduler sees it: block tables that grow, are shared, and give back.

    positions   0 ············· num_computed ····· num_tokens
    blocks      [ A ][ B ][ C ][ D · · ][ E       ]
                 └ shared, cached ┘   └ own ┘
                 never written again   written by the next step

Life of a block table:

    reserve ─▶ (extend ─▶ [a step computes] ─▶ commit)* ─▶ release
                                      └─ fork: one more table over the same blocks

Rules
- A block is written only by a table that alone refers to it. `extend` makes that true: a shared,
  half-filled last block is replaced by a new one, and the copy to make first is returned.
- A block enters the prefix cache in `commit`, when it is full and its KV has been computed;
  a step that failed is never committed. A full block that is already cached under the same name
  is dropped for the cached one, so equal prompts that run side by side end up sharing.
- A match never covers all tokens: the last one is always computed, its logits are wanted.
- Nothing waits here: a call either does all of its work or returns None and changes nothing.

Invariant, proved by `check()`: free + used + cached = total, references equal block tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvota.core.plan import BlockCopy
from kvota.kv.pool import BlockPool
from kvota.kv.prefix import BlockHash, CachedBlock, Chain, PrefixIndex, root_hash, sha256_block

NO_COPIES: tuple[BlockCopy, ...] = ()


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence. Changed only by the cache that made it."""

    blocks: list[int]  # handed to the executor as it is: position p is in blocks[p // block_size]
    chain: Chain | None  # None: neither reads nor writes the prefix cache
    num_computed: int  # positions whose KV is there
    num_indexed: int = 0  # leading blocks that are in the prefix cache
    last_indexed: CachedBlock | None = None


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Block counts: free + used + cached = total. `cached` ones are unused and may be evicted."""

    num_blocks: int
    block_size: int
    free: int
    used: int
    cached: int
    touched: int  # ever used since the start
    evictions: int  # since the start
    prefix_queried_tokens: int  # tokens of all reserves that could read the prefix cache
    prefix_hit_tokens: int  # of those, the tokens found


class KVCache:
    """All KV memory of one model.

    `namespace` names everything that changes KV for all requests alike: model, adapter, cache
    type. With `prefix_cache` False nobody should ask for a chain. `hash_block` is there so that
    tests can make hashes collide.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        namespace: str = "",
        prefix_cache: bool = True,
        hash_block: BlockHash = sha256_block,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, got {block_size}")
        self.block_size = block_size
        self._namespace = namespace
        self.has_prefix_cache = prefix_cache
        self._hash_block = hash_block
        self._index = PrefixIndex()
        self._pool = BlockPool(num_blocks, self._index.forget)
        self._tables: dict[BlockTable, None] = {}
        self._queried_tokens = 0
        self._hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that could be handed out now: free ones and cached ones that nobody uses."""
        return self._pool.num_available

    @property
    def num_tables(self) -> int:
        return len(self._tables)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def chain(self, tokens: list[int], salt: str = "") -> Chain:
        """The name under which the KV of `tokens` is cached. Hashes nothing yet.

        `tokens` is kept and may grow at its end.
        """
        root = root_hash(self._namespace, salt)
        return Chain(tokens, salt, root, self.block_size, self._hash_block)

    def match(self, chain: Chain) -> int:
        """How many leading tokens of the chain are cached now. Takes nothing."""
        return len(self._find(chain)) * self.block_size

    def reserve(
        self, num_tokens: int, chain: Chain | None, *, reads: bool = True, spare: int = 0
    ) -> BlockTable | None:
        """A table for the first `num_tokens` positions, beginning with what is cached of `chain`.

        The result's `num_computed` is the number of tokens found. None when fewer than `spare`
        blocks would stay available. `chain` None or `reads` False takes nothing from the cache.
        """
        found = self._find(chain) if chain is not None and reads else ()
        num_new = self.blocks_for(num_tokens) - len(found)
        num_woken = sum(self._pool.is_evictable(entry.block) for entry in found)
        if num_new + num_woken + spare > self._pool.num_available:
            return None
        for entry in found:
            self._pool.share(entry.block)
        blocks = [entry.block for entry in found]
        blocks.extend(self._pool.take() for _ in range(num_new))
        hit_tokens = len(found) * self.block_size
        if chain is not None and reads:
            self._queried_tokens += num_tokens
            self._hit_tokens += hit_tokens
        last = found[-1] if found else None
        table = BlockTable(blocks, chain, hit_tokens, len(found), last)
        self._tables[table] = None
        return table

    def extend(self, table: BlockTable, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Make positions `num_computed … num_tokens - 1` of the table writable.

        Returns the block copies to make before the step writes; None when blocks are missing.
        """
        blocks = table.blocks
        num_missing = -(-num_tokens // self.block_size) - len(blocks)
        first = table.num_computed // self.block_size
        is_shared = first < len(blocks) and self._pool.is_shared(blocks[first])
        if num_missing <= 0 and not is_shared:
            return NO_COPIES
        if max(num_missing, 0) + is_shared > self._pool.num_available:
            return None
        for _ in range(num_missing):
            blocks.append(self._pool.take())
        return (self._copy_on_write(blocks, first),) if is_shared else NO_COPIES

    def fork(self, table: BlockTable, tokens: list[int]) -> BlockTable:
        """A second table over the computed blocks of `table`, for `tokens`, an equal list.

        Takes no block: the shared, half-filled last one is copied when either side writes.
        """
        blocks = table.blocks[: self.blocks_for(table.num_computed)]
        for block in blocks:
            self._pool.share(block)
        chain = table.chain.fork(tokens) if table.chain is not None else None
        twin = BlockTable(blocks, chain, table.num_computed, table.num_indexed, table.last_indexed)
        self._tables[twin] = None
        return twin

    def commit(self, table: BlockTable, num_computed: int) -> None:
        """The KV of all positions below `num_computed` is there: full blocks may be shared."""
        table.num_computed = num_computed
        if table.chain is not None:
            num_full = num_computed // self.block_size
            while table.num_indexed < num_full and table.chain is not None:
                self._index_next(table, table.chain)

    def release(self, table: BlockTable) -> None:
        """Give all blocks back, tail first. The table must not be used again."""
        del self._tables[table]
        for block in reversed(table.blocks):
            self._pool.drop(block)
        table.blocks = []

    def snapshot(self) -> CacheSnapshot:
        """Counts of this moment, in O(1)."""
        pool = self._pool
        return CacheSnapshot(
            num_blocks=pool.num_blocks,
            block_size=self.block_size,
            free=pool.num_free,
            used=pool.num_used,
            cached=pool.num_evictable,
            touched=pool.num_touched,
            evictions=pool.num_evictions,
            prefix_queried_tokens=self._queried_tokens,
            prefix_hit_tokens=self._hit_tokens,
        )

    def check(self) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        for table in self._tables:
            assert len(set(table.blocks)) == len(table.blocks), "a table has a block twice"
            assert table.num_computed <= len(table.blocks) * self.block_size
            assert table.num_indexed * self.block_size <= table.num_computed
            assert (table.num_indexed > 0) == (table.last_indexed is not None)
        self._pool.check((table.blocks for table in self._tables), self._index.blocks)
        self._index.check(self._pool.eviction_order())

    def _find(self, chain: Chain) -> Sequence[CachedBlock]:
        return self._index.find(chain, (len(chain.tokens) - 1) // self.block_size)

    def _copy_on_write(self, blocks: list[int], index: int) -> BlockCopy:
        copy = BlockCopy(source=blocks[index], target=self._pool.take())
        self._pool.drop(copy.source)
        blocks[index] = copy.target
        return copy

    def _index_next(self, table: BlockTable, chain: Chain) -> None:
        """Enter the table's first full block that is not in the prefix cache."""
        index = table.num_indexed
        own = table.blocks[index]
        entry = self._index.insert(chain, index, table.last_indexed, own)
        if entry is None:
            table.chain = None  # its name is taken: nothing after it can be found either
            return
        if entry.block == own:
            self._pool.mark_indexed(own)
        else:
            self._pool.share(entry.block)
            table.blocks[index] = entry.block
            self._pool.drop(own)
        table.num_indexed = index + 1
        table.last_indexed = entry
