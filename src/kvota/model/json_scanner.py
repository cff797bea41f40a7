"""Reads one JSON object a character at a time, and knows at once which character cannot follow.

The grammar is RFC 8259 without extensions, so what was accepted whole is what `json.loads` reads.
Numbers are checked when they end.
"""

import re
from enum import Enum, auto

JSON_SPACE = " \t\n\r"
DEPTH_MAX = 100  # open objects and arrays; json.loads itself gives up near 1,000
WORD_CHARS_MAX = 1_000

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORD_STARTS = frozenset("-0123456789tfn")
_WORD_CHARS = frozenset("0123456789+-.eEtrufalsn")
_LITERALS = frozenset({"true", "false", "null"})
_ESCAPES = frozenset('"\\/bfnrt')
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}


class Place(Enum):
    """What may come next."""

    START = auto()  # the object's brace
    FIRST_KEY = auto()  # a key, or the end of an empty object
    KEY = auto()
    COLON = auto()
    FIRST_ITEM = auto()  # a value, or the end of an empty array
    VALUE = auto()
    AFTER = auto()  # a comma, or the end of what is open
    STRING = auto()
    ESCAPE = auto()  # the character after a backslash
    HEX = auto()  # of \uXXXX
    WORD = auto()  # a number or a literal
    DONE = auto()


class JsonScanner:
    """`place` and `depth` describe where the text so far has led."""

    def __init__(self) -> None:
        self.place = Place.START
        self._open: list[str] = []
        self._in_key = False
        self._word = ""
        self._num_hex = 0
        self._rules = {
            Place.START: self._start,
            Place.FIRST_KEY: self._first_key,
            Place.KEY: self._key,
            Place.COLON: self._colon,
            Place.FIRST_ITEM: self._first_item,
            Place.VALUE: self._value,
            Place.AFTER: self._after,
            Place.STRING: self._string,
            Place.ESCAPE: self._escape,
            Place.HEX: self._hex,
            Place.WORD: self._in_word,
            Place.DONE: self._done,
        }

    @property
    def depth(self) -> int:
        return len(self._open)

    def accept(self, char: str) -> bool:
        """Go on by one character; False if it cannot follow, and then nothing has changed."""
        return self._rules[self.place](char)

    def _start(self, char: str) -> bool:
        return char == "{" and self._push(char)

    def _first_key(self, char: str) -> bool:
        return self._pop(char) if char == "}" else self._key(char)

    def _key(self, char: str) -> bool:
        if char == '"':
            self.place, self._in_key = Place.STRING, True
            return True
        return char in JSON_SPACE

    def _colon(self, char: str) -> bool:
        if char == ":":
            self.place = Place.VALUE
            return True
        return char in JSON_SPACE

    def _first_item(self, char: str) -> bool:
        return self._pop(char) if char == "]" else self._value(char)

    def _value(self, char: str) -> bool:
        if char == '"':
            self.place, self._in_key = Place.STRING, False
            return True
        if char in _WORD_STARTS:
            self.place, self._word = Place.WORD, char
            return True
        if char in _CLOSING:
            return self._push(char)
        return char in JSON_SPACE

    def _after(self, char: str) -> bool:
        if char == ",":
            self.place = Place.KEY if self._open[-1] == "{" else Place.VALUE
            return True
        return self._pop(char) if char in "]}" else char in JSON_SPACE

    def _string(self, char: str) -> bool:
        if char == '"':
            self.place = Place.COLON if self._in_key else Place.AFTER
        elif char == "\\":
            self.place = Place.ESCAPE
        return char >= " "

    def _escape(self, char: str) -> bool:
        if char == "u":
            self.place, self._num_hex = Place.HEX, 0
            return True
        if char in _ESCAPES:
            self.place = Place.STRING
            return True
        return False

    def _hex(self, char: str) -> bool:
        if char not in _HEX_DIGITS:
            return False
        self._num_hex += 1
        if self._num_hex == 4:
            self.place = Place.STRING
        return True

    def _in_word(self, char: str) -> bool:
        if char in _WORD_CHARS:
            self._word += char
            return len(self._word) <= WORD_CHARS_MAX
        if self._word not in _LITERALS and not _NUMBER.fullmatch(self._word):
            return False
        if self._after(char):
            self.place = Place.AFTER if self.place is Place.WORD else self.place
            return True
        return False

    def _done(self, char: str) -> bool:
        return False

    def _push(self, char: str) -> bool:
        if len(self._open) == DEPTH_MAX:
            return False
        self._open.append(char)
        self.place = Place.FIRST_KEY if char == "{" else Place.FIRST_ITEM
        return True

    def _pop(self, char: str) -> bool:
        if char != _CLOSING[self._open[-1]]:
            return False
        self._open.pop()
        self.place = Place.AFTER if self._open else Place.DONE
        return True
