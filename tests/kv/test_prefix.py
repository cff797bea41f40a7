import subprocess
import sys
from collections import Counter
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.kv.prefix import BlockHash, Chain, PrefixIndex, root_hash, sha256_block


def constant_hash(parent: bytes, tokens: list[int]) -> bytes:
    return b"same"


def hash_of_8_bits(parent: bytes, tokens: list[int]) -> bytes:
    return sha256_block(parent, tokens)[:1]


def new_chain(tokens: list[int], salt: str = "", hash_block: BlockHash = sha256_block) -> Chain:
    return Chain(tokens, salt, root_hash("model", salt), 2, hash_block)


def enter(index: PrefixIndex, chain: Chain, blocks: list[int]) -> None:
    parent = None
    for place, block in enumerate(blocks):
        parent = index.insert(chain, place, parent, block)
        if parent is None:
            return


def found_blocks(index: PrefixIndex, chain: Chain) -> list[int]:
    return [entry.block for entry in index.find(chain, len(chain.tokens) // 2)]


def test_a_prompt_finds_the_blocks_of_its_longest_known_prefix() -> None:
    index = PrefixIndex()
    enter(index, new_chain([1, 2, 3, 4, 5, 6]), [10, 11, 12])
    assert found_blocks(index, new_chain([1, 2, 3, 4, 5, 6, 7])) == [10, 11, 12]
    assert found_blocks(index, new_chain([1, 2, 3, 4, 9, 9])) == [10, 11]
    assert found_blocks(index, new_chain([9, 2, 3, 4])) == []


def test_what_was_found_once_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    index, chain = PrefixIndex(), new_chain([1, 2, 3, 4, 5, 6])
    enter(index, new_chain([1, 2, 3, 4]), [10, 11])
    assert found_blocks(index, chain) == [10, 11]
    compared: list[int] = []
    block_tokens = Chain.block_tokens

    def counted(self: Chain, place: int) -> list[int]:
        compared.append(place)
        return block_tokens(self, place)

    monkeypatch.setattr(Chain, "block_tokens", counted)
    assert found_blocks(index, chain) == [10, 11]
    assert not compared, "the head of the line is asked in every step"
    enter(index, chain, [10, 11, 12])
    compared.clear()
    assert found_blocks(index, chain) == [10, 11, 12]
    assert compared == [2]


def test_what_was_found_and_is_gone_is_not_found_any_more() -> None:
    index, chain = PrefixIndex(), new_chain([1, 2, 3, 4, 5, 6])
    enter(index, chain, [10, 11, 12])
    assert found_blocks(index, chain) == [10, 11, 12]
    for block in (12, 11):
        index.forget(block)
    assert found_blocks(index, chain) == [10]
    enter(index, new_chain([1, 2, 3, 4]), [10, 20])
    enter(index, new_chain([7, 7]), [11])
    assert found_blocks(index, chain) == [10, 20]


def test_equal_tokens_after_different_ones_are_not_the_same_block() -> None:
    index = PrefixIndex()
    enter(index, new_chain([1, 1, 5, 5]), [0, 1])
    enter(index, new_chain([2, 2]), [2])
    assert found_blocks(index, new_chain([2, 2, 5, 5])) == [2]


def test_requests_with_different_salts_never_share() -> None:
    index = PrefixIndex()
    enter(index, new_chain([1, 2, 3, 4], salt="blue"), [0, 1])
    assert found_blocks(index, new_chain([1, 2, 3, 4], salt="blue")) == [0, 1]
    assert found_blocks(index, new_chain([1, 2, 3, 4], salt="red")) == []
    assert found_blocks(index, new_chain([1, 2, 3, 4])) == []


def test_a_salt_separates_even_when_every_hash_collides() -> None:
    index = PrefixIndex()
    enter(index, new_chain([1, 2], "blue", constant_hash), [0])
    assert found_blocks(index, new_chain([1, 2], "red", constant_hash)) == []
    assert found_blocks(index, new_chain([1, 2], "blue", constant_hash)) == [0]


def test_namespace_and_salt_cannot_run_into_each_other() -> None:
    assert root_hash("ab", "c") != root_hash("a", "bc")
    assert root_hash("a", "") != root_hash("", "a")


@pytest.mark.parametrize("hash_block", [constant_hash, hash_of_8_bits, sha256_block])
@given(prompts=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), max_size=30))
def test_a_hit_is_always_the_very_prefix_that_was_asked_for(
    hash_block: BlockHash, prompts: list[list[int]]
) -> None:
    index = PrefixIndex()
    content: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        chain = new_chain(prompt, hash_block=hash_block)
        hits = found_blocks(index, chain)
        for place, block in enumerate(hits):
            assert content[block] == prompt[: 2 * place + 2]
        own = [number * 3 + place for place in range(3)]
        for place, block in enumerate(own):
            content[block] = prompt[: 2 * place + 2]
        enter(index, chain, own)
        index.check(())


def test_a_block_that_is_known_already_is_reported_as_it_is_there() -> None:
    index = PrefixIndex()
    enter(index, new_chain([1, 2]), [0])
    entry = index.insert(new_chain([1, 2]), 0, None, 7)
    assert entry is not None
    assert entry.block == 0


def test_a_block_whose_hash_is_taken_is_not_entered() -> None:
    index = PrefixIndex()
    enter(index, new_chain([1, 2], hash_block=constant_hash), [0])
    assert index.insert(new_chain([3, 4], hash_block=constant_hash), 0, None, 1) is None
    assert set(index.blocks) == {0}


def test_a_forgotten_block_is_not_found_and_a_new_one_with_its_number_is_no_parent() -> None:
    index = PrefixIndex()
    enter(index, new_chain([1, 1, 5, 5], hash_block=hash_of_8_bits), [0, 1])
    index.forget(0)
    enter(index, new_chain([1, 1], hash_block=hash_of_8_bits), [0])
    assert found_blocks(index, new_chain([1, 1, 5, 5], hash_block=hash_of_8_bits)) == [0]


def test_every_block_is_hashed_once_and_only_when_asked_for() -> None:
    calls: Counter[tuple[int, ...]] = Counter()

    def counting(parent: bytes, tokens: list[int]) -> bytes:
        calls[tuple(tokens)] += 1
        return sha256_block(parent, tokens)

    index = PrefixIndex()
    enter(index, new_chain([0, 1, 2, 3]), [0, 1])
    tokens = list(range(1000))
    chain = new_chain(tokens, hash_block=counting)
    assert chain.num_hashed == 0
    for _ in range(5):
        index.find(chain, 499)
    assert list(calls) == [(0, 1), (2, 3), (4, 5)], "hashing goes on after the first miss"
    tokens += [7, 7]
    chain.hash_of(500)
    assert set(calls.values()) == {1}
    assert len(calls) == 501


def test_a_fork_keeps_the_hashes_and_goes_its_own_way() -> None:
    chain = new_chain([1, 2, 3])
    chain.hash_of(0)
    twin_tokens = [1, 2, 3, 4]
    twin = chain.fork(twin_tokens)
    chain.tokens.append(9)
    assert twin.num_hashed == 1
    assert twin.hash_of(1) == new_chain([1, 2, 3, 4]).hash_of(1) != chain.hash_of(1)


def test_the_hash_is_sha256_over_the_parent_and_64_bit_little_endian_tokens() -> None:
    """D01"""
    expected = sha256(b"parent" + (1).to_bytes(8, "little") + (2**40).to_bytes(8, "little"))
    assert sha256_block(b"parent", [1, 2**40]) == expected.digest()


def test_the_hash_does_not_depend_on_the_process() -> None:
    """D01"""
    program = (
        "from kvota.kv.prefix import root_hash, sha256_block;"
        "print(sha256_block(root_hash('m', 's'), [1, 2]).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {sha256_block(root_hash("m", "s"), [1, 2]).hex() + "\n"}


def test_check_sees_a_child_that_would_outlive_its_parent() -> None:
    index = PrefixIndex()
    enter(index, new_chain([1, 2, 3, 4]), [0, 1])
    index.check((1, 0))
    index.check((1,))
    with pytest.raises(AssertionError, match="outlives its parent"):
        index.check((0, 1))
    with pytest.raises(AssertionError, match="in use, but its parent is not"):
        index.check((0,))
