from hypothesis import given
from hypothesis import strategies as st

from kvota.traffic.arrival import Arrival, prompt_of
from kvota.traffic.prefixes import ReuseCount, chain_of, names_of


def prompt(ids: tuple[int, ...], block: int = 16, tokens: int | None = None) -> Arrival:
    size = len(ids) * block if tokens is None else tokens
    return Arrival(
        at_s=0.0, prompt_tokens=size, output_tokens=1, max_tokens=1, prefix=ids, prefix_block=block
    )


def test_a_name_says_all_that_came_before() -> None:
    assert list(chain_of([1, 2, 3]))[:2] == list(chain_of([1, 2]))
    assert list(chain_of([1, 2]))[1] != list(chain_of([3, 2]))[1]


ids = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)


@given(ids, ids, st.sampled_from([8, 16, 32, 48]), st.integers(1, 16), st.integers(1, 16))
def test_equal_names_mean_equal_tokens(
    one: tuple[int, ...], other: tuple[int, ...], size: int, cut: int, other_cut: int
) -> None:
    """Whatever size blocks are counted in: the tokens of the simulator are the oracle."""
    a = prompt(one, tokens=(len(one) - 1) * 16 + cut)
    b = prompt(other, tokens=(len(other) - 1) * 16 + other_cut)
    tokens_a, tokens_b = prompt_of(a, 1), prompt_of(b, 2)
    for at, (name_a, name_b) in enumerate(zip(names_of(a, size), names_of(b, size), strict=False)):
        end = (at + 1) * size
        is_equal = tokens_a[:end] == tokens_b[:end]
        is_split = end % 16 != 0 or end > min(len(tokens_a), len(tokens_b))
        assert name_a != name_b or is_equal
        assert is_split or (name_a == name_b) == is_equal


def test_a_last_block_that_is_not_full_is_named_only_if_all_of_it_is_known() -> None:
    assert len(names_of(prompt((1, 2), tokens=30), 16)) == 2
    assert len(names_of(prompt((1,), tokens=30), 16)) == 1
    assert len(names_of(prompt((1, 2), tokens=30), 64)) == 1
    assert names_of(prompt((), tokens=30), 16) == ()


def test_a_hit_needs_every_block_before_it() -> None:
    count = ReuseCount()
    for one in (prompt((1, 2, 3)), prompt((1, 2, 4)), prompt((5, 2, 3))):
        count.add(one)
    reuse = count.result()
    assert reuse is not None
    assert (reuse.num_hits, reuse.num_blocks, reuse.num_distinct) == (2, 9, 7)
    assert reuse.sharing_requests == 1 / 3
    assert reuse.token_share == 32 / 144
    assert reuse.once_share == 5 / 7


def test_without_prefixes_there_is_nothing_to_reuse() -> None:
    count = ReuseCount()
    count.add(prompt((), tokens=10))
    assert count.result() is None
