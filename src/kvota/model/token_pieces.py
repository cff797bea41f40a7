"""The exact bytes that a token id stands for in running text.

Vocabularies store pieces in one of two spellings, and the tokenizer's decoder says which:

    byte-level   every byte is one printable character     "Ġhello" = b" hello"
    metaspace    text with "▁" for a space, and "<0x0A>"    "▁hello" = b" hello"
                 for a byte that no piece covers

Half a character is a legal piece in both, so text appears only after joining pieces.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from kvota.core.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SUPPORTED = "ByteLevel, Metaspace, Replace, ByteFallback, Fuse and a Strip of one leading space"


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary writes bytes. Without `byte_level`, `replacements` are applied in order."""

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strips_leading_space: bool = False  # one space at the start of a decoded text

    def piece(self, token: str, *, is_added: bool) -> bytes:
        """The bytes of one token. Tokens added on top of the vocabulary are plain text."""
        if self.byte_level:
            return token.encode() if is_added else _from_byte_level(token)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()

    def as_decoder(self) -> dict[str, Any]:
        """The decoder of a tokenizer.json that undoes this spelling. Not for `byte_level`."""
        steps: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": old}, "content": new}
            for old, new in self.replacements
        ]
        steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
        return {"type": "Sequence", "decoders": steps}


def read_spelling(core: tokenizers.Tokenizer) -> Spelling:
    """The spelling that the tokenizer's decoder undoes. Raises UnsupportedModel naming it."""
    if core.decoder is None:
        raise UnsupportedModel(f"The tokenizer has no decoder. kvota reads {_SUPPORTED}.")
    steps = list(_flatten(json.loads(core.decoder.__getstate__())))
    return Spelling(
        byte_level=any(step["type"] == "ByteLevel" for step in steps),
        replacements=tuple(pair for step in steps if (pair := _replacement(step))),
        byte_fallback=any(step["type"] == "ByteFallback" for step in steps),
        strips_leading_space=any(_strips_leading_space(step) for step in steps),
    )


def token_pieces(core: tokenizers.Tokenizer, spelling: Spelling) -> tuple[bytes, ...]:
    """The bytes of every id, in order; empty for an id that no token has."""
    vocabulary: dict[str, int] = core.get_vocab(with_added_tokens=True)
    added = core.get_added_tokens_decoder()
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        pieces[token_id] = spelling.piece(token, is_added=token_id in added)
    return tuple(pieces)


def byte_level_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte.

    Printable bytes stand for themselves; the others take the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)) - set(printable))
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet.update({byte: chr(0x100 + index) for index, byte in enumerate(rest)})
    return alphabet


_BYTE_OF_CHARACTER: Mapping[str, int] = {
    character: byte for byte, character in byte_level_alphabet().items()
}


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # outside the alphabet: a token that was stored as plain text
        return token.encode()


def _flatten(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] == "Sequence":
        for inner in step["decoders"]:
            yield from _flatten(inner)
    elif _is_supported(step):
        yield step
    else:
        raise UnsupportedModel(
            f"The tokenizer's decoder has a step that kvota cannot undo: {json.dumps(step)}. "
            f"It reads {_SUPPORTED}."
        )


def _is_supported(step: dict[str, Any]) -> bool:
    kind = step["type"]
    if kind == "Strip":
        return _strips_leading_space(step)
    if kind == "Replace":
        return "String" in step["pattern"]
    return kind in {"ByteLevel", "Metaspace", "ByteFallback", "Fuse"}


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Replace":
        return step["pattern"]["String"], step["content"]
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    return None


def _strips_leading_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    is_strip = step["type"] == "Strip"
    return is_strip and (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
