"""Log probabilities in the three forms clients ask for: chat's, completions' and vLLM's.

A token is named by the text it adds. Where that is only part of a character, chat shows U+FFFD
(its `bytes` field has the truth) and completions write OpenAI's `bytes:\\xe5\\xa5`. Special tokens
are named but add nothing to the text, so their bytes are empty.
"""

import codecs
from collections.abc import Sequence
from typing import Final

import msgspec

from kvota.core.request import TokenLogprobs
from kvota.node.served import Tokenizer
from kvota.wire.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    EncodedPromptLogprobs,
    PromptLogprobs,
    TopLogprob,
)

_LOWEST: Final = -9999.0  # JSON has no infinity; OpenAI uses this number for "practically never"


class TokenNames:
    """How tokens are written in answers. `hidden` ones are those that the text does not show."""

    def __init__(self, tokenizer: Tokenizer, *, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden

    def added_bytes(self, token: int) -> bytes:
        """What the token adds to the text."""
        pieces = self._tokenizer.pieces
        return pieces[token] if token < len(pieces) and token not in self._hidden else b""

    def text(self, ids: Sequence[int]) -> str:
        """What the tokens add together."""
        return b"".join(map(self.added_bytes, ids)).decode("utf-8", "replace")

    def shown(self, token: int) -> str:
        if token >= len(self._tokenizer.pieces):
            return ""
        return self._tokenizer.token_text(token)

    def exact(self, token: int) -> str:
        """A name that differs between any two tokens that differ in bytes."""
        if token >= len(self._tokenizer.pieces):
            return ""
        piece = self._tokenizer.pieces[token]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                names.shown(entry.token),
                _finite(entry.logprob),
                list(names.added_bytes(entry.token)),
                [
                    TopLogprob(names.shown(token), _finite(value), list(names.added_bytes(token)))
                    for token, value in entry.top
                ],
            )
            for entry in entries
        ]
    )


def vllm_prompt_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: by token id; null for the first token, which nothing precedes."""
    result: PromptLogprobs = [None]
    for entry in entries:
        known: list[tuple[int, float, int | None]] = [
            (token, value, rank) for rank, (token, value) in enumerate(entry.top, start=1)
        ]
        if all(token != entry.token for token, _, _ in known):
            known.append((entry.token, entry.logprob, entry.rank))
        result.append(
            {
                str(token): {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": names.shown(token),
                }
                for token, value, rank in known
            }
        )
    return result


def encoded_prompt_logprobs(
    entries: Sequence[TokenLogprobs], names: TokenNames
) -> EncodedPromptLogprobs:
    """What `vllm_prompt_logprobs` gives, to be kept until the answer is complete."""
    return EncodedPromptLogprobs(msgspec.json.encode(vllm_prompt_logprobs(entries, names)))


class CompletionLogprobWriter:
    """Completions' four lists for one choice; `text_offset` runs on from call to call."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(
        self, ids: Sequence[int], entries: Sequence[TokenLogprobs], text: str
    ) -> CompletionLogprobs:
        """The echoed prompt. `text` is how it is echoed: a space that the tokenizer put before the
        first word is not in it, and so is not in the first token's name either. What the client
        wrote for a special token is.
        """
        out = CompletionLogprobs([], [], [], [])
        if not ids:
            return out
        first = next((i for i in ids if self._names.added_bytes(i)), ids[0])
        strip = self._names.added_bytes(first).startswith(b" ") and not text.startswith(" ")
        is_stripped = False
        for position, token in enumerate(ids):
            name, added = self._names.exact(token), self._names.added_bytes(token)
            if strip and not is_stripped and added:
                name, added, is_stripped = name.removeprefix(" "), added.removeprefix(b" "), True
            elif name and not added and text.startswith(name, self._offset):
                added = name.encode()
            entry = entries[position - 1] if 0 < position <= len(entries) else None
            self._append(out, entry, name, added)
        return out

    def follow(self, other: "CompletionLogprobWriter") -> None:
        """Go on where `other` stands: it has written the same prompt."""
        self._offset = other._offset
        self._decoder.setstate(other._decoder.getstate())

    def output(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        out = CompletionLogprobs([], [], [], [])
        for entry in entries:
            name, added = self._names.exact(entry.token), self._names.added_bytes(entry.token)
            self._append(out, entry, name, added)
        return out

    def _append(
        self, out: CompletionLogprobs, entry: TokenLogprobs | None, name: str, added: bytes
    ) -> None:
        out.tokens.append(name)
        out.text_offset.append(self._offset)
        self._offset += len(self._decoder.decode(added))
        if entry is None:
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            return
        out.token_logprobs.append(_finite(entry.logprob))
        top = {name: _finite(entry.logprob)}
        for token, value in entry.top:
            top.setdefault(self._names.exact(token), _finite(value))
        out.top_logprobs.append(top)


def _finite(logprob: float) -> float:
    return max(float(logprob), _LOWEST)
