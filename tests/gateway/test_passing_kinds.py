"""What a body that generates nothing weighs, and what is too much of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.errors import InvalidRequest
from kvota.gateway.input_checks import InputLimits
from kvota.gateway.passing_kinds import (
    DETOKENIZE,
    EMBEDDINGS,
    TOKENIZE,
    TOKENS_PER_TEXT,
    Load,
    PassingKind,
)
from kvota.gateway.upstream.estimate import estimated_tokens

LIMITS = InputLimits(prompt_characters_max=10, num_inputs_max=3)


def weigh(kind: PassingKind[Any], content: bytes, limits: InputLimits = LIMITS) -> Load:
    return kind.weigh(kind.decoder.decode(content), limits)


@given(st.lists(st.text(max_size=50), min_size=1, max_size=20))
def test_texts_weigh_about_what_they_weigh_one_by_one(texts: list[str]) -> None:
    body = EMBEDDINGS.decoder.decode(b"{}")
    body.input = texts
    load = EMBEDDINGS.weigh(body, InputLimits())
    assert load.num_inputs == len(texts)
    alone = sum(estimated_tokens(text.encode()) + TOKENS_PER_TEXT for text in texts)
    assert abs(load.tokens - alone) <= len(texts)


def test_token_ids_weigh_what_they_are() -> None:
    assert weigh(EMBEDDINGS, b'{"input": [[1, 2, 3], [4]]}') == Load(4 + 2 * TOKENS_PER_TEXT, 2)


def test_a_tokenizer_by_itself_costs_no_tokens() -> None:
    assert weigh(TOKENIZE, b'{"prompt": "a b c"}') == Load()
    assert weigh(DETOKENIZE, b'{"tokens": [1, 2, 3]}') == Load()


@pytest.mark.parametrize(
    ("kind", "content", "param"),
    [
        (EMBEDDINGS, b'{"input": "12345678901"}', "input"),
        (EMBEDDINGS, b'{"input": ["123456", "12345"]}', "input"),
        (EMBEDDINGS, b'{"input": ["1", "2", "3", "4"]}', "input"),
        (TOKENIZE, b'{"prompt": "12345678901"}', "prompt"),
        (TOKENIZE, b'{"messages": [{"role": "user", "content": "12345678901"}]}', "messages"),
        (DETOKENIZE, b'{"tokens": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}', "tokens"),
    ],
)
def test_what_is_too_long_is_refused_by_its_field(
    kind: PassingKind[Any], content: bytes, param: str
) -> None:
    with pytest.raises(InvalidRequest, match="limit") as refused:
        weigh(kind, content)
    assert refused.value.param == param
