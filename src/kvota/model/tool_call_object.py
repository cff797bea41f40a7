"""One call object, `{"name": …, "arguments": {…}}`, read while the model still writes it.

A call can be announced before its object is complete: as soon as the name is known and the
arguments have begun as an object. From then on the text of the arguments is passed on as it
comes, character by character exactly as written.
"""

import json
from enum import Enum, auto

from kvota.model.json_scanner import JSON_SPACE, JsonScanner, Place

NAME_KEY = "name"
ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
# An object that begins with another key is not a call, and need not be held back.
FIRST_KEYS = ARGUMENTS_KEYS | {NAME_KEY, "id", "type"}

_KEY_PLACES = (Place.FIRST_KEY, Place.KEY)


class _Reading(Enum):
    NOTHING = auto()
    KEY = auto()
    VALUE = auto()


class CallObject:
    """Feed characters to `accept`; take argument text with `drain` once `has_started`."""

    def __init__(self, *, needs_arguments: bool = False) -> None:
        """`needs_arguments`: an object without any is no call; else its arguments are empty."""
        self._needs_arguments = needs_arguments
        self.name: str | None = None
        self._json = JsonScanner()
        self._reading = _Reading.NOTHING
        self._text: list[str] = []  # of the key or value being read
        self._key: str | None = None
        self._arguments: list[str] = []  # not drained yet
        self._in_arguments = False  # inside the object that is passed on as it comes
        self._has_arguments = False

    @classmethod
    def of(cls, name: str) -> "CallObject":
        """A call whose name came before it: only its arguments and a closing brace are missing."""
        call = cls()
        for char in f'{{"{NAME_KEY}": {json.dumps(name)}, "arguments": ':
            call.accept(char)
        return call

    @property
    def has_whole_arguments(self) -> bool:
        return self.has_started and not self._in_arguments

    @property
    def has_started(self) -> bool:
        """The call is certain: it has a name, and arguments that began well."""
        return self.name is not None and self._has_arguments

    @property
    def is_complete(self) -> bool:
        return self._json.place is Place.DONE

    def drain(self) -> str:
        """The arguments' text since the last time."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def accept(self, char: str) -> bool:
        """Go on by one character. False: the object is no call from this character on."""
        place, depth = self._json.place, self._json.depth
        if not self._json.accept(char):
            return False
        if depth == 1:
            self._begin(char, place)
        if not self._collect(char, place, depth):
            return False
        return not self.is_complete or self._settle()

    def _begin(self, char: str, place: Place) -> None:
        if place in _KEY_PLACES and char == '"':
            self._reading, self._text = _Reading.KEY, []
        elif place is Place.VALUE and char not in JSON_SPACE:
            self._reading, self._text = _Reading.VALUE, []
            is_first = self._key in ARGUMENTS_KEYS and not self._has_arguments
            self._in_arguments = is_first and char == "{"

    def _collect(self, char: str, place: Place, depth: int) -> bool:
        if self._reading is _Reading.NOTHING:
            return True
        ends_word = place is Place.WORD and depth == 1 and self._json.place is not Place.WORD
        if not ends_word:  # else `char` already follows the value
            self._text.append(char)
        if self._in_arguments:
            self._pass_on(char)
        if self._reading is _Reading.KEY:
            return self._json.place is not Place.COLON or self._end_key()
        at_end = self._json.depth == 1 and self._json.place is Place.AFTER
        return not (ends_word or at_end) or self._end_value()

    def _pass_on(self, char: str) -> None:
        self._arguments.append(char)
        is_certain = self._json.depth == 1 or self._json.place is not Place.FIRST_KEY
        self._has_arguments = self._has_arguments or is_certain

    def _end_key(self) -> bool:
        self._reading = _Reading.NOTHING
        is_first = self._key is None
        self._key = json.loads("".join(self._text))
        return not is_first or self._key in FIRST_KEYS

    def _end_value(self) -> bool:
        self._reading = _Reading.NOTHING
        if self._in_arguments:
            self._in_arguments = False
        elif self._key == NAME_KEY and self.name is None:
            return self._set_name(json.loads("".join(self._text)))
        elif self._key in ARGUMENTS_KEYS and not self._has_arguments:
            return self._set_arguments(json.loads("".join(self._text)))
        return True

    def _set_name(self, name: object) -> bool:
        self.name = name if isinstance(name, str) and name and _is_text(name) else None
        return self.name is not None

    def _set_arguments(self, value: object) -> bool:
        """Arguments that were not written as an object: null, or an object's text in a string."""
        if value is None:
            return True
        try:
            is_object = (
                isinstance(value, str) and _is_text(value) and isinstance(json.loads(value), dict)
            )
        except (ValueError, RecursionError):
            is_object = False
        if is_object:
            self._arguments, self._has_arguments = [str(value)], True
        return is_object

    def _settle(self) -> bool:
        """At the closing brace: a call without arguments has empty ones."""
        if self.name is not None and not self._has_arguments and not self._needs_arguments:
            self._arguments, self._has_arguments = ["{}"], True
        return self.has_started


def _is_text(value: str) -> bool:
    """Not with half of a surrogate pair, which JSON can write and an answer cannot carry."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
