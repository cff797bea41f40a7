"""OpenAI's four forms of `input`, told apart."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.errors import InvalidRequest
from kvota.wire.embeddings import inputs_of

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)


@given(st.text())
def test_a_text_is_one_input(text: str) -> None:
    assert inputs_of(text) == [text]


@given(st.lists(st.text(), min_size=1, max_size=9))
def test_each_text_is_an_input(texts: list[str]) -> None:
    assert inputs_of(texts, num_max=9) == texts


@given(IDS)
def test_token_ids_are_one_input_however_many(ids: list[int]) -> None:
    assert inputs_of(ids, num_max=1) == [ids]


@given(st.lists(IDS, min_size=1, max_size=9))
def test_each_list_of_token_ids_is_an_input(rows: list[list[int]]) -> None:
    assert inputs_of(rows, num_max=9) == rows


@pytest.mark.parametrize(
    "given", [None, [], [[]], [1, "a"], [True], [[1.5]], [["a"]], [-1], [None]]
)
def test_anything_else_is_refused_by_its_field(given: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        inputs_of(given)
    assert refused.value.param == "input"


@pytest.mark.parametrize("one", ["a", [1]])
def test_too_many_inputs_are_refused_with_both_numbers(one: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"3 entries; the limit is 2"):
        inputs_of([one] * 3, num_max=2)
