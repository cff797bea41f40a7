"""What the gateway needs to know of a streamed chunk, and how a chunk is changed on its way.

Decoding into these structs skips everything else in the chunk, and costs a microsecond or two; the
chunk itself is passed on as the bytes it came in, unless it has to say something else.
"""

from collections.abc import Collection
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

ABSENT: Final = (b"", b"null")
NOTHING: Final = Raw(b"")
TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning", "refusal", "text")
_NULL_USAGE: Final = b',"usage":null'


class CallPart(Struct):
    """What a chunk adds to one tool call. Typed, so that what is put together is known to fit."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: dict[str, Raw] | None = None


class Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    role: str | None = None
    tool_calls: list[CallPart] | None = None


class Part(Struct):
    """What a chunk adds to one choice."""

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def num_tokens(self) -> int:
        """Tokens it brings, counted by what it is: exact with token_ids, else one for any text.

        A chunk whose text is empty may be a token too (half a character), unless it only says
        who speaks or why it ends.
        """
        if self.token_ids:
            return len(self.token_ids)
        delta = self.delta
        if delta is None:
            return 1 if self.text or (self.text is not None and not self.finish_reason) else 0
        if (
            delta.content
            or delta.reasoning_content
            or delta.reasoning
            or delta.refusal
            or delta.tool_calls
        ):
            return 1
        is_formal = self.finish_reason or delta.role is not None or delta.content is None
        return 0 if is_formal else 1


class PromptDetails(Struct):
    cached_tokens: int | None = None


class BackendUsage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Chunk(Struct):
    choices: list[Part] | None = None
    model: str | None = None
    usage: Raw = NOTHING
    error: Raw = NOTHING
    object: str | None = None

    @property
    def is_error(self) -> bool:
        """Older vLLM writes `{"object": "error", …}` where all others write `{"error": …}`."""
        if self.error is NOTHING:
            return self.object == "error"
        return bytes(self.error) not in ABSENT or self.object == "error"


decode_chunk: Final = msgspec.json.Decoder(Chunk).decode  # raises MsgspecError for what is none
_usage = msgspec.json.Decoder(BackendUsage)
_fields = msgspec.json.Decoder(dict[str, Raw])


def decode_usage(raw: Raw) -> BackendUsage | None:
    """None when there is none, or none that makes sense: then we go on with our own count."""
    if bytes(raw) in ABSENT:
        return None
    try:
        return _usage.decode(raw)
    except msgspec.MsgspecError:
        return None


def without_usage(value: bytes) -> bytes:
    # A quote inside a JSON string is always escaped, so these bytes can be nothing else.
    if _NULL_USAGE in value:
        return value.replace(_NULL_USAGE, b"", 1)
    fields = _fields.decode(value)
    fields.pop("usage", None)
    return msgspec.json.encode(fields)


def with_model(value: bytes, model: str) -> bytes:
    fields = _fields.decode(value)
    fields["model"] = Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def usage_chunk(like: bytes, usage: dict[str, Any]) -> bytes:
    """A chunk of the same stream as `like` that holds nothing but usage."""
    fields = _fields.decode(like)
    fields["choices"] = Raw(b"[]")
    fields["usage"] = Raw(msgspec.json.encode(usage))
    return msgspec.json.encode(fields)


def without_choices(value: bytes, ended: Collection[int]) -> bytes | None:
    """The chunk without what it says of choices that have ended; None when nothing is left."""
    chunk: dict[str, Any] = msgspec.json.decode(value)
    chunk["choices"] = [one for one in chunk["choices"] if one.get("index", 0) not in ended]
    return msgspec.json.encode(chunk) if chunk["choices"] else None
