"""Prompt and answer fit the model together, or the refusal says by how much they do not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    OutputTooLong,
    RequestError,
)
from kvota.node.budget import OutputBudget, refuse_hopeless
from tests.support.http import tiny_served

BUDGET = OutputBudget(64, prompt_field="prompt", limit_field="max_tokens")
MAYBE = st.none() | st.integers(1, 100)
ASKED = st.none() | st.integers(0, 100)


@given(st.integers(0, 100), ASKED, MAYBE, MAYBE)
def test_what_fits_is_granted_and_nothing_else(
    num_prompt: int, asked: int | None, minimum: int | None, default: int | None
) -> None:
    fits = num_prompt > 0 and num_prompt + (1 if asked is None else asked) <= 64
    limit = asked if asked is not None else min(64 - num_prompt, default or 64)
    if fits and (minimum or 0) <= limit:
        assert BUDGET.granted(num_prompt, asked, minimum, default) == limit
        return
    with pytest.raises(RequestError) as caught:
        BUDGET.granted(num_prompt, asked, minimum, default)
    assert (caught.value.param == "min_tokens") is fits


@pytest.mark.parametrize(
    ("num_prompt", "asked", "kind", "param"),
    [
        (0, None, InvalidRequest, "prompt"),
        (8, 57, ContextLengthExceeded, "max_tokens"),
        (64, None, ContextLengthExceeded, "prompt"),
        (64, 1, ContextLengthExceeded, "prompt"),
        (65, 0, ContextLengthExceeded, "prompt"),
        (200, 1, ContextLengthExceeded, "prompt"),
        (1, 65, OutputTooLong, "max_tokens"),
    ],
)
def test_each_misfit_has_its_own_error(
    num_prompt: int, asked: int | None, kind: type[RequestError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        BUDGET.granted(num_prompt, asked, None)
    assert type(caught.value) is kind
    assert caught.value.param == param


@settings(max_examples=30)
@given(st.text(max_size=400), st.integers(1, 40))
def test_only_texts_that_cannot_fit_are_refused_unread(text: str, max_model_len: int) -> None:
    model = tiny_served(max_model_len=max_model_len)
    num_tokens = len(model.tokenizer.encode(text, add_special_tokens=False))
    try:
        refuse_hopeless(len(text), model, "prompt")
    except ContextLengthExceeded:
        assert num_tokens > max_model_len


def test_a_text_far_beyond_the_model_is_refused_with_the_numbers() -> None:
    model = tiny_served(max_model_len=8)
    longest = model.tokenizer.longest_piece_bytes
    refuse_hopeless(8 * longest, model, "prompt")
    with pytest.raises(ContextLengthExceeded, match=r"is 8 tokens, .* at least 9") as caught:
        refuse_hopeless(8 * longest + 1, model, "prompt")
    assert caught.value.param == "prompt"
