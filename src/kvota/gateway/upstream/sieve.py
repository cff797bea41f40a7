"""The texts of an answer on their way through a filter, and all that would give them away.

    chunk ─▶ content · reasoning · refusal · a completion's text · arguments of tool calls
               └ what the filter holds back comes with a later chunk of its choice
          ─▶ logprobs · token ids: say the same again, so they wait until nothing is held back

A choice's last chunk brings whatever is left of it. The name of a tool comes whole, and is searched
so: clients do not join pieces of it.
"""

from collections.abc import Iterable
from typing import Any, Final, Protocol

import msgspec

from kvota.gateway.upstream.chunks import TEXT_FIELDS

_REPEATS: Final = ("logprobs", "token_ids")
_Place = tuple[str, int | None]  # a field, and the tool call that it is of


class TextFilter(Protocol):
    """Looks at texts on their way out. `stream` names one text: a choice's content, say.

    Both may raise ContentFiltered, which ends the answer.
    """

    def feed(self, stream: str, text: str) -> str:
        """What may go out now; the rest is held back."""

    def finish(self, stream: str) -> str:
        """What was held back and may go out, for nothing follows."""


class Sieve:
    """One answer. Raises whatever the filter raises."""

    def __init__(self, text_filter: TextFilter) -> None:
        self._filter = text_filter
        self._choices: dict[int, _Choice] = {}

    def chunk(self, value: bytes) -> bytes:
        """A chunk of a stream as it may go out. Its types have been checked."""
        chunk: dict[str, Any] = msgspec.json.decode(value)
        for part in chunk["choices"]:
            number = part.get("index", 0)
            choice = self._choices.get(number)
            if choice is None:
                choice = self._choices[number] = _Choice(number, self._filter)
            choice.sift(part)
        return msgspec.json.encode(chunk)

    def whole(self, choices: Iterable[dict[str, Any]]) -> None:
        """The same for an answer in one piece, in place."""
        for number, one in enumerate(choices):
            _Choice(number, self._filter).all_of(said_in(one))


class _Choice:
    """What of one choice has gone into the filter, and has not come out."""

    def __init__(self, number: int, text_filter: TextFilter) -> None:
        self._number = number
        self._filter = text_filter
        self._num_held: dict[_Place, int] = {}  # characters
        self._repeats: dict[str, Any] = {}

    def sift(self, part: dict[str, Any]) -> None:
        delta = part.get("delta")
        holder = part if delta is None else delta
        self._feed_all(holder)
        is_last = bool(part.get("finish_reason"))
        if is_last and (rests := self._finish_all()):
            if delta is None and any(name != "text" for (name, _), _ in rests):
                holder = part["delta"] = {}
            _add(rests, holder)
        self._hold_repeats(part, may_go=is_last or not any(self._num_held.values()))

    def all_of(self, holder: dict[str, Any]) -> None:
        """A whole message, or completion."""
        self._feed_all(holder)
        _add(self._finish_all(), holder)

    def _feed_all(self, holder: dict[str, Any]) -> None:
        for name in TEXT_FIELDS:
            if isinstance(text := holder.get(name), str) and text:
                holder[name] = self._feed((name, None), text)
        for number, call in _calls_of(holder):
            self._feed_call(number, call.get("function") or {})

    def _feed_call(self, number: int, function: dict[str, Any]) -> None:
        for name, said in function.items():
            if name == "arguments" and isinstance(said, str):
                function[name] = self._feed((name, number), said)
            elif said is not None:
                text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
                self._filter.feed("whole", text)
                self._filter.finish("whole")

    def _feed(self, place: _Place, text: str) -> str:
        allowed = self._filter.feed(self._stream(place), text)
        self._num_held[place] = self._num_held.get(place, 0) + len(text) - len(allowed)
        return allowed

    def _finish_all(self) -> list[tuple[_Place, str]]:
        """What is left of every text."""
        rests = [(place, self._filter.finish(self._stream(place))) for place in self._num_held]
        self._num_held.clear()
        return [(place, rest) for place, rest in rests if rest]

    def _hold_repeats(self, part: dict[str, Any], *, may_go: bool) -> None:
        held = self._repeats
        for name in _REPEATS:
            if part.get(name) is not None:
                held[name] = _joined(held.get(name), part[name])
                part[name] = None
        if may_go:
            part.update(held)
            held.clear()

    def _stream(self, place: _Place) -> str:
        return f"{self._number}:{place[0]}:{place[1]}"


def said_in(choice: dict[str, Any]) -> dict[str, Any]:
    """What holds the texts of a choice that came whole."""
    message = choice.get("message")
    return message if isinstance(message, dict) else choice


def _add(rests: Iterable[tuple[_Place, str]], holder: dict[str, Any]) -> None:
    for (name, call), rest in rests:
        where = holder if call is None else _function_of(call, holder)
        where[name] = (where.get(name) or "") + rest


def _function_of(number: int, holder: dict[str, Any]) -> dict[str, Any]:
    """The tool call `number` of a chunk or message, which may not speak of it yet."""
    calls: list[dict[str, Any]] = holder.get("tool_calls") or []
    holder["tool_calls"] = calls
    call = dict(_calls_of(holder)).get(number)
    if call is None:
        calls.append(call := {"index": number})
    if call.get("function") is None:
        call["function"] = {}
    function: dict[str, Any] = call["function"]
    return function


def _calls_of(holder: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """With their numbers: where none is stated, their places."""
    return [
        (position if call.get("index") is None else call["index"], call)
        for position, call in enumerate(holder.get("tool_calls") or ())
    ]


def _joined(old: Any, new: Any) -> Any:
    """Lists one after the other, also those in dicts; of everything else the latest."""
    if isinstance(old, list) and isinstance(new, list):
        return old + new
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _joined(old.get(name), value) for name, value in new.items()}
    return old if new is None else new
