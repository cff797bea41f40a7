"""Prefix cache: full blocks of computed KV, found again by what they stand for.

KV at a position depends on every token up to it, so a block is named by a chain:

    root = H(namespace, salt) ── h0 = H(root, tokens 0…B-1) ── h1 = H(h0, tokens B…2B-1) ── …

`namespace` says which model and adapter computed it, `salt` keeps tenants apart. The hash only
finds a candidate. It is a hit only if its stored tokens and its parent, the very entry matched
one step before, are equal too; so a colliding hash costs a miss and never serves another's KV.

A chain is hashed block by block and only as far as someone asks, once in its life: tokens are
only ever appended, so a sequence that waits, or is preempted, is not hashed again. Nor is what was
found of it compared again: an entry never changes, and outlives all that came after it in a chain.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

BlockHash = Callable[[bytes, list[int]], bytes]
"""(parent's hash, the block's token ids) -> the block's hash."""


def sha256_block(parent: bytes, tokens: list[int]) -> bytes:
    """SHA-256, so that nobody can make a prompt whose blocks collide with another's."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


def root_hash(namespace: str, salt: str) -> bytes:
    """Injective in both parts: the length of the first is written before it."""
    name = namespace.encode()
    return sha256(len(name).to_bytes(8, "little") + name + salt.encode()).digest()


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlock:
    """One entry of the index. Entries are compared by identity."""

    block: int
    hash: bytes
    parent: "CachedBlock | None"
    tokens: list[int]
    salt: str


class Chain:
    """The block hashes of one growing token list, made when first asked for."""

    __slots__ = ("_hash_block", "_hashes", "block_size", "found", "salt", "tokens")

    def __init__(
        self, tokens: list[int], salt: str, root: bytes, block_size: int, hash_block: BlockHash
    ) -> None:
        self.tokens = tokens  # the sequence's own list: only ever appended to
        self.salt = salt
        self.block_size = block_size
        self._hash_block = hash_block
        self._hashes = [root]
        self.found: list[CachedBlock] = []  # the index's: as far as it was looked for

    @property
    def num_hashed(self) -> int:
        return len(self._hashes) - 1

    def block_tokens(self, index: int) -> list[int]:
        start = index * self.block_size
        return self.tokens[start : start + self.block_size]

    def hash_of(self, index: int) -> bytes:
        """The hash of full block `index`, from the last one that is known."""
        hashes = self._hashes
        while len(hashes) <= index + 1:
            hashes.append(self._hash_block(hashes[-1], self.block_tokens(len(hashes) - 1)))
        return hashes[index + 1]

    def fork(self, tokens: list[int]) -> "Chain":
        """The chain of `tokens`, an equal copy that will grow on its own."""
        twin = Chain(tokens, self.salt, self._hashes[0], self.block_size, self._hash_block)
        twin._hashes = self._hashes.copy()
        return twin


class PrefixIndex:
    """All cached blocks, by hash and by block number."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}

    @property
    def blocks(self) -> Collection[int]:
        return self._by_block.keys()

    def find(self, chain: Chain, num_blocks_max: int) -> Sequence[CachedBlock]:
        """The longest cached run from the start of `chain`, until the next call for it.

        `num_blocks_max` only grows. Cost: O(what has come or gone since it was asked last).
        """
        found = chain.found
        while found and self._by_block.get(found[-1].block) is not found[-1]:
            found.pop()
        for index in range(len(found), num_blocks_max):
            entry = self._by_hash.get(chain.hash_of(index))
            parent = found[-1] if found else None
            if entry is None or not self._is_same(entry, chain, index, parent):
                break
            found.append(entry)
        return found

    def insert(
        self, chain: Chain, index: int, parent: CachedBlock | None, block: int
    ) -> CachedBlock | None:
        """Enter `block` as block `index` of `chain`, or return the equal entry that is there.

        None when the hash is taken by something else: then this block, and what follows it,
        cannot be cached.
        """
        key = chain.hash_of(index)
        entry = self._by_hash.get(key)
        if entry is not None:
            return entry if self._is_same(entry, chain, index, parent) else None
        entry = CachedBlock(block, key, parent, chain.block_tokens(index), chain.salt)
        self._by_hash[key] = self._by_block[block] = entry
        return entry

    def forget(self, block: int) -> None:
        """The block's memory is about to hold something else."""
        entry = self._by_block.pop(block)
        del self._by_hash[entry.hash]

    @staticmethod
    def _is_same(entry: CachedBlock, chain: Chain, index: int, parent: CachedBlock | None) -> bool:
        return (
            entry.parent is parent
            and entry.tokens == chain.block_tokens(index)
            and (parent is not None or entry.salt == chain.salt)
        )

    def check(self, eviction_order: Iterable[int]) -> None:
        """Prove that both tables agree and that no block is evicted before its children."""
        assert len(self._by_hash) == len(self._by_block), "an entry is in one table only"
        turn = {block: position for position, block in enumerate(eviction_order)}
        for block, entry in self._by_block.items():
            assert entry.block == block, f"entry of block {entry.block} is filed under {block}"
            assert self._by_hash.get(entry.hash) is entry, f"block {block} cannot be found by hash"
            parent = entry.parent
            if parent is None:
                continue
            assert self._by_block.get(parent.block) is parent, f"block {block} lost its parent"
            if parent.block in turn:
                assert block in turn, f"block {block} is in use, but its parent is not"
                assert turn[block] < turn[parent.block], f"block {block} outlives its parent"
