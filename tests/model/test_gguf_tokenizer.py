"""Vocabularies from GGUF headers, against slow references and against llama.cpp's own ids."""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, fetch
from kvota.model.gguf_source import read_gguf_metadata
from kvota.model.gguf_tokenizer import merges_by_score, read_gguf_tokenizer
from kvota.model.token_pieces import byte_level_alphabet
from kvota.model.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden_smollm2_tokens.json").read_text())
LETTERS = byte_level_alphabet()
MERGES = ["a b", "Ġ a", "Ġa b", "ab ab", "Ċ Ċ", "1 2", "12 3", "Ã ©"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PIECES = ["a", "b", "c", "d", "▁", "ab", "cd", "bc", "abc", "▁a", "▁ab", "abcd", "▁abcd"]


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    """256 bytes, the merges above, two control tokens and one that is found but shown."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*LETTERS.values(), *merged, "<s>", "<|im_end|>", "<tool_call>"]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [NORMAL] * (256 + len(merged)) + [CONTROL, CONTROL, USER_DEFINED],
        "merges": MERGES,
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("<|im_end|>"),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def spm_metadata(scores: Sequence[float] | None = None, **changes: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, the 256 bytes, and PIECES, by default the longest best."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    own_scores = scores if scores is not None else [float(len(piece)) for piece in PIECES]
    keys = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *PIECES],
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES),
        "scores": [0.0] * 259 + list(own_scores),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(metadata)


def slow_bpe(word: str) -> list[str]:
    """Byte-pair encoding as its definition says: the earliest merge, everywhere, again."""
    symbols = [LETTERS[byte] for byte in word.encode()]
    for _ in range(len(symbols)):
        pairs = {f"{a} {b}" for a, b in pairwise(symbols)}
        best = next((merge for merge in MERGES if merge in pairs), None)
        if best is None:
            break
        symbols = joined_everywhere(symbols, best.split(" "))
    return symbols


def joined_everywhere(symbols: list[str], pair: list[str]) -> list[str]:
    result: list[str] = []
    position = 0
    while position < len(symbols):
        width = 2 if symbols[position : position + 2] == pair else 1
        result.append("".join(symbols[position : position + width]))
        position += width
    return result


def slow_sentencepiece(text: str, scores: Mapping[str, float]) -> list[str]:
    """Join the best-scoring neighbours, the leftmost first, until nothing joins."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = pairwise(symbols)
        joins = [(-scores[a + b], at) for at, (a, b) in enumerate(pairs) if a + b in scores]
        if not joins:
            return symbols
        _, at = min(joins)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]


BPE_CORE = read_gguf_tokenizer(bpe_metadata()).core
BPE, SPM = tokenizer(bpe_metadata()), tokenizer(spm_metadata())
SPM_WITHOUT_SPACE = tokenizer(spm_metadata(add_space_prefix=False))


@given(st.text(alphabet="ab 123é\n", max_size=12))
def test_words_merge_as_byte_pair_encoding_says(word: str) -> None:
    core = BPE_CORE
    words = [text for text, _ in core.pre_tokenizer.pre_tokenize_str(word)]
    expected = [token for text in words for token in slow_bpe_of_letters(text)]
    assert core.encode(word).tokens == expected


def slow_bpe_of_letters(word: str) -> list[str]:
    byte_of = {letter: byte for byte, letter in LETTERS.items()}
    return slow_bpe(bytes(byte_of[letter] for letter in word).decode())


@given(st.text(alphabet="abcd ", max_size=16), st.permutations(range(len(PIECES))))
def test_pieces_join_as_sentencepiece_says(text: str, order: list[int]) -> None:
    scores = [-float(rank) for rank in order]
    parts = tokenizer(spm_metadata(scores))
    expected = slow_sentencepiece(text, dict(zip(PIECES, scores, strict=True)))
    shown = [
        parts.token_text(i).replace(" ", "▁") for i in parts.encode(text, add_special_tokens=False)
    ]
    assert shown == expected


@given(st.text(max_size=30))
def test_any_text_survives_both_kinds(text: str) -> None:
    for own in (BPE, SPM, SPM_WITHOUT_SPACE):
        ids = own.encode(text, add_special_tokens=False, allow_special=False)
        # "▁" itself is how SentencePiece writes a space, so it cannot come back.
        assert own.decode(ids) == (text if own is BPE else text.replace("▁", " "))


def test_a_character_without_a_piece_falls_back_to_bytes() -> None:
    ids = SPM.encode("é", add_special_tokens=False)
    assert [SPM.pieces[i] for i in ids] == [b" ", b"\xc3", b"\xa9"]


def test_the_space_before_the_first_word_can_be_off() -> None:
    own = SPM_WITHOUT_SPACE
    assert [own.token_text(i) for i in own.encode("ab ab")] == ["<s>", "ab", " ab"]
    assert own.decode(own.encode(" ab")) == " ab"


def test_sentencepiece_adds_bos_unless_the_file_says_no() -> None:
    assert tokenizer(spm_metadata()).encode("ab")[0] == 1
    assert tokenizer(spm_metadata(add_bos_token=False)).encode("ab")[0] != 1


def test_byte_level_adds_bos_only_when_the_file_or_its_family_says_so() -> None:
    bos = bpe_metadata()["tokenizer.ggml.bos_token_id"]
    assert tokenizer(bpe_metadata()).encode("ab")[0] != bos
    assert tokenizer(bpe_metadata(add_bos_token=True)).encode("ab")[0] == bos
    assert tokenizer(bpe_metadata(pre="llama-bpe")).encode("ab")[0] == bos
    assert tokenizer(bpe_metadata(pre="llama-bpe", add_bos_token=False)).encode("ab")[0] != bos


def test_an_eos_is_added_when_the_file_says_so() -> None:
    own = tokenizer(spm_metadata(add_eos_token=True))
    assert own.encode("ab")[-1] == 2


def test_control_tokens_are_hidden_and_user_defined_ones_are_not() -> None:
    own = tokenizer(bpe_metadata())
    ids = own.encode("<s>ab<tool_call><|im_end|>")
    assert own.decode(ids) == "ab<tool_call>"
    assert own.special_markers(["<tool_call>"]) == {}
    assert len(ids) == 4


def test_turn_ends_are_the_declared_ids_and_the_known_control_tokens() -> None:
    tokens = bpe_metadata()["tokenizer.ggml.tokens"]
    end = tokens.index("<|im_end|>")
    assert tokenizer(bpe_metadata(eos_token_id=None)).eos_ids == {end}
    assert tokenizer(bpe_metadata(eot_token_id=5, eom_token_id=6)).eos_ids == {5, 6, end}


def test_a_turn_also_ends_with_a_chats_own_token_that_a_converter_took_for_a_users() -> None:
    """As llama.cpp has it. Every answer went on to `max_tokens`."""
    keys = bpe_metadata(eos_token_id=None)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    end = tokens.index("<|im_end|>")
    keys["tokenizer.ggml.token_type"] = [
        USER_DEFINED if at == end else t for at, t in enumerate(types)
    ]
    assert tokenizer(keys).eos_ids == {end}


def test_the_template_for_tools_is_kept_beside_the_usual_one() -> None:
    keys = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    made = tokenizer({**bpe_metadata(), **keys})
    assert (made.chat_template, made.tool_template) == ("D", "T")
    assert tokenizer(bpe_metadata()).tool_template is None


def test_a_role_beyond_the_vocabulary_is_absent() -> None:
    assert tokenizer(bpe_metadata(bos_token_id=99_999, add_bos_token=True)).bos_id is None


def test_words_that_are_tokens_stay_whole_where_the_family_ignores_merges() -> None:
    tokens = [*bpe_metadata()["tokenizer.ggml.tokens"], "xyz"]
    types = [*bpe_metadata()["tokenizer.ggml.token_type"], NORMAL]
    changed = {"tokens": tokens, "token_type": types, "add_bos_token": False}
    assert len(tokenizer(bpe_metadata(pre="llama-bpe", **changed)).encode("xyz")) == 1
    assert len(tokenizer(bpe_metadata(pre="qwen2", **changed)).encode("xyz")) == 3


def test_an_empty_token_keeps_its_place() -> None:
    tokens = list(bpe_metadata()["tokenizer.ggml.tokens"])
    tokens[-1] = ""
    assert tokenizer(bpe_metadata(tokens=tokens)).vocab_size == len(tokens)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (bpe_metadata(tokens=None), r"no tokenizer\.ggml\.tokens"),
        (bpe_metadata(merges=None), r"no tokenizer\.ggml\.merges"),
        (bpe_metadata(merges=["ab"]), "'ab' is not two tokens"),
        (bpe_metadata(merges=["a nope"]), "nope"),
        (bpe_metadata(token_type=[NORMAL]), "1 entries in tokenizer.ggml.token_type"),
        (spm_metadata(scores=None, tokens=["a", "b", "a"], token_type=None), "'a' twice"),
        (bpe_metadata(tokens="ab"), r"tokenizer\.ggml\.tokens is no list of str"),
        (bpe_metadata(tokens=["a", 1]), r"tokenizer\.ggml\.tokens is no list of str"),
        (bpe_metadata(merges=5), r"tokenizer\.ggml\.merges is no list of str"),
        (bpe_metadata(token_type="x"), r"tokenizer\.ggml\.token_type is no list of int"),
        (bpe_metadata(bos_token_id="x"), r"bos_token_id is 'x', which is no token id"),
        (bpe_metadata(pre=["x"]), r"tokenizer\.ggml\.pre is no text"),
        ({**bpe_metadata(), "tokenizer.chat_template": 1}, r"chat_template is no text"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(metadata: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_gguf_tokenizer(metadata)


def test_a_role_below_the_vocabulary_is_absent_too() -> None:
    assert tokenizer(bpe_metadata(bos_token_id=-1)).bos_id is None


def test_scores_must_cover_the_vocabulary() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.scores"):
        read_gguf_tokenizer({**spm_metadata(), "tokenizer.ggml.scores": [0.0]})


@pytest.mark.parametrize("pre", ["smollm", *GOLDEN["pre_tokenizers"]])
def test_long_runs_take_linear_time(pre: str) -> None:
    """Ends at once, or, if a pattern tries every start inside the run, not for minutes."""
    own = tokenizer(bpe_metadata(pre=pre))
    for run in (" " * 300_000, "A" * 300_000, "!" * 300_000, "\u4e00" * 100_000):
        assert own.decode(own.encode(f"x{run}5", add_special_tokens=False)) == f"x{run}5"


def test_an_unknown_pre_tokenizer_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"'viking'.*llama-bpe.*qwen2.*smollm"):
        read_gguf_tokenizer(bpe_metadata(pre="viking"))


def test_an_unknown_kind_of_vocabulary_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="'bert'"):
        read_gguf_tokenizer(bpe_metadata(model="bert"))


@pytest.fixture(scope="module")
def default_metadata() -> dict[str, Any]:
    return read_gguf_metadata(fetch(DEFAULT_MODEL, cache_dir_of(os.environ)))


@pytest.mark.model
def test_the_default_model_gives_llama_cpps_ids(default_metadata: dict[str, Any]) -> None:
    own = tokenizer(default_metadata)
    assert own.vocab_size == 49_152
    assert {own.token_text(i) for i in own.eos_ids} == {"<|im_end|>", "<|endoftext|>"}
    for case in GOLDEN["texts"]:
        assert own.encode(case["text"]) == case["ids"], case["text"]


@pytest.mark.model
@pytest.mark.parametrize("pre", GOLDEN["pre_tokenizers"])
def test_every_family_cuts_words_as_llama_cpp_does(
    default_metadata: dict[str, Any], pre: str
) -> None:
    own = tokenizer({**default_metadata, "tokenizer.ggml.pre": pre})
    for text, ids in zip(GOLDEN["plain_texts"], GOLDEN["pre_tokenizers"][pre], strict=True):
        encoded = own.encode(text, add_special_tokens=False, allow_special=False)
        assert encoded == ids, text


@pytest.mark.model
def test_the_default_model_spells_any_text_of_the_bytes_it_has(
    default_metadata: dict[str, Any],
) -> None:
    own = tokenizer(default_metadata)
    known_bytes = {piece[0] for piece in own.pieces if len(piece) == 1}
    assert len(known_bytes) == 235  # 21 bytes, those of unassigned planes among them, are missing

    @settings(deadline=None)
    @given(st.text(max_size=200))
    def spells(text: str) -> None:
        whole = "".join(char for char in text if known_bytes.issuperset(char.encode()))
        assert own.decode(own.encode(whole, allow_special=False)) == whole

    spells()


@pytest.mark.parametrize(
    "tokens", [["a" * 1001], [letter * n for letter in "abcd" for n in range(1, 600)]]
)
def test_a_vocabulary_of_merges_without_end_is_refused(tokens: list[str]) -> None:
    """3 MB of them took 6 GB."""
    with pytest.raises(ModelError, match="made of others"):
        merges_by_score({token: at for at, token in enumerate(tokens)}, [0.0] * len(tokens))
