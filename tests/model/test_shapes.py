"""Few sizes, little padding."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.model.shapes import EXACT_MAX, SIZES_PER_DOUBLING, rounded_size


@pytest.mark.parametrize(
    ("num", "size"),
    [(1, 1), (64, 64), (65, 66), (66, 66), (127, 128), (129, 132), (256, 256), (505, 512)],
)
def test_sizes_written_out(num: int, size: int) -> None:
    assert rounded_size(num) == size


@given(st.integers(1, 10**6))
def test_a_size_holds_what_it_must_with_little_padding(num: int) -> None:
    size = rounded_size(num)
    assert num <= size < num * (1 + 1 / SIZES_PER_DOUBLING)
    assert rounded_size(size) == size


@pytest.mark.parametrize(("doublings", "largest"), [(1, 128), (3, 512), (7, 8192)])
def test_sizes_are_few_however_large_a_pass_may_be(doublings: int, largest: int) -> None:
    sizes = {rounded_size(num) for num in range(1, largest + 1)}
    assert len(sizes) == EXACT_MAX + doublings * SIZES_PER_DOUBLING
    assert max(sizes) == largest


def test_on_average_one_row_in_a_hundred_is_padding() -> None:
    numbers = range(1, 513)
    assert sum(map(rounded_size, numbers)) < 1.012 * sum(numbers)


def test_a_larger_number_never_has_a_smaller_size() -> None:
    sizes = [rounded_size(num) for num in range(1, 5000)]
    assert all(one <= other for one, other in pairwise(sizes))
