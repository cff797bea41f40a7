"""A stream put together again, for a client that wants one body.

OpenAI's rules, which every backend follows, make a general one possible: texts are joined, lists
are joined, a tool call is found by its index, and of everything else the latest value that is not
null counts. So fields that only one backend knows arrive as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

_JOINED: Final = frozenset(
    {"content", "text", "reasoning_content", "reasoning", "refusal", "arguments"}
)


class AssembledBody(Struct, kw_only=True):
    """A finished answer. What backends add at its top level is kept."""

    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""
    choices: list[dict[str, Any]]
    usage: dict[str, Any] | UnsetType = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    service_tier: str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[Any] | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET


_body = msgspec.json.Decoder(AssembledBody)


def decode_body(content: bytes) -> AssembledBody:
    """An answer that was not streamed. Raises msgspec.MsgspecError."""
    return _body.decode(content)


class Assembler:
    """`add` every chunk of a stream, then `body`."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._texts: list[str] = []  # not joined yet,
        self._texts_of = (0, "")  # of this choice, and its field
        self.num_bytes = 0

    def add(self, value: bytes) -> None:
        self.num_bytes += len(value)
        if self._texts:
            self._join_texts()
        chunk: dict[str, Any] = msgspec.json.decode(value)
        for part in chunk.pop("choices", ()):
            index = part.pop("index", 0)
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = {"index": index}
            _merge(choice, part)
        if None in chunk.values():
            chunk = {name: said for name, said in chunk.items() if said is not None}
        self._head = {**chunk, **self._head}  # what was said first counts

    def add_texts(self, choice: int, field: str, texts: Sequence[str], num_bytes: int) -> None:
        """Chunks like one that was added, but for their text (`likeness.py`)."""
        self.num_bytes += num_bytes
        if self._texts and self._texts_of != (choice, field):
            self._join_texts()
        self._texts_of = choice, field
        self._texts += texts

    def body(self, usage: Mapping[str, Any]) -> AssembledBody:
        """Raises msgspec.MsgspecError when the top level is not what it must be."""
        if self._texts:
            self._join_texts()
        choices = [_finished(self._choices[index]) for index in sorted(self._choices)]
        kind = str(self._head.get("object", "")).removesuffix(".chunk")
        fields = {**self._head, "object": kind, "choices": choices, "usage": dict(usage)}
        return msgspec.convert(fields, AssembledBody)

    def _join_texts(self) -> None:
        choice, field = self._choices[self._texts_of[0]], self._texts_of[1]
        holder = choice["delta"] if field == "content" else choice
        holder[field] = (holder.get(field) or "") + "".join(self._texts)
        self._texts.clear()


def _merge(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    for name, value in part.items():
        old: Any = whole.get(name)
        kind = type(value)
        if value is None:
            whole[name] = old
        elif kind is dict:
            if type(old) is not dict:
                old = whole[name] = {}
            _merge(old, value)
        elif name == "tool_calls":
            if old is None:
                old = whole[name] = []
            _merge_calls(old, value)
        elif kind is type(old) and (name in _JOINED or kind is list):
            whole[name] = old + value  # two texts, or two lists
        else:
            whole[name] = value


def _merge_calls(calls: list[dict[str, Any]], parts: list[dict[str, Any]]) -> None:
    for part in parts:
        index = part.get("index", len(calls))
        call = next((one for one in calls if one["index"] == index), None)
        if call is None:
            call = {"index": index}
            calls.append(call)
        _merge(call, part)


def _finished(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice as a body has it: a message in place of the deltas."""
    delta = choice.pop("delta", None)
    if delta is None:
        return {"logprobs": None, **choice}
    calls = delta.pop("tool_calls", None)
    message = {"role": "assistant", "content": None, "refusal": None, **delta}
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"} for call in calls
        ]
    elif message["content"] is None:
        message["content"] = ""
    return {"logprobs": None, **choice, "message": message}
