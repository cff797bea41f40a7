"""A tokenizer from a GGUF header (`tokenizer.ggml.*`), as Hugging Face's library would load it.

Two kinds exist for the models kvota runs:

    gpt2    byte-level BPE: tokens, merges in order, and the name of a pre-tokenizer
    llama   SentencePiece BPE: tokens with scores. A pair may merge when its join is a token, the
            best score first; a character without a token falls back to its bytes.

Keys: the GGUF specification (docs/gguf.md of ggml) and llama.cpp's `src/llama-vocab.cpp`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import tokenizers
from tokenizers import decoders, models, normalizers

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.model.pretokenizers import PreTokenizer, find_pre_tokenizer
from kvota.model.tokenizer_parts import TokenizerParts

T = TypeVar("T")

# Texts that end a turn wherever they are control tokens: llama.cpp's end-of-generation rule,
# without its fill-in-the-middle tokens.
TURN_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<｜end▁of▁sentence｜>",
    }
)


PIECE_CHARS_MAX = 1_000  # of one token; real ones have some dozens
MERGED_CHARS_MAX = 100_000_000  # in all merges; 256,000 tokens of a large model have 10 million

# Those of them that chats are made of. They end a turn also where a converter took them for a
# user's own tokens, as llama.cpp has it; the others may be part of a text then.
_CHAT_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<end_of_utterance>"}
)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build the tokenizer that the header describes.

    Raises ModelError when keys are missing or contradict each other, and UnsupportedModel for a
    kind of vocabulary or a pre-tokenizer that is not known.
    """
    vocabulary = _Vocabulary.read(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        row = find_pre_tokenizer(_text(metadata, "tokenizer.ggml.pre") or "default")
        core, adds_bos = _byte_level_bpe(vocabulary, metadata, row), row.adds_bos
    elif kind == "llama":
        core, adds_bos = _sentencepiece_bpe(vocabulary, metadata), True
    else:
        raise UnsupportedModel(
            f"The vocabulary kind {kind!r} (tokenizer.ggml.model) is not supported. "
            "Supported: gpt2 (byte-level BPE) and llama (SentencePiece BPE)."
        )
    core.add_tokens(vocabulary.added_tokens())
    return _with_roles(core, vocabulary, metadata, adds_bos=adds_bos)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: Sequence[str]
    types: Sequence[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> "_Vocabulary":
        tokens = _array(metadata, "tokenizer.ggml.tokens", str)
        names = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        if len(set(names)) < len(names):
            twice, _ = Counter(names).most_common(1)[0]
            raise ModelError(f"The GGUF vocabulary holds the token {twice!r} twice.")
        kinds: Sequence[int] = [TokenType.NORMAL] * len(names)
        if metadata.get("tokenizer.ggml.token_type") is not None:
            kinds = _array(metadata, "tokenizer.ggml.token_type", int)
        _check_length("token_type", kinds, names)
        return cls(names, kinds)

    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def of_type(self, *types: TokenType) -> dict[str, int]:
        wanted = frozenset(types)
        return {
            token: index
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in wanted
        }

    def added_tokens(self) -> list[tokenizers.AddedToken]:
        """Tokens found in text before any merging. Control tokens are hidden when decoding."""
        hidden = self.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
        shown = self.of_type(TokenType.USER_DEFINED)
        return [
            tokenizers.AddedToken(token, special=token in hidden, normalized=False)
            for token in sorted(hidden | shown, key=(hidden | shown).__getitem__)
        ]


def _byte_level_bpe(
    vocabulary: _Vocabulary, metadata: Mapping[str, Any], row: PreTokenizer
) -> tokenizers.Tokenizer:
    merges = [_split_merge(merge) for merge in _array(metadata, "tokenizer.ggml.merges", str)]
    core = _tokenizer(vocabulary, merges, ignore_merges=row.ignore_merges)
    core.normalizer = row.normalizer()
    core.pre_tokenizer = row.build()
    core.decoder = decoders.ByteLevel()
    return core


def _split_merge(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator:
        raise ModelError(f"The GGUF merge {merge!r} is not two tokens with a space between.")
    return left, right


def _sentencepiece_bpe(
    vocabulary: _Vocabulary, metadata: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    scores = _array(metadata, "tokenizer.ggml.scores", float)
    _check_length("scores", scores, vocabulary.tokens)
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown = next(iter(vocabulary.of_type(TokenType.UNKNOWN)), None)
    core = _tokenizer(
        vocabulary,
        merges_by_score(vocabulary.of_type(TokenType.NORMAL), scores),
        byte_fallback=True,
        unk_token=unknown,
        fuse_unk=True,
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁")] * adds_space + [normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * adds_space
    )
    return core


def merges_by_score(tokens: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens whose join is a token, in the order SentencePiece would merge them.

    SentencePiece joins the neighbours whose join scores best. A list of merges in falling order
    of that score does the same. `tokens` maps a text to its index in `scores`.

    Raises ModelError for a vocabulary that would make more of them than memory and time allow.
    """
    by_score = sorted(tokens, key=lambda token: (-scores[tokens[token]], tokens[token]))
    merges: list[tuple[str, str]] = []
    chars_left = MERGED_CHARS_MAX
    for token in by_score:
        chars_left -= len(token)
        if len(token) > PIECE_CHARS_MAX or chars_left < 0:
            raise ModelError(
                f"The GGUF's vocabulary has tokens of {len(token):,} characters, or too many that "
                "are made of others; no tokenizer needs them. Fetch the file again."
            )
        halves = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in tokens and token[cut:] in tokens
        ]
        chars_left -= len(token) * len(halves)
        merges += halves
    return merges


def _tokenizer(
    vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocabulary.ids(), merges, **options))
    except Exception as error:  # the library raises bare Exception, for bad merges only
        raise ModelError(f"The GGUF vocabulary is not consistent: {error}.") from error


def _with_roles(
    core: tokenizers.Tokenizer,
    vocabulary: _Vocabulary,
    metadata: Mapping[str, Any],
    *,
    adds_bos: bool,
) -> TokenizerParts:
    def role(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = metadata.get(key)
        if token_id is not None and type(token_id) is not int:
            raise ModelError(f"The GGUF header's {key} is {token_id!r}, which is no token id.")
        is_token = token_id is not None and 0 <= token_id < len(vocabulary.tokens)
        return token_id if is_token else None

    bos, eos = role("bos"), role("eos")
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    control = vocabulary.of_type(TokenType.CONTROL)
    own = vocabulary.of_type(TokenType.USER_DEFINED)
    named = {token_id for text, token_id in control.items() if text in TURN_ENDS}
    named |= {token_id for text, token_id in own.items() if text in _CHAT_ENDS}
    declared = {token_id for token_id in (eos, role("eot"), role("eom")) if token_id is not None}
    return TokenizerParts(
        core=core,
        prefix=(bos,) if adds_bos and bos is not None else (),
        suffix=(eos,) if adds_eos and eos is not None else (),
        bos_id=bos,
        eos_id=eos,
        pad_id=role("padding"),
        eos_ids=frozenset(named | declared),
        chat_template=_text(metadata, "tokenizer.chat_template"),
        tool_template=_text(metadata, "tokenizer.chat_template.tool_use"),
    )


def _array(metadata: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    """A list whose entries are all of one kind, not empty."""
    values = metadata.get(key)
    if values is None or values == []:
        raise ModelError(f"The GGUF header has no {key}; the file carries no usable tokenizer.")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ModelError(f"The GGUF header's {key} is no list of {kind.__name__} values.")
    return values


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelError(f"The GGUF header's {key} is no text.")
    return value


def _check_length(name: str, values: Sequence[Any], tokens: Sequence[str]) -> None:
    if len(values) != len(tokens):
        raise ModelError(
            f"The GGUF header has {len(values)} entries in tokenizer.ggml.{name} "
            f"for {len(tokens)} tokens."
        )
