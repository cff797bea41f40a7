"""What a trace says is shared is shared in what is sent, and nothing else."""

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.tools.load.prompts import Estimated, Prompts, TokenIds, Words
from kvota.tools.replay.prompts import SharedPrompts
from kvota.traffic.arrival import Arrival

IDS = TokenIds(range(100, 1100))
WORDS = Words([f" word{number}" for number in range(200)], overhead=1)
GUESSED = Estimated(tokens_per_word=1.25, overhead=0.0, how="")


def arrival(prompt_tokens: int, *ids: int, block: int = 16) -> Arrival:
    return Arrival(
        at_s=0.0, prompt_tokens=prompt_tokens, output_tokens=1, max_tokens=1, prefix=ids,
        prefix_block=block,
    )  # fmt: skip


def num_common(one: str | list[int], other: str | list[int]) -> int:
    """Leading pieces that two prompts have in common."""
    return depth(*(text.split() if isinstance(text, str) else text for text in (one, other)))


def depth(one: Sequence[object], other: Sequence[object]) -> int:
    """How far two sequences are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_ids_share_to_the_token_and_no_further() -> None:
    made = SharedPrompts(IDS, seed=1)
    one, other = made.make(arrival(50, 7, 8, 9), 0), made.make(arrival(60, 7, 8, 3), 1)
    assert (len(one), len(other)) == (50, 60)
    assert 32 <= num_common(one, other) <= 33  # the next piece is equal once in a thousand


def test_what_is_behind_the_blocks_is_a_requests_own() -> None:
    made = SharedPrompts(IDS, seed=1)
    one, other = made.make(arrival(200, 7), 0), made.make(arrival(200, 7), 1)
    assert 16 <= num_common(one, other) <= 18


def test_a_prompt_ends_where_it_ends_even_within_a_block() -> None:
    made = SharedPrompts(IDS, seed=1)
    whole, cut = made.make(arrival(32, 7, 8), 0), made.make(arrival(20, 7, 8), 1)
    assert whole[:20] == cut


def test_the_same_block_under_another_prefix_has_the_same_text() -> None:
    made = SharedPrompts(IDS, seed=1)
    assert made.make(arrival(32, 1, 5), 0)[16:] == made.make(arrival(32, 2, 5), 1)[16:]


@pytest.mark.parametrize(("prompts", "pieces"), [(WORDS, 32), (GUESSED, 26)])
def test_texts_share_their_blocks_too(prompts: Prompts, pieces: int) -> None:
    made = SharedPrompts(prompts, seed=1)
    one, other = made.make(arrival(80, 7, 8, 9), 0), made.make(arrival(70, 7, 8, 3), 1)
    assert isinstance(one, str)
    assert abs(num_common(one, other) - pieces) <= 1


def test_a_seed_decides_all_of_it() -> None:
    same = [SharedPrompts(IDS, seed=1).make(arrival(40, 7), 0) for _ in range(2)]
    assert same[0] == same[1]
    assert SharedPrompts(IDS, seed=2).make(arrival(40, 7), 0)[:16] != same[0][:16]


ids = st.lists(st.integers(0, 3), max_size=6).map(tuple)


@given(
    st.lists(st.tuples(ids, st.integers(1, 120)), min_size=2, max_size=6), st.sampled_from([16, 24])
)
def test_lengths_are_exact_and_common_blocks_are_common_tokens(
    requests: list[tuple[tuple[int, ...], int]], block: int
) -> None:
    made = SharedPrompts(IDS, seed=3)
    prompts = [
        made.make(arrival(size, *chain, block=block), number)
        for number, (chain, size) in enumerate(requests)
    ]
    assert [len(one) for one in prompts] == [size for _, size in requests]
    for at, (chain, size) in enumerate(requests[1:], start=1):
        before, size_before = requests[at - 1]
        common = min(depth(chain, before) * block, size, size_before)
        assert prompts[at][:common] == prompts[at - 1][:common]
