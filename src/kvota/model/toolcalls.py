"""Tells tool calls from content in the text of one answer, while it is written.

Rules, the same for any split of the text into pieces:

- No part of a marker is ever content, unless it turns out not to be one.
- A call is announced when it is certain (`tool_call_object.py`), then its arguments follow as they
  are written. The fragments of a call joined are its arguments exactly as the model wrote them,
  and "{}" where it wrote none.
- What looked like a call and is none becomes content, whole. A call that breaks off after it was
  announced keeps what it has; what follows the break is content. Half of its arguments are out by
  then, so whoever ends the answer must not say that it calls a tool: see `cut_call`.
- With `whole_calls` a call is announced when its arguments are whole, so one that breaks off, or
  ends with the text, is content like all that is no call.
- With `only`, a text that does not begin with a call to one of these functions has none at all: it
  is written in a form of its own, in which a mark is a text like any other. There a call has its
  arguments, too: a JSON answer may well have a name.
- White space next to a call belongs to the format and is dropped before and behind it; between a
  call and later content it stays.

The engine must not hide the tokens of the markers: see `ToolFormat.visible_markers`.
"""

import re
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from random import Random

from kvota.model.json_scanner import JSON_SPACE
from kvota.model.tool_call_object import CallObject
from kvota.model.tool_format import ToolFormat

ID_CHARS = string.ascii_letters + string.digits
NUM_ID_CHARS = 24
# What may stand between the mark that opens a call and the one that opens its arguments, so far.
_NAME_SO_FAR = re.compile(
    r"\s?[^\s\"{}\[\]]{0,256}(\[[A-Z_]{0,9}(\][^\s\"{}\[\]]{0,64}(\[[A-Z]{0,4})?)?)?"
)


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    index: int  # among the calls of this answer
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    json_fragment: str


ToolCallEvent = ContentText | CallStarted | CallArguments


def call_ids(random: Random) -> Callable[[], str]:
    """A source of ids like OpenAI's: "call_" and 24 letters or digits."""
    return lambda: "call_" + "".join(random.choices(ID_CHARS, k=NUM_ID_CHARS))


class _Mode(Enum):
    CONTENT = auto()
    OPENING = auto()  # after a marker or separator, before the object
    CALL = auto()
    AFTER_CALL = auto()  # the object is complete; its closing mark may follow


class ToolCallParser:
    """One answer's text in, events out. `finish` once, at the end of the text."""

    def __init__(
        self,
        format: ToolFormat,
        new_id: Callable[[], str],
        *,
        whole_calls: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        self._syntax = format.syntax
        self._new_id = new_id
        self._whole_calls = whole_calls
        self._only = only
        self.cut_call: int | None = None  # the first that was announced and has half its arguments
        self._mode = _Mode.CONTENT
        self._held = ""  # of a possible marker or call: content again if it is none
        self._held_call: list[str] = []  # what follows it, until the call is announced
        self._space: list[str] = []  # white space that is content only if content follows
        self._call = CallObject()
        self._is_announced = False
        self._num_calls = 0
        self._in_array = False
        self._at_start = True  # of the answer: nothing but white space so far
        self._has_words = False  # content other than white space
        self._behind_call = False  # nothing but white space since the last call
        self._events = _Events()
        self._steps: dict[_Mode, Callable[[str], None]] = {
            _Mode.CONTENT: self._in_content,
            _Mode.OPENING: self._in_name if self._syntax.arguments_mark else self._in_opening,
            _Mode.CALL: self._in_call,
            _Mode.AFTER_CALL: self._after_call,
        }

    def push(self, text: str) -> list[ToolCallEvent]:
        """What is certain now that `text` has arrived."""
        for char in text:
            self._step(char)
        return self._events.take()

    def finish(self, *, at_limit: bool = False) -> list[ToolCallEvent]:
        """The rest. A call that is not announced by now is content.

        With `at_limit` the model was not done: a call that is certain is told as far as it is.
        """
        if self._mode is _Mode.CALL and at_limit and self._call.has_started:
            self._pass_on()
        if self._mode is _Mode.CALL:
            self._note_cut()
        if self._mode is not _Mode.AFTER_CALL:
            self._give_back()
        if not self._behind_call:
            self._events.add_content("".join(self._space))
        return self._events.take()

    def _step(self, char: str) -> None:
        self._steps[self._mode](char)

    def _in_content(self, char: str) -> None:
        held = self._held + char
        if self._only is not None and self._has_words:
            self._add_content(char)
        elif self._syntax.opening.startswith(held):
            self._held = held
            if held == self._syntax.opening:
                self._mode = _Mode.OPENING
        elif self._held:  # no marker after all, but one may begin further on
            self._held = ""
            self._add_content(held[0])
            for later in held[1:]:
                self._step(later)
        elif char == "{" and self._at_start and self._syntax.may_start_bare:
            self._begin_call()
        else:
            self._add_content(char)

    def _in_opening(self, char: str) -> None:
        if char == "{":
            self._begin_call()
        elif char in JSON_SPACE:
            self._held_call.append(char)
        elif char == "[" and self._syntax.is_array and not self._in_array:
            self._in_array = True
            self._held_call.append(char)
        else:
            self._break_off(char)

    def _in_name(self, char: str) -> None:
        """`f[ARGS]`, or `f[CALL_ID]abc[ARGS]`: the call's object is made of what follows."""
        syntax, held = self._syntax, self._held + char
        text = held.removeprefix(syntax.opening)
        if text.endswith(syntax.arguments_mark):
            name = text.removesuffix(syntax.arguments_mark).partition(syntax.id_mark)[0].strip()
            if name:
                self._held = held
                self._set_call(CallObject.of(name))
                return
        if _NAME_SO_FAR.fullmatch(text):
            self._held = held
        else:
            self._break_off(char)

    def _begin_call(self) -> None:
        self._set_call(CallObject(needs_arguments=self._only is not None))
        self._in_call("{")

    def _set_call(self, call: CallObject) -> None:
        self._mode, self._call, self._is_announced = _Mode.CALL, call, False

    def _in_call(self, char: str) -> None:
        if not self._call.accept(char) or not self._may_be_called(self._call.name):
            self._note_cut()
            self._break_off(char)
            return
        if self._syntax.arguments_mark and self._call.has_whole_arguments:
            self._call.accept("}")
        if not self._is_announced:
            self._held_call.append(char)
        if self._is_certain():
            self._pass_on()
        if self._call.is_complete:
            self._mode = _Mode.AFTER_CALL

    def _may_be_called(self, name: str | None) -> bool:
        return self._only is None or name is None or name in self._only

    def _is_certain(self) -> bool:
        call = self._call
        return call.has_whole_arguments if self._whole_calls else call.has_started

    def _pass_on(self) -> None:
        if not self._is_announced:
            self._announce()
        self._events.add_arguments(self._num_calls - 1, self._call.drain())

    def _announce(self) -> None:
        assert self._call.name is not None
        self._events.add(CallStarted(self._num_calls, self._new_id(), self._call.name))
        self._num_calls += 1
        self._held = ""
        self._held_call.clear()
        self._space.clear()
        self._is_announced = self._behind_call = True
        self._at_start = False

    def _note_cut(self) -> None:
        if self._is_announced and not self._call.has_whole_arguments and self.cut_call is None:
            self.cut_call = self._num_calls - 1

    def _after_call(self, char: str) -> None:
        held = self._held + char
        closing = self._syntax.closing
        if closing and closing.startswith(held):
            self._held = held
            if held == closing:
                self._end_group()
        elif self._held:
            self._held, self._mode = "", _Mode.CONTENT
            for later in held:
                self._step(later)
        else:
            self._between_calls(char)

    def _between_calls(self, char: str) -> None:
        if char in JSON_SPACE:
            self._space.append(char)
        elif char == "{" and not self._syntax.arguments_mark:
            self._begin_call()
        elif char == self._syntax.separator:
            self._mode, self._held = _Mode.OPENING, char
        elif char == "]" and self._in_array:
            self._end_group()
        else:
            self._break_off(char)

    def _end_group(self) -> None:
        self._mode, self._held = _Mode.CONTENT, ""
        self._space.clear()
        self._in_array = False

    def _break_off(self, char: str) -> None:
        self._give_back()
        self._mode, self._in_array = _Mode.CONTENT, False
        self._step(char)

    def _give_back(self) -> None:
        held, self._held = self._held + "".join(self._held_call), ""
        self._held_call.clear()
        for char in held:
            self._add_content(char)

    def _add_content(self, char: str) -> None:
        self._space.append(char)
        if char in JSON_SPACE:
            return
        self._events.add_content("".join(self._space))
        self._space.clear()
        self._at_start = self._behind_call = False
        self._has_words = True


class _Events:
    """Events in order; neighbours of one kind become one."""

    def __init__(self) -> None:
        self._events: list[ToolCallEvent] = []
        self._pieces: list[str] = []
        self._pieces_of: int | None = None  # a call's index, or content

    def add(self, event: ToolCallEvent) -> None:
        self._flush()
        self._events.append(event)

    def add_content(self, text: str) -> None:
        self._add_piece(None, text)

    def add_arguments(self, index: int, text: str) -> None:
        self._add_piece(index, text)

    def take(self) -> list[ToolCallEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _add_piece(self, owner: int | None, text: str) -> None:
        if owner != self._pieces_of:
            self._flush()
            self._pieces_of = owner
        if text:
            self._pieces.append(text)

    def _flush(self) -> None:
        if not self._pieces:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        owner = self._pieces_of
        self._events.append(ContentText(text) if owner is None else CallArguments(owner, text))
