"""Hashing that moves no more keys than it must, and a memory that forgets in the right order."""

from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.gateway.policy.affinity import (
    CUTS_MAX,
    NO_PREFIX,
    PrefixMemory,
    hash64,
    prefix_chain,
    rendezvous_owner,
)

KEYS = [f"conversation-{number}" for number in range(4_000)]
names = st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=6, unique=True)


def owners(weights: dict[str, float]) -> dict[str, str | None]:
    return {key: rendezvous_owner(key, weights) for key in KEYS}


def moved(before: dict[str, str | None], after: dict[str, str | None]) -> list[str]:
    return [key for key in KEYS if before[key] != after[key]]


@settings(deadline=None)
@given(names, st.data())
def test_removing_an_owner_moves_only_its_keys(owners: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(owners))
    before, after = dict.fromkeys(owners, 1.0), dict.fromkeys(owners, 1.0)
    del after[gone]
    for key in KEYS[:50]:
        if rendezvous_owner(key, before) != gone:
            assert rendezvous_owner(key, after) == rendezvous_owner(key, before)


@settings(deadline=None)
@given(names, st.data(), st.floats(0, 10))
def test_a_changed_weight_moves_keys_only_to_or_from_its_owner(
    owners: list[str], data: st.DataObject, weight: float
) -> None:
    changed = data.draw(st.sampled_from(owners))
    before = {one: data.draw(st.floats(0.1, 10)) for one in owners}
    after = {**before, changed: weight}
    for key in KEYS[:50]:
        old, new = rendezvous_owner(key, before), rendezvous_owner(key, after)
        if old != new:
            assert (new == changed) if weight > before[changed] else (old == changed)


def test_keys_are_shared_by_weight() -> None:
    shares = Counter(owners({"a": 6.0, "b": 3.0, "c": 1.0, "idle": 0.0}).values())
    assert shares["idle"] == 0
    for owner, expected in (("a", 0.6), ("b", 0.3), ("c", 0.1)):
        # four standard deviations of a binomial share
        slack = 4 * (expected * (1 - expected) / len(KEYS)) ** 0.5
        assert shares[owner] / len(KEYS) == pytest.approx(expected, abs=slack)


def test_only_the_necessary_share_of_keys_moves() -> None:
    before = owners({"v1": 90.0, "v2": 10.0})
    after = owners({"v1": 80.0, "v2": 20.0})
    keys = moved(before, after)
    assert all(after[key] == "v2" for key in keys)
    assert len(keys) / len(KEYS) == pytest.approx(0.1, abs=0.02)


def test_nobody_owns_a_key_when_nobody_has_weight() -> None:
    assert rendezvous_owner("key", {}) is None
    assert rendezvous_owner("key", {"a": 0.0}) is None


def test_hashes_are_the_same_on_every_machine_and_know_where_parts_end() -> None:
    assert hash64("ab", "c") != hash64("a", "bc")
    framed = b"\0\0\0\0\0\0\0\5kvota" + b"\0\0\0\0\0\0\0\1" + b"1"
    expected = int.from_bytes(blake2b(framed, digest_size=8).digest(), "big")
    assert hash64("kvota", "1") == expected


@settings(deadline=None)
@given(st.text(max_size=1_500), st.text(max_size=700), st.text(max_size=700))
def test_texts_share_the_cuts_of_what_they_share(start: str, one: str, other: str) -> None:
    first, second = prefix_chain(start + one), prefix_chain(start + other)
    shared = len(prefix_chain(start).hashes)
    assert first.hashes[:shared] == second.hashes[:shared]
    for depth, (mine, theirs) in enumerate(zip(first.hashes, second.hashes, strict=False)):
        if mine == theirs:
            end = round(first.share(depth + 1) * first.length)
            assert (start + one)[:end] == (start + other)[:end]


def test_a_salt_keeps_texts_apart() -> None:
    text = "x" * 1_000
    assert not set(prefix_chain(text, "a").hashes) & set(prefix_chain(text, "b").hashes)


def test_a_short_text_has_no_chain_and_a_huge_one_a_bounded_one() -> None:
    assert prefix_chain("hello").hashes == ()
    huge = prefix_chain("x" * 1_000_000)
    assert len(huge.hashes) == CUTS_MAX
    assert 0 < huge.share(CUTS_MAX) < 1
    assert NO_PREFIX.share(0) == 0.0


def test_most_of_a_text_is_known_again_by_its_cuts() -> None:
    for length in (300, 5_000, 100_000, 250_000):
        chain = prefix_chain("x" * length)
        assert 0.79 < chain.share(len(chain.hashes)) <= 1.0


def test_the_memory_says_how_far_each_replica_matches() -> None:
    memory = PrefixMemory()
    system = "s" * 1_000
    memory.record(prefix_chain(system + "a" * 3_000), "r1")
    memory.record(prefix_chain(system + "b" * 3_000), "r2")
    chain = prefix_chain(system + "a" * 5_000)
    depths = memory.depths(chain, ["r1", "r2", "r3"])
    assert depths["r1"] > depths["r2"] > 0
    assert "r3" not in depths


def test_a_replica_that_restarted_matches_nothing_until_it_reads_again() -> None:
    memory = PrefixMemory()
    chain = prefix_chain("x" * 2_000)
    memory.record(chain, "r1")
    memory.forget("r1")
    assert memory.depths(chain, ["r1"]) == {}
    memory.record(chain, "r1")
    assert memory.depths(chain, ["r1"]) == {"r1": len(chain.hashes)}


def test_the_memory_is_bounded_and_forgets_the_deep_end_first() -> None:
    memory = PrefixMemory(entries_max=10)
    chain = prefix_chain("x" * 100_000)
    assert len(chain.hashes) > 10
    memory.record(chain, "r1")
    assert len(memory) == 10
    assert memory.depths(chain, ["r1"]) == {"r1": 10}
    for number in range(50):
        memory.record(prefix_chain(f"{number}" * 2_000), "r1")
        assert len(memory) <= 10
    assert memory.depths(chain, ["r1"]) == {}
