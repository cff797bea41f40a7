import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvota.kv.pool import BlockPool


def new_pool(num_blocks: int) -> tuple[BlockPool, list[int]]:
    forgotten: list[int] = []
    return BlockPool(num_blocks, forgotten.append), forgotten


def test_a_block_that_nobody_needs_is_free_again() -> None:
    pool, _ = new_pool(2)
    block = pool.take()
    pool.share(block)
    pool.drop(block)
    assert (pool.num_free, pool.num_used) == (1, 1)
    pool.drop(block)
    assert (pool.num_free, pool.num_used) == (2, 0)


def test_an_indexed_block_outlives_its_last_reference_and_can_be_used_again() -> None:
    pool, forgotten = new_pool(2)
    block = pool.take()
    pool.mark_indexed(block)
    pool.drop(block)
    assert (pool.num_free, pool.num_evictable, pool.num_available) == (1, 1, 2)
    pool.share(block)
    assert (pool.num_evictable, pool.num_used) == (0, 1)
    assert forgotten == []


def test_free_blocks_go_first_then_the_longest_unused_one() -> None:
    pool, forgotten = new_pool(3)
    first, second, third = (pool.take() for _ in range(3))
    for block in (first, second):
        pool.mark_indexed(block)
    for block in (second, third, first):
        pool.drop(block)
    assert pool.take() == third
    assert forgotten == []
    assert pool.take() == second
    assert forgotten == [second]
    pool.share(first)
    assert pool.num_available == 0


def test_a_chain_dropped_from_its_tail_is_evicted_from_its_tail() -> None:
    pool, forgotten = new_pool(3)
    chain = [pool.take() for _ in range(3)]
    for block in chain:
        pool.mark_indexed(block)
    for block in reversed(chain):
        pool.drop(block)
    for _ in chain:
        pool.take()
    assert forgotten == chain[::-1]


def test_dropping_too_often_is_our_bug() -> None:
    pool, _ = new_pool(1)
    block = pool.take()
    pool.drop(block)
    with pytest.raises(AssertionError, match="dropped more often than taken"):
        pool.drop(block)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        new_pool(0)


@pytest.mark.parametrize(
    ("tables", "indexed", "complaint"),
    [([[0, 1]], [], "in 0 block tables|in 1 block tables"), ([[0]], [0], "disagree")],
)
def test_check_sees_tables_and_an_index_that_do_not_fit(
    tables: list[list[int]], indexed: list[int], complaint: str
) -> None:
    pool, _ = new_pool(2)
    assert pool.take() == 0
    pool.check([[0]], [])
    with pytest.raises(AssertionError, match=complaint):
        pool.check(tables, indexed)


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool against the obvious one: a list of holders per block and a list in drop order."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks: int) -> None:
        self.pool, self.forgotten = new_pool(num_blocks)
        self.num_blocks = num_blocks
        self.touched: set[int] = set()
        self.held: list[int] = []  # one entry per reference
        self.indexed: set[int] = set()
        self.evictable: list[int] = []  # in the order in which they must go

    @precondition(lambda self: len(set(self.held)) < self.num_blocks)
    @rule()
    def take(self) -> None:
        has_free = len(set(self.held)) + len(self.evictable) < self.num_blocks
        block = self.pool.take()
        self.touched.add(block)
        assert block not in self.held
        if not has_free:
            assert block == self.evictable.pop(0) == self.forgotten[-1]
            self.indexed.remove(block)
        assert block not in self.evictable
        self.held.append(block)

    @precondition(lambda self: self.held or self.evictable)
    @rule(index=st.integers(0, 10_000))
    def share(self, index: int) -> None:
        known = sorted({*self.held, *self.evictable})
        block = known[index % len(known)]
        self.pool.share(block)
        self.held.append(block)
        self.evictable = [other for other in self.evictable if other != block]

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 10_000))
    def drop(self, index: int) -> None:
        block = self.held.pop(index % len(self.held))
        self.pool.drop(block)
        if block in self.indexed and block not in self.held:
            self.evictable.append(block)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 10_000))
    def enter_the_index(self, index: int) -> None:
        block = self.held[index % len(self.held)]
        self.pool.mark_indexed(block)
        self.indexed.add(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check([[block] for block in self.held], self.indexed)
        assert list(self.pool.eviction_order()) == self.evictable
        assert self.pool.num_used == len(set(self.held))
        assert self.pool.num_available == self.num_blocks - len(set(self.held))
        assert self.pool.num_evictions == len(self.forgotten)
        assert self.pool.num_touched == len(self.touched)


TestPoolAgainstModel = PoolAgainstModel.TestCase
