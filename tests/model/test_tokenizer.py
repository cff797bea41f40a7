"""The Tokenizer on vocabularies small enough to read; `tests/support/tiny_tokenizer.py` is one."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Core

from kvota.core.errors import InvalidRequest, UnsupportedModel
from kvota.model.grammar import GrammarCompiler
from kvota.model.tokenizer import Tokenizer
from kvota.model.tokenizer_parts import TokenizerParts
from tests.support.tiny_models import write_tokenizer
from tests.support.tiny_tokenizer import (
    IM_END_ID,
    IM_START_ID,
    VOCAB_SIZE,
    byte_ids,
    tiny_tokenizer,
)

TINY_CORE = tiny_tokenizer()
TINY = Tokenizer(
    TokenizerParts(
        core=TINY_CORE, bos_id=IM_START_ID, eos_id=IM_END_ID, eos_ids=frozenset({IM_END_ID})
    )
)
TOKEN_IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)


def with_bos() -> Tokenizer:
    return Tokenizer(
        TokenizerParts(core=tiny_tokenizer(), prefix=(IM_START_ID,), bos_id=IM_START_ID)
    )


def metaspace_core() -> Core:
    """A SentencePiece-like vocabulary: <unk>, <s>, the 256 bytes, and a few pieces."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["▁", "h", "i", "▁h", "▁hi", "好"]
    vocab = {name: index for index, name in enumerate(names + pieces)}
    model = models.BPE(vocab, [("▁", "h"), ("▁h", "i")], byte_fallback=True, unk_token="<unk>")
    core = Core(model)
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    return core


@given(st.text())
def test_decoding_an_encoded_text_gives_it_back(text: str) -> None:
    assert TINY.decode(TINY.encode(text, allow_special=False)) == text


@given(TOKEN_IDS)
def test_decode_equals_hugging_faces_for_any_ids(ids: list[int]) -> None:
    for skip in (True, False):
        expected = TINY_CORE.decode(ids, skip_special_tokens=skip)
        assert TINY.decode(ids, skip_special_tokens=skip) == expected


@given(TOKEN_IDS)
def test_joined_pieces_are_the_bytes_of_the_text(ids: list[int]) -> None:
    joined = b"".join(TINY.pieces[token_id] for token_id in ids)
    assert joined.decode(errors="replace") == TINY.decode(ids, skip_special_tokens=False)


def test_a_piece_may_be_part_of_a_character() -> None:
    ids = byte_ids("😀한")
    assert [TINY.pieces[token_id] for token_id in ids] == [bytes([b]) for b in "😀한".encode()]
    assert TINY.decode(ids) == "😀한"
    assert TINY.decode(ids[:-1]) == "😀\ufffd"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert TINY.decode([*byte_ids("a"), VOCAB_SIZE, VOCAB_SIZE + 19, *byte_ids("b")]) == "ab"
    assert TINY.vocab_size == VOCAB_SIZE == len(TINY.pieces)


def test_special_tokens_are_found_in_text_unless_told_otherwise() -> None:
    text = "a<|im_end|>b"
    assert TINY.encode(text) == [*byte_ids("a"), IM_END_ID, *byte_ids("b")]
    plain = TINY.encode(text, allow_special=False)
    assert IM_END_ID not in plain
    assert TINY.decode(plain) == text


def test_special_tokens_are_hidden_unless_they_are_wanted() -> None:
    ids = [IM_START_ID, *byte_ids("hi"), IM_END_ID]
    assert TINY.decode(ids) == "hi"
    assert TINY.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert TINY.token_text(IM_END_ID) == "<|im_end|>"
    assert TINY.special_ids == TINY.hidden_ids() == {0, 1, 2}
    assert TINY.hidden_ids(["<|im_end|>", "<tool_call>"]) == {0, 1}


def test_markers_are_special_only_where_the_vocabulary_says_so() -> None:
    assert TINY.special_markers(["<|im_end|>", "<tool_call>", "true"]) == {"<|im_end|>": IM_END_ID}


def test_bos_is_added_once() -> None:
    tokenizer = with_bos()
    assert tokenizer.encode("hi") == [IM_START_ID, *byte_ids("hi")]
    assert tokenizer.encode("hi", add_special_tokens=False) == byte_ids("hi")
    assert tokenizer.encode("") == [IM_START_ID]


def test_a_text_that_starts_with_bos_gets_no_second_one() -> None:
    tokenizer = with_bos()
    assert tokenizer.encode("<|im_start|>hi") == [IM_START_ID, *byte_ids("hi")]
    literal = tokenizer.encode("<|im_start|>hi", allow_special=False)
    assert literal[0] == IM_START_ID
    assert tokenizer.decode(literal) == "<|im_start|>hi"


def test_a_tokenizer_without_bos_encodes_nothing_to_nothing() -> None:
    assert TINY.encode("") == []


def test_eos_at_the_end_is_not_doubled_either() -> None:
    core = tiny_tokenizer()
    tokenizer = Tokenizer(TokenizerParts(core=core, suffix=(IM_END_ID,), eos_id=IM_END_ID))
    assert tokenizer.encode("hi") == tokenizer.encode("hi<|im_end|>") == [*byte_ids("hi"), 2]


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        TINY.encode("a\ud800b")


def test_a_long_text_does_not_keep_other_threads_from_running() -> None:
    tokenizer, has_begun, is_over, num_turns = with_bos(), threading.Event(), threading.Event(), 0

    def spin() -> None:
        nonlocal num_turns
        while not is_over.is_set():
            num_turns += 1
            has_begun.set()

    spinner = threading.Thread(target=spin)
    spinner.start()
    has_begun.wait()
    turns_before = num_turns
    tokenizer.encode("ab " * 300_000)
    turns_meanwhile = num_turns - turns_before
    is_over.set()
    spinner.join()
    assert turns_meanwhile > 10_000


def test_metaspace_pieces_are_spaces_and_bytes() -> None:
    tokenizer = Tokenizer(TokenizerParts(core=metaspace_core()))
    ids = tokenizer.encode("hi hi é好")
    assert b"".join(tokenizer.pieces[i] for i in ids) == " hi hi é好".encode()
    assert tokenizer.decode(ids) == "hi hi é好"
    assert tokenizer.pieces[2 + 0x0A] == b"\n"
    assert tokenizer.token_text(1) == "<s>"


METASPACE_CORE = metaspace_core()
METASPACE = Tokenizer(TokenizerParts(core=METASPACE_CORE))


@given(st.text(alphabet="hi é好\n", max_size=20))
def test_metaspace_decoding_equals_hugging_faces(text: str) -> None:
    ids = METASPACE.encode(text)
    assert METASPACE.decode(ids) == METASPACE_CORE.decode(ids) == text


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Fuse(), decoders.CTC()]), "CTC"),
        (decoders.Strip("x", 0, 1), "Strip"),
        (None, "no decoder"),
    ],
)
def test_a_spelling_that_is_not_known_is_refused_by_name(decoder: Any, named: str) -> None:
    core = tiny_tokenizer()
    if decoder is None:
        core = Core(models.BPE({"a": 0}, []))
    else:
        core.decoder = decoder
    with pytest.raises(UnsupportedModel, match=named):
        Tokenizer(TokenizerParts(core=core))


def test_the_json_is_read_by_llguidance_as_the_same_tokenizer() -> None:
    grammar_side = LLTokenizer(TINY.to_json(), eos_token=[IM_END_ID])
    assert grammar_side.vocab_size == TINY.vocab_size
    for text in ('{"a": [true, null]}', "你好 😀", " the ing"):
        assert grammar_side.tokenize_str(text) == TINY.encode(text)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([decoders.Metaspace(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
    ],
)
def test_a_tokenizer_without_bytes_is_read_by_llguidance_too(decoder: Any) -> None:
    core = Core(models.BPE({"▁": 0, "a": 1, "b": 2, "▁a": 3, "</s>": 4}, [("▁", "a")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoder
    core.add_special_tokens([AddedToken("</s>")])
    own = Tokenizer(TokenizerParts(core=core, eos_id=4, eos_ids=frozenset({4})))
    grammar = GrammarCompiler(own.to_json(), own.vocab_size, [4]).choice([" a b"])()
    ids = own.encode("a b")
    assert ids == [3, 0, 2]
    for token in ids:
        allowed = np.zeros(1, np.int32)
        grammar.write_mask(allowed)
        assert allowed[0] >> token & 1
        grammar.accept(token)
    assert grammar.is_complete()


def test_describe_says_what_evaluation_harnesses_ask() -> None:
    described = TINY.describe()
    assert described["eos_token"] == "<|im_end|>"
    assert described["bos_token"] == "<|im_start|>"
    assert described["pad_token"] is None
    assert described["vocab_size"] == VOCAB_SIZE
    assert json.loads(json.dumps(described)) == described


def test_a_directory_gives_the_same_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.pieces == TINY.pieces
    assert tokenizer.special_ids == TINY.special_ids
    assert tokenizer.bos_id == IM_START_ID
    assert tokenizer.eos_ids == {IM_END_ID}
    assert tokenizer.chat_template is not None
    assert tokenizer.encode("hi") == byte_ids("hi")


def test_a_post_processor_with_bos_is_not_applied_twice(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    core = tiny_tokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START_ID)]
    )
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    reference = core.encode("hi").ids
    assert tokenizer.encode("hi") == tokenizer.encode("<|im_start|>hi") == reference
