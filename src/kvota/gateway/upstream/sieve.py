"""The texts of an answer on their way through a filter, and all that would give them away.

    chunk ─▶ content · reasoning, and its details · refusal · a completion's text
             arguments of tool calls, and of the one function call of older clients
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
_DETAILS: Final = {"text": "reasoning.text", "summary": "reasoning.summary"}  # OpenRouter's types
# A field, and the tool call or the detail of reasoning that it is of; arguments of none are those
# of `function_call`.
_Place = tuple[str, int | None]


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
            if delta is None and any(place != ("text", None) for place, _ in rests):
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
        for number, call in _numbered(holder.get("tool_calls")):
            self._feed_call(number, call.get("function"))
        self._feed_call(None, holder.get("function_call"))
        for number, detail in _numbered(holder.get("reasoning_details")):
            for name in _DETAILS:
                if isinstance(text := detail.get(name), str) and text:
                    detail[name] = self._feed((name, number), text)

    def _feed_call(self, number: int | None, function: Any) -> None:
        if not isinstance(function, dict):
            return
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
    for (name, number), rest in rests:
        where = _where(name, number, holder)
        where[name] = (where.get(name) or "") + rest


def _where(name: str, number: int | None, holder: dict[str, Any]) -> dict[str, Any]:
    """What of a chunk or message has the field; it may not speak of it yet."""
    if name == "arguments":
        call = holder if number is None else _one_of("tool_calls", number, holder)
        return _inside(call, "function_call" if number is None else "function")
    if number is None:
        return holder
    detail = _one_of("reasoning_details", number, holder)
    detail.setdefault("type", _DETAILS[name])
    return detail


def _one_of(name: str, number: int, holder: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(holder.get(name), list):
        holder[name] = []
    one = dict(_numbered(holder[name])).get(number)
    if one is None:
        holder[name].append(one := {"index": number})
    return one


def _inside(holder: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(holder.get(name), dict):
        holder[name] = {}
    inner: dict[str, Any] = holder[name]
    return inner


def _numbered(given: Any) -> list[tuple[int, dict[str, Any]]]:
    """Tool calls, or details, with their numbers: where none is stated, their places."""
    found = given if isinstance(given, list) else []
    return [
        (one["index"] if isinstance(one.get("index"), int) else position, one)
        for position, one in enumerate(found)
        if isinstance(one, dict)
    ]


def _joined(old: Any, new: Any) -> Any:
    """Lists one after the other, also those in dicts; of everything else the latest."""
    if isinstance(old, list) and isinstance(new, list):
        return old + new
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _joined(old.get(name), value) for name, value in new.items()}
    return old if new is None else new
