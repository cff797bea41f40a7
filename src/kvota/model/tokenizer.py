"""Text to token ids and back, for one model.

    encode   prompt text → ids. Framing tokens (BOS) are added once, and never a second time when
             the text already starts with them.
    pieces   id → the exact bytes of that token. Whoever streams joins pieces and decodes UTF-8.
    decode   ids → text: the joined pieces, with U+FFFD for bytes that are no character.

Two facts to know. The text of a special token ("<|im_end|>") inside a prompt becomes that token:
a chat template relies on it. Text from outside that must stay text is encoded with
`allow_special=False`. And SentencePiece models write a space before the first word; `decode`
drops it at the start of a text, as Hugging Face does, while `pieces` keeps it.

A Tokenizer is immutable and may be shared between threads; encoding releases the GIL.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kvota.core.errors import InvalidRequest
from kvota.model.gguf_tokenizer import read_gguf_tokenizer
from kvota.model.hf_tokenizer import read_hf_tokenizer
from kvota.model.token_pieces import read_spelling, token_pieces
from kvota.model.tokenizer_parts import TokenizerParts


class Tokenizer:
    """The vocabulary of one model. Build it with `from_directory` or `from_gguf_metadata`."""

    def __init__(self, parts: TokenizerParts) -> None:
        """Raises UnsupportedModel when the vocabulary's spelling is not known."""
        self._parts = parts
        self._spelling = read_spelling(parts.core)
        self.pieces: Sequence[bytes] = token_pieces(parts.core, self._spelling)
        self.longest_piece_bytes = max(map(len, self.pieces), default=1)
        added = parts.core.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.chat_template = parts.chat_template
        self.tool_template = parts.tool_template

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer":
        """From tokenizer.json and its neighbours. Raises ModelError naming a missing file."""
        return cls(read_hf_tokenizer(path))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the `tokenizer.*` keys of a GGUF header. Raises ModelError or UnsupportedModel."""
        return cls(read_gguf_tokenizer(metadata))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. The model's own vocabulary may be padded beyond it."""
        return len(self.pieces)

    @property
    def bos_token(self) -> str | None:
        return self._text_of(self._parts.bos_id)

    @property
    def eos_token(self) -> str | None:
        return self._text_of(self._parts.eos_id)

    @property
    def pad_token(self) -> str | None:
        return self._text_of(self._parts.pad_id)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """The ids of a text.

        `add_special_tokens` frames it as the model was trained (usually BOS); a rendered chat
        template brings its own frame and wants False. `allow_special=False` reads the text of
        special tokens as plain text. A byte that the vocabulary lacks is dropped, as Hugging Face
        does. Raises InvalidRequest for a text that is not Unicode.
        """
        core = self._parts.core if allow_special else self._literal_core
        try:
            # unlike `encode`, this lets the other threads run while it works
            [encoding] = core.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:
            raise InvalidRequest(
                "The text holds half of a UTF-16 surrogate pair, which is no character."
            ) from error
        ids: list[int] = encoding.ids
        return self._framed(ids) if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; ids beyond the vocabulary (padding) have none."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        size = len(self.pieces)
        raw = b"".join(self.pieces[i] for i in ids if i not in hidden and 0 <= i < size)
        text = raw.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._spelling.strips_leading_space else text

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones included; U+FFFD where it is not a whole character."""
        return self.pieces[token_id].decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text in the vocabulary."""
        found: int | None = self._parts.core.token_to_id(text)
        return found

    def hidden_ids(self, visible: Iterable[str] = ()) -> frozenset[int]:
        """The special ids that output hides, less those whose text must stay visible."""
        return self.special_ids - {self.token_id(text) for text in visible}

    def special_markers(self, texts: Iterable[str]) -> dict[str, int]:
        """Those of the texts that are special tokens, with their ids. Grammars need to know."""
        ids = {text: self.token_id(text) for text in texts}
        return {
            text: id_ for text, id_ in ids.items() if id_ is not None and id_ in self.special_ids
        }

    def to_json(self) -> str:
        """The tokenizer in Hugging Face's tokenizer.json format, for whoever needs its bytes.

        A decoder is written in steps that llguidance reads: it knows no Metaspace, and wants to
        be told of bytes even where no token stands for one.
        """
        text: str = self._parts.core.to_str()
        if self._spelling.byte_level or self._spelling.byte_fallback:
            return text
        return json.dumps({**json.loads(text), "decoder": self._spelling.as_decoder()})

    def describe(self) -> dict[str, Any]:
        """What evaluation harnesses ask of a served tokenizer."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": self.vocab_size,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "add_bos_token": bool(self._parts.prefix),
            "chat_template": self.chat_template,
        }

    def _framed(self, ids: list[int]) -> list[int]:
        prefix, suffix = list(self._parts.prefix), list(self._parts.suffix)
        if prefix and ids[: len(prefix)] != prefix:
            ids = prefix + ids
        if suffix and ids[-len(suffix) :] != suffix:
            ids = ids + suffix
        return ids

    def _text_of(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.token_text(token_id)

    @cached_property
    def _literal_core(self) -> tokenizers.Tokenizer:
        core = tokenizers.Tokenizer.from_str(self._parts.core.to_str())
        core.encode_special_tokens = True
        return core
