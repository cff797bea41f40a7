"""Special tokens under names that no text has."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from kvota.core.errors import InvalidRequest
from kvota.core.request import Constraint
from kvota.model.grammar import ConstraintFactory, GrammarCompiler
from kvota.model.grammar_tokens import NAME_MARK, hide_specials, name_specials
from tests.support.grammar_walk import allowed_tokens, is_allowed_whole
from tests.support.tiny_tokenizer import (
    IM_END_ID,
    IM_START_ID,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    byte_ids,
    tiny_tokenizer,
    token_bytes,
)

TEXT = "the <|im_end|> of <|im_start|>\n"


def hidden(tokenizer: Tokenizer) -> tuple[Tokenizer, dict[str, int]]:
    text, ids = hide_specials(tokenizer.to_str())
    return Tokenizer.from_str(text), ids


def test_the_text_of_a_special_token_is_read_as_text() -> None:
    plain, ids = hidden(tiny_tokenizer())
    read = plain.encode(TEXT).ids
    assert not set(read) & set(ids.values())
    assert plain.decode(read) == TEXT
    literal = tiny_tokenizer()
    literal.encode_special_tokens = True
    assert read == literal.encode(TEXT).ids


def test_the_ids_of_all_tokens_stay() -> None:
    before = tiny_tokenizer()
    after, ids = hidden(before)
    assert ids == {name: before.token_to_id(name) for name in SPECIAL_TOKENS}
    assert after.get_vocab_size() == before.get_vocab_size()
    assert [after.encode(text).ids for text in ("the", "é {}")] == [
        before.encode(text).ids for text in ("the", "é {}")
    ]


@pytest.mark.parametrize(
    "model",
    [
        models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.0)], 0, False),
        models.WordPiece({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"),
        models.BPE({"<unk>": 0, "a": 1, "b": 2}, [], unk_token="<unk>"),
        models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"),
    ],
    ids=lambda model: type(model).__name__,
)
def test_every_kind_of_vocabulary_keeps_its_unknown_token(model: Any) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.add_tokens([AddedToken("<extra>", special=True)])  # not in the model's own part
    after, ids = hidden(tokenizer)
    assert ids == {"<unk>": 0, "<extra>": 3}
    for text in ("a", "b", "x"):
        assert after.encode(text).ids == tokenizer.encode(text).ids
    assert after.encode("<extra>").ids != [3]


def test_tokens_that_are_not_special_stay_texts() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool_call>"])
    after, ids = hidden(tokenizer)
    assert "<tool_call>" not in ids
    assert after.encode("<tool_call>").ids == tokenizer.encode("<tool_call>").ids


def test_a_tokenizer_without_parts_is_left_to_its_reader() -> None:
    assert hide_specials("{}")[1] == {}
    with pytest.raises(ValueError, match="Expecting"):
        hide_specials("nothing")


PIECES = token_bytes()
COMPILER = GrammarCompiler(tiny_tokenizer().to_str(), VOCAB_SIZE, [IM_END_ID])


def allowed(constraint: Constraint) -> list[int]:
    return allowed_tokens(constraint, VOCAB_SIZE)


SPECIAL_TEXT: dict[str, Callable[[GrammarCompiler, str], ConstraintFactory]] = {
    "choice": lambda c, text: c.choice([text]),
    "regex": lambda c, text: c.regex(re.escape(text).replace("<", "[<]")),
    "lark": lambda c, text: c.grammar(f'start: "{text}"'),
    "gbnf": lambda c, text: c.grammar(f'root ::= "{text}"'),
}


@pytest.mark.parametrize("kind", SPECIAL_TEXT)
@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b", "<|im_end|><|endoftext|>"])
def test_the_text_of_a_special_token_is_written_like_any_other(kind: str, text: str) -> None:
    """Where nothing else can follow, too: there the tokenizer's own reading is asked for."""
    constraint = SPECIAL_TEXT[kind](COMPILER, text)()
    assert IM_END_ID not in allowed(constraint)
    written = b""
    while not constraint.is_complete():
        token = max(allowed(constraint), key=lambda token: len(PIECES[token]))
        assert PIECES[token], "a special token is part of a text"
        written += PIECES[token]
        constraint.accept(token)
    assert written.decode() == text


def test_a_schema_may_hold_the_text_of_a_special_token() -> None:
    properties = {"<|im_start|>": {"const": "<|im_end|>"}}
    schema = {"type": "object", "properties": properties, "required": ["<|im_start|>"]}
    factory = COMPILER.json_schema({**schema, "additionalProperties": False})
    document = '{"<|im_start|>": "<|im_end|>"}'
    assert is_allowed_whole(factory(), document, PIECES, IM_END_ID)


def test_a_lark_grammar_can_name_a_special_token() -> None:
    constraint = COMPILER.grammar('start: "a" <|im_start|> /b/  // "<|im_start|>"')()
    for token in (*byte_ids("a"), IM_START_ID, *byte_ids("b")):
        assert allowed(constraint) == [token]
        constraint.accept(token)
    assert constraint.is_complete()


def test_a_special_token_that_is_unknown_is_refused_with_the_names_that_are_known() -> None:
    with pytest.raises(InvalidRequest, match=r"<\|im_fin\|>.*<\|endoftext\|>") as refused:
        COMPILER.grammar("start: <|im_fin|>")
    assert NAME_MARK not in refused.value.message


IDS = {"<|im_start|>": IM_START_ID, "<|im_end|>": IM_END_ID}


@pytest.mark.parametrize(
    ("lark", "named"),
    [
        ("start: <|im_end|>", f"start: <[{IM_END_ID}]>"),
        ('s: "<|im_end|>" <|im_end|>', f's: "<|im_end|>" <[{IM_END_ID}]>'),
        (r's: "\"<|im_end|>" <|im_end|>', rf's: "\"<|im_end|>" <[{IM_END_ID}]>'),
        (r"s: /<\|im_end|>/ <|im_start|>", rf"s: /<\|im_end|>/ <[{IM_START_ID}]>"),
        ("s: <|other|> <[7]> <[*]>", "s: <|other|> <[7]> <[*]>"),
        ('s: "a" // " <|im_end|>\nt: <|im_end|>', f's: "a" // " <|im_end|>\nt: <[{IM_END_ID}]>'),
    ],
)
def test_names_outside_of_texts_become_ids(lark: str, named: str) -> None:
    assert name_specials(lark, IDS) == named


def test_what_is_hidden_is_json_again() -> None:
    text, _ = hide_specials(tiny_tokenizer().to_str())
    assert json.loads(text)["model"]["type"] == "BPE"
