r"""A small language of patterns, chosen so that searching is linear and streams can be searched.

    text     a  \.  \t \n \r        itself          set     [a-f0-9_]  [^x]     one of these, or not
    class    \d \w \s \D \W \S  .   as in Python    group   (ab|c)  (?:ab|c)    one of these
    repeat   x?  x{3}  x{2,5}       bounded         edge    \b                  of a word

What is left out, and why: `*`, `+` and `{2,}`, because a match without a longest length would hold
back a stream without end; back references and look-around, because no automaton follows them.
Every pattern so has a longest match, and becomes an automaton without a cycle.
"""

import unicodedata
from dataclasses import dataclass
from typing import Final

from kvota.core.errors import ConfigError

REPEAT_MAX: Final = 256
DEPTH_MAX: Final = 32  # of groups inside each other
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}
_SPECIAL: Final = frozenset("\\.[](){}?|*+^$")
_UNBOUNDED: Final = "is not known here; give a bound, such as {0,64}"


@dataclass(frozen=True, slots=True)
class CharSet:
    """A set of characters: ranges and classes, or everything but them."""

    ranges: tuple[tuple[str, str], ...] = ()
    classes: tuple[str, ...] = ()  # of "dws"
    is_negated: bool = False
    ignores_case: bool = False

    def has(self, character: str) -> bool:
        """Without case, `character` is taken folded, and the ranges were when they were made."""
        known = folded(character) if self.ignores_case else character
        found = any(low <= known <= high for low, high in self.ranges) or any(
            _is_of_class(known, name) for name in self.classes
        )
        return found != self.is_negated


@dataclass(frozen=True, slots=True)
class Edge:
    """Between a character of a word and one that is none."""


@dataclass(frozen=True, slots=True)
class Series:
    parts: "tuple[Part, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    parts: "tuple[Part, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    part: "Part"
    least: int
    most: int


Part = CharSet | Edge | Series | Choice | Repeat


def parse(pattern: str, *, ignores_case: bool = True) -> Part:
    """The parts of a pattern. Raises ConfigError that says where it cannot be read."""
    return _Parser(pattern, ignores_case).whole()


def literal(text: str, *, ignores_case: bool = True, whole_words: bool = False) -> Part:
    """A part that matches `text`, which is not empty, as it stands."""
    parts: list[Part] = [_single(character, ignores_case) for character in text]
    if whole_words and is_word(text[0]):
        parts.insert(0, Edge())
    if whole_words and is_word(text[-1]):
        parts.append(Edge())
    return Series(tuple(parts))


def can_be_empty(part: Part) -> bool:
    """True for what would be found everywhere."""
    match part:
        case CharSet():
            return False
        case Edge():
            return True
        case Series(parts):
            return all(can_be_empty(inner) for inner in parts)
        case Choice(parts):
            return any(can_be_empty(inner) for inner in parts)
        case Repeat(inner, least, _):
            return least == 0 or can_be_empty(inner)


def folded(character: str) -> str:
    """One character without case and without width: Ａ, A and a are one."""
    for fold in (lambda c: unicodedata.normalize("NFKC", c), str.casefold):
        changed = fold(character)
        character = changed if len(changed) == 1 else character
    return character


def is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _is_of_class(character: str, name: str) -> bool:
    if name == "d":
        return character.isdecimal()
    return is_word(character) if name == "w" else character.isspace()


def _single(character: str, ignores_case: bool) -> CharSet:
    known = folded(character) if ignores_case else character
    return CharSet(ranges=((known, known),), ignores_case=ignores_case)


class _Parser:
    """Reads a pattern from left to right, one method per rule of its grammar."""

    def __init__(self, pattern: str, ignores_case: bool) -> None:
        self._pattern = pattern
        self._ignores_case = ignores_case
        self._at = 0
        self._depth = 0

    def whole(self) -> Part:
        part = self._choice()
        if self._at < len(self._pattern):
            raise self._error("closes nothing")
        return part

    def _choice(self) -> Part:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while self._next not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return Series(tuple(parts))

    def _repeated(self, part: Part) -> Part:
        if self._next in ("*", "+"):
            raise self._error(_UNBOUNDED)
        if self._take("?"):
            part = Repeat(part, 0, 1)
        elif self._take("{"):
            part = Repeat(part, *self._bounds())
        else:
            return part
        if self._next in ("?", "*", "+", "{"):
            raise self._error("cannot repeat what is repeated already; use a group")
        return part

    def _bounds(self) -> tuple[int, int]:
        least = self._number()
        most = least
        if self._take(","):
            if self._next == "}":
                raise self._error(_UNBOUNDED)
            most = self._number()
        if not self._take("}"):
            raise self._error("should be } here")
        if not least <= most <= REPEAT_MAX:
            raise self._error(f"comes after bounds that are not 0 to {REPEAT_MAX}, in order")
        return least, most

    def _number(self) -> int:
        start = self._at
        while self._next.isascii() and self._next.isdigit():
            self._at += 1
        if not 1 <= self._at - start <= 4:
            raise self._error("should be a number here")
        return int(self._pattern[start : self._at])

    def _atom(self) -> Part:
        if self._take("("):
            return self._group()
        if self._take("["):
            return self._set()
        if self._take("."):
            return CharSet(ranges=(("\n", "\n"),), is_negated=True)
        if self._take("\\"):
            return self._escape()
        if self._next in _SPECIAL:
            raise self._error("has no meaning here; write a backslash before it")
        return _single(self._any(), self._ignores_case)

    def _group(self) -> Part:
        if self._take("?") and not self._take(":"):
            raise self._error("is no kind of group known here")
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(f"is inside more than {DEPTH_MAX} groups")
        part = self._choice()
        if not self._take(")"):
            raise self._error("should be ) here")
        self._depth -= 1
        return part

    def _set(self) -> CharSet:
        is_negated = self._take("^")
        ranges: list[tuple[str, str]] = []
        classes: list[str] = []
        while not self._take("]"):
            first = self._member()
            if isinstance(first, CharSet):
                classes += first.classes
            elif self._next == "-" and self._after_next != "]":
                self._at += 1
                ranges += self._range(first, self._member())
            else:
                ranges.append((first, first))
        if not ranges and not classes:
            raise self._error("follows an empty set")
        return CharSet(
            tuple(ranges), tuple(classes), is_negated=is_negated, ignores_case=self._ignores_case
        )

    def _member(self) -> str | CharSet:
        """One character of a set, or one of the classes that are not negated."""
        if not self._take("\\"):
            return self._cased(self._any())
        found = self._escape()
        if isinstance(found, Edge) or (isinstance(found, CharSet) and found.is_negated):
            raise self._error("comes after what cannot stand in a set")
        assert isinstance(found, CharSet)
        return found if found.classes else found.ranges[0][0]

    def _range(self, first: str, last: str | CharSet) -> list[tuple[str, str]]:
        if isinstance(last, CharSet) or last < first:
            raise self._error("comes after a range whose ends are not in order")
        return [(first, last)]

    def _escape(self) -> CharSet | Edge:
        name = self._any()
        if name == "b":
            return Edge()
        if name.lower() in ("d", "w", "s"):
            return CharSet(classes=(name.lower(),), is_negated=name.isupper())
        if name.isascii() and name.isalnum() and name not in _ESCAPES:
            raise self._error(rf"comes after \{name}, which is not known here")
        return _single(_ESCAPES.get(name, name), self._ignores_case)

    def _cased(self, character: str) -> str:
        return folded(character) if self._ignores_case else character

    @property
    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    @property
    def _after_next(self) -> str:
        return self._pattern[self._at + 1 : self._at + 2]

    def _take(self, character: str) -> bool:
        if self._next != character:
            return False
        self._at += 1
        return True

    def _any(self) -> str:
        if not self._next:
            raise self._error("comes too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _error(self, problem: str) -> ConfigError:
        what = repr(self._next) if self._next else "its end"
        return ConfigError(
            f"The pattern {self._pattern!r} cannot be used: {what} at position {self._at} "
            f"{problem}."
        )
