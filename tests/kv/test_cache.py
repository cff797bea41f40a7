import pytest

from kvota.core.plan import BlockCopy
from kvota.kv.cache import BlockTable, KVCache
from kvota.kv.prefix import Chain


def computed(cache: KVCache, tokens: list[int], chain: Chain | None) -> BlockTable:
    """A table whose tokens are all in KV."""
    table = cache.reserve(len(tokens), chain)
    assert table is not None
    cache.commit(table, len(tokens))
    cache.check()
    return table


def counts(cache: KVCache) -> tuple[int, int, int]:
    snapshot = cache.snapshot()
    return snapshot.free, snapshot.used, snapshot.cached


def test_blocks_come_back_as_cached_or_free_and_the_sum_is_always_the_total() -> None:
    cache = KVCache(8, 4)
    tokens = list(range(10))
    table = computed(cache, tokens, cache.chain(tokens))
    assert counts(cache) == (5, 3, 0)
    cache.release(table)
    cache.check()
    assert counts(cache) == (6, 0, 2), "two full blocks stay cached, the half-filled one is free"


def test_a_known_prompt_is_found_but_never_all_of_it() -> None:
    cache = KVCache(8, 4)
    tokens = list(range(8))
    cache.release(computed(cache, tokens, cache.chain(tokens)))
    assert cache.match(cache.chain(list(range(8)))) == 4
    assert cache.match(cache.chain(list(range(9)))) == 8
    again = cache.reserve(8, cache.chain(list(range(8))))
    assert again is not None
    assert again.num_computed == 4


def test_a_block_is_not_cached_before_it_is_computed() -> None:
    cache = KVCache(8, 4)
    tokens = list(range(9))
    table = cache.reserve(9, cache.chain(tokens))
    assert table is not None
    assert cache.match(cache.chain(list(range(9)))) == 0
    cache.commit(table, 7)
    assert cache.match(cache.chain(list(range(9)))) == 4
    cache.commit(table, 8)
    assert cache.match(cache.chain(list(range(9)))) == 8


def test_a_running_prefix_is_shared_and_counted_once() -> None:
    cache = KVCache(8, 4)
    first = computed(cache, list(range(9)), cache.chain(list(range(9))))
    second = cache.reserve(10, cache.chain([*range(8), 50, 51]))
    assert second is not None
    assert second.blocks[:2] == first.blocks[:2]
    assert counts(cache) == (4, 4, 0)
    cache.check()


def test_equal_prompts_that_ran_side_by_side_end_up_sharing() -> None:
    cache = KVCache(8, 4)
    tables = [cache.reserve(8, cache.chain(list(range(8)))) for _ in range(2)]
    one, other = tables
    assert one is not None
    assert other is not None
    assert not set(one.blocks) & set(other.blocks)
    for table in (one, other):
        cache.commit(table, 8)
        cache.check()
    assert one.blocks == other.blocks
    assert counts(cache) == (6, 2, 0)


def test_opting_out_neither_reads_nor_writes() -> None:
    cache = KVCache(8, 4)
    tokens = list(range(8))
    secret = computed(cache, tokens, None)
    assert cache.match(cache.chain([*tokens, 1])) == 0
    cache.release(secret)
    assert counts(cache) == (8, 0, 0)
    cache.release(computed(cache, tokens, cache.chain(tokens)))
    blind = cache.reserve(8, None)
    assert blind is not None
    assert blind.num_computed == 0


def test_a_table_may_write_the_cache_without_reading_it() -> None:
    cache = KVCache(8, 4)
    tokens = list(range(9))
    cache.release(computed(cache, tokens, cache.chain(tokens)))
    table = cache.reserve(9, cache.chain(list(tokens)), reads=False)
    assert table is not None
    assert table.num_computed == 0
    cache.commit(table, 9)
    cache.check()
    assert counts(cache) == (5, 3, 0), "what it computed again is dropped for what was cached"


def test_reserve_takes_all_or_nothing() -> None:
    cache = KVCache(4, 4)
    known = list(range(8))
    cache.release(computed(cache, known, cache.chain(known)))
    before = counts(cache)
    assert cache.reserve(17, cache.chain([*known, *range(50, 59)])) is None
    assert cache.reserve(9, cache.chain([*known, 50]), spare=2) is None
    assert counts(cache) == before
    assert cache.reserve(9, cache.chain([*known, 50]), spare=1) is not None
    cache.check()


def test_found_blocks_that_nobody_uses_do_not_count_as_room() -> None:
    cache = KVCache(3, 4)
    known = list(range(12))
    cache.release(computed(cache, known, cache.chain(known)))
    assert cache.num_available == 3
    assert cache.reserve(16, cache.chain([*range(12), 1])) is None
    table = cache.reserve(12, cache.chain([*range(8), 90, 91, 92, 93]))
    assert table is not None
    assert table.num_computed == 8
    cache.check()


def test_extend_grows_by_whole_blocks_only_when_needed() -> None:
    cache = KVCache(2, 4)
    table = computed(cache, [1, 2, 3], None)
    assert cache.extend(table, 4) == ()
    assert len(table.blocks) == 1
    assert cache.extend(table, 5) == ()
    assert len(table.blocks) == 2
    assert cache.extend(table, 9) is None
    assert len(table.blocks) == 2


def test_a_shared_half_filled_block_is_copied_for_whoever_writes_first() -> None:
    cache = KVCache(8, 4)
    tokens = list(range(6))
    parent = computed(cache, tokens, cache.chain(tokens))
    twin = cache.fork(parent, list(tokens))
    assert twin.blocks == parent.blocks
    shared = parent.blocks[1]
    copies = cache.extend(twin, 7)
    assert copies == (BlockCopy(source=shared, target=twin.blocks[1]),)
    assert parent.blocks[1] == shared
    assert cache.extend(parent, 7) == (), "the last holder writes in place"
    cache.check()


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    cache = KVCache(8, 4)
    parent = computed(cache, list(range(8)), cache.chain(list(range(8))))
    twin = cache.fork(parent, list(range(8)))
    assert cache.extend(parent, 9) == cache.extend(twin, 9) == ()
    assert parent.blocks[:2] == twin.blocks[:2]
    assert parent.blocks[2] != twin.blocks[2]
    cache.check()


def test_a_copy_that_finds_no_block_changes_nothing() -> None:
    cache = KVCache(1, 4)
    parent = computed(cache, [1, 2], None)
    twin = cache.fork(parent, [1, 2])
    assert cache.extend(twin, 3) is None
    assert twin.blocks == parent.blocks
    cache.release(parent)
    assert cache.extend(twin, 3) == ()
    cache.check()


def test_what_the_most_prompts_share_is_evicted_last() -> None:
    cache = KVCache(4, 2)
    system = [1, 2]
    for question in ([3, 4], [5, 6]):
        tokens = [*system, *question]
        cache.release(computed(cache, tokens, cache.chain(tokens)))
    big = cache.reserve(6, None)
    assert big is not None
    cache.check()
    assert cache.match(cache.chain([*system, 9])) == 2
    assert cache.snapshot().evictions == 2


def test_a_salt_and_a_namespace_keep_caches_apart() -> None:
    cache = KVCache(8, 2, namespace="model-a")
    tokens = [1, 2, 3]
    cache.release(computed(cache, tokens, cache.chain(tokens, "blue")))
    assert cache.match(cache.chain([1, 2, 3], "blue")) == 2
    assert cache.match(cache.chain([1, 2, 3], "red")) == 0
    other = KVCache(8, 2, namespace="model-b")
    assert other.chain([1, 2, 3]).hash_of(0) != cache.chain([1, 2, 3]).hash_of(0)


def test_the_snapshot_counts_what_was_asked_of_the_prefix_cache_and_found() -> None:
    cache = KVCache(8, 2)
    tokens = [1, 2, 3]
    for _ in range(2):
        cache.release(computed(cache, tokens, cache.chain(tokens)))
    computed(cache, tokens, None)
    snapshot = cache.snapshot()
    assert (snapshot.prefix_queried_tokens, snapshot.prefix_hit_tokens) == (6, 2)


def test_a_table_is_released_once() -> None:
    cache = KVCache(2, 4)
    table = computed(cache, [1], None)
    cache.release(table)
    with pytest.raises(KeyError):
        cache.release(table)


def test_check_sees_a_block_that_two_tables_claim() -> None:
    cache = KVCache(4, 4)
    one = computed(cache, [1], None)
    other = computed(cache, [2], None)
    other.blocks[0] = one.blocks[0]
    with pytest.raises(AssertionError, match="references"):
        cache.check()


def test_a_block_holds_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        KVCache(4, 0)


def test_a_cache_without_prefixes_says_so() -> None:
    assert KVCache(8, 4).has_prefix_cache
    assert not KVCache(8, 4, prefix_cache=False).has_prefix_cache
