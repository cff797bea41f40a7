"""Tokens are named so that clients can put the text together again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.request import TokenLogprobs
from kvota.node.logprobs import (
    CompletionLogprobWriter,
    TokenNames,
    chat_logprobs,
    vllm_prompt_logprobs,
)
from tests.support.http import tiny_served
from tests.support.tiny_tokenizer import IM_END_ID, VOCAB_SIZE, byte_ids

SERVED = tiny_served()
TOKENIZER = SERVED.tokenizer
NAMES = TokenNames(TOKENIZER, hidden=SERVED.hidden_ids)
# A text that spells a special token is that token, which adds nothing.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda text: "<|im_" not in text
)


def entries(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -1.0) for token in ids]


@given(TEXT)
def test_chat_bytes_join_to_the_text(text: str) -> None:
    content = chat_logprobs(entries(TOKENIZER.encode(text)), NAMES).content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == text


@given(TEXT, st.integers(0, 2**32))
def test_offsets_are_the_length_of_the_whole_characters_before(text: str, seed: int) -> None:
    """However the tokens are spread over calls."""
    ids = TOKENIZER.encode(text)
    expected, raw = [], b""
    for token in ids:
        expected.append(len(raw.decode("utf-8", "ignore")))
        raw += NAMES.added_bytes(token)
    writer, chance, offsets, at = CompletionLogprobWriter(NAMES), random.Random(seed), [], 0
    while at < len(ids):
        size = chance.randint(1, 3)
        offsets += writer.output(entries(ids[at : at + size])).text_offset
        at += size
    assert offsets == expected


def test_special_tokens_are_named_but_add_nothing() -> None:
    [entry] = chat_logprobs(entries([IM_END_ID]), NAMES).content
    assert (entry.token, entry.bytes) == ("<|im_end|>", [])
    shown = TokenNames(TOKENIZER, hidden=frozenset())
    assert chat_logprobs(entries([IM_END_ID]), shown).content[0].bytes == list(b"<|im_end|>")


def test_ids_that_only_pad_the_vocabulary_have_no_name() -> None:
    padding = VOCAB_SIZE + 5
    assert (NAMES.shown(padding), NAMES.exact(padding), NAMES.added_bytes(padding)) == ("", "", b"")


def test_different_parts_of_characters_keep_different_names() -> None:
    parts = byte_ids("好")
    assert len({NAMES.exact(token) for token in parts}) == 3
    assert {NAMES.shown(token) for token in parts} == {"\ufffd"}


def test_the_chosen_token_is_among_the_top_ones_once() -> None:
    chosen, *others = byte_ids("abc")
    entry = TokenLogprobs(chosen, -5.0, tuple((token, -1.0) for token in others))
    [top] = CompletionLogprobWriter(NAMES).output([entry]).top_logprobs
    assert top == {"a": -5.0, "b": -1.0, "c": -1.0}


def test_impossible_tokens_have_a_finite_logprob() -> None:
    [entry] = chat_logprobs([TokenLogprobs(5, float("-inf"))], NAMES).content
    assert entry.logprob == pytest.approx(-9999.0)


def test_prompt_logprobs_hold_the_token_even_below_the_top() -> None:
    chosen, best = byte_ids("ab")
    entry = TokenLogprobs(chosen, -5.0, ((best, -1.0),), rank=17)
    first, second = vllm_prompt_logprobs([entry], NAMES)
    assert first is None
    assert second == {
        str(best): {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
        str(chosen): {"logprob": -5.0, "rank": 17, "decoded_token": "a"},
    }


def test_a_space_that_only_the_tokenizer_wrote_is_not_echoed() -> None:
    ids = TOKENIZER.encode(" the the")
    out = CompletionLogprobWriter(NAMES).prompt(ids, entries(ids[1:]), "the the")
    assert "".join(out.tokens) == "the the"
    assert out.text_offset == [0, 3]
    assert out.token_logprobs == [None, -1.0]


@pytest.mark.parametrize("before", ["", "好 "])
def test_special_tokens_that_an_echoed_text_spells_take_their_place_in_it(before: str) -> None:
    text = f"{before}<|im_start|>user"
    ids = TOKENIZER.encode(text)
    writer = CompletionLogprobWriter(NAMES)
    out = writer.prompt(ids, entries(ids[1:]), text)
    assert out.text_offset[out.tokens.index("<|im_start|>")] == len(before)
    assert out.text_offset[out.tokens.index("<|im_start|>") + 1] == text.index("user")
    assert writer.output(entries(byte_ids("a"))).text_offset == [len(text)]


def test_a_special_token_that_the_tokenizer_put_before_an_echoed_text_takes_no_place() -> None:
    ids = [IM_END_ID, *TOKENIZER.encode("the")]
    out = CompletionLogprobWriter(NAMES).prompt(ids, entries(ids[1:]), "the")
    assert out.text_offset[:2] == [0, 0]
