"""How the rules for tasks read a text: its words, the order of words, and its shape.

Everything here is linear in the text, of which only the beginning and the end are read. English is
matched in whole words; Chinese, which has no spaces, in parts of a run of characters:

    "帮我写SQL语句, please!"  ─▶  " 帮我写 sql 语句 please "     signs: "sql" ─▶ " sql ", "语句"
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Final

GAP_MARK: Final = "…"
GAP_MAX: Final = 60  # characters between two pieces of an order
_STARTS_MAX: Final = 32  # places from which an order is tried
_LONG_TEXT: Final = 1_500  # characters; from here on a text carries material to work on
_NUM_CODE_LINES: Final = 3
_NUM_NUMBERS: Final = 2
# Neither can match in two ways at one place, so both are linear.
_WORDS: Final = re.compile(r"[a-z0-9_+#]+|[^\x00-\x7f]+")
_CAPITALS: Final = re.compile(r"[A-Z]+")
_NUMBERS: Final = re.compile(r"[0-9]+")
_OPERATIONS: Final = re.compile(r"[0-9a-z)] ?[=^*+×÷²] ?[0-9a-z(√]| [0-9]+ [-/] [0-9]+ ")


class Shape(StrEnum):
    """What a text looks like, apart from its words."""

    CODE_FENCE = "code_fence"
    CODE_LINES = "code_lines"  # three lines or more that look like program text
    CODE_PIECES = "code_pieces"  # what only program text has, also within a sentence
    TRACEBACK = "traceback"
    SQL_STATEMENT = "sql_statement"
    SQL_KEYWORDS = "sql_keywords"  # two or more, in capitals
    LONG_TEXT = "long_text"
    FORMULA = "formula"  # an operator between numbers or single letters, or LaTeX
    PERCENT = "percent"  # "15% of"
    SOME_NUMBERS = "some_numbers"  # two or more


def _parts(words: Iterable[str]) -> frozenset[str]:
    """English words, and single Chinese characters: what a text must have to hold another."""
    return frozenset(part for word in set(words) for part in ([word] if word.isascii() else word))


@dataclass(frozen=True, slots=True)
class Sign:
    """A word or phrase to look for. `text` is empty when there is no word in it."""

    text: str
    parts: frozenset[str]

    @classmethod
    def of(cls, written: str) -> "Sign":
        words = _WORDS.findall(written.lower())
        text = " ".join(words)
        start = " " if text[:1].isascii() else ""
        end = " " if text[-1:].isascii() else ""
        return cls(f"{start}{text}{end}" if text else "", _parts(words))

    @property
    def rarest(self) -> str:
        """The part that the fewest texts have, as far as length tells. ValueError if empty."""
        return max(sorted(self.parts), key=len)


def pieces_of(order: str) -> list[str]:
    """The words or phrases of an order, as written."""
    return [piece.strip() for piece in order.split(GAP_MARK)]


@dataclass(frozen=True, slots=True)
class Order:
    """Signs that follow one another, each within `GAP_MAX` characters of the one before."""

    pieces: tuple[Sign, ...]

    @classmethod
    def of(cls, written: str) -> "Order":
        return cls(tuple(Sign.of(piece) for piece in pieces_of(written)))

    @property
    def rarest(self) -> str:
        return max((piece.rarest for piece in self.pieces), key=len)


@dataclass(frozen=True, slots=True)
class SeenText:
    """A text as the rules see it."""

    words: str  # lower case, one space between words and at both ends
    parts: frozenset[str]
    shapes: frozenset[Shape]

    @classmethod
    def of(cls, text: str, read_max: int) -> "SeenText":
        """Reads `read_max` characters from the beginning and as many from the end."""
        read = text if len(text) <= 2 * read_max else f"{text[:read_max]}\n{text[-read_max:]}"
        words = _WORDS.findall(read.lower())
        shapes = {shape for shape, has in _SHAPES.items() if has(read)}
        if len(text) >= _LONG_TEXT:
            shapes.add(Shape.LONG_TEXT)
        return cls(f" {' '.join(words)} ", _parts(words), frozenset(shapes))

    def has(self, sign: Sign | Order) -> bool:
        return self._has_order(sign.pieces) if isinstance(sign, Order) else self._has_sign(sign)

    def _has_sign(self, sign: Sign) -> bool:
        return sign.parts <= self.parts and sign.text in self.words

    def _has_order(self, pieces: Sequence[Sign]) -> bool:
        """Tried from the first `_STARTS_MAX` places of the first piece."""
        if not all(piece.parts <= self.parts for piece in pieces):
            return False
        start = -1
        for _ in range(_STARTS_MAX):
            start = self.words.find(pieces[0].text, start + 1)
            if start < 0:
                return False
            if self._follows(pieces, start):
                return True
        return False

    def _follows(self, pieces: Sequence[Sign], start: int) -> bool:
        at = start
        for before, piece in pairwise(piece.text for piece in pieces):
            end = at + len(before) - before.endswith(" ")  # one space may belong to both
            at = self.words.find(piece, end, end + GAP_MAX + len(piece))
            if at < 0:
                return False
        return True


_CODE_ENDS: Final = ("{", "}", "};", ";", "):", ") {", "=>", "]:", "->", ");")
_CODE_STARTS: Final = (
    "def ", "class ", "import ", "return ", "func ", "fn ", "public ", "private ", "const ",
    "let ", "var ", "#include", "if (", "for (", "while (", "else:", "elif ", "try:", "except ",
    "@", "package ", "using ", "async ", "await ", "print(", "//", "/*", "$ ", "sudo ", "<div",
    "</",
)  # fmt: skip
_TRACES: Final = (
    "Traceback (most recent call last)", "\n    at ", "\n\tat ", "panicked at", "Exception in ",
    "Segmentation fault", "undefined reference", "error[E", "SyntaxError", "TypeError",
    "NullPointerException", "ValueError", "IndexError", "KeyError", "is not defined",
    "ModuleNotFoundError", "AttributeError", "ImportError", "core dumped", "exit code 1",
)  # fmt: skip
_CODE_PIECES: Final = (
    "=> ", "()", "();", " != ", " == ", " && ", " || ", "::", " += ", "def ", "console.log",
    "System.out", "</", "/>", "#include", ".py", ".js", "import {", "self.", "__init__", "[0]",
    "${", "npm ", "pip install", "sudo ", "git ", "docker ", "kubectl ", "null", "lambda x",
)  # fmt: skip
_OPERATORS: Final = "=^*+×÷²-/"
_LATEX: Final = ("\\frac", "\\int", "\\sum", "\\sqrt", "\\lim", "$$", "\\begin{")
_SQL_STARTS: Final = (
    "INSERT INTO ", "DELETE FROM ", "CREATE TABLE ", "ALTER TABLE ", "DROP TABLE ",
    "CREATE INDEX ", "CREATE VIEW ", "GRANT ", "EXPLAIN SELECT",
)  # fmt: skip
# English sentences also begin with "select … from"; statements have one of these too.
_SQL_PARTS: Final = (
    "select *", " where ", " group by ", " order by ", " join ", " limit ", "count(", "sum(", ";",
)  # fmt: skip


_SQL_KEYWORDS: Final = frozenset(
    {
        "SELECT", "FROM", "WHERE", "HAVING", "JOIN", "UNION", "DISTINCT", "GROUP", "ORDER",
        "LIMIT", "INSERT", "UPDATE", "DELETE", "NULL", "INDEX", "VARCHAR", "PARTITION", "OVER",
        "EXISTS", "VIEW", "TRUNCATE",
    }
)  # fmt: skip


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines())


def _has_fence(text: str) -> bool:
    return any(line.startswith(("```", "~~~")) for line in _lines(text))


def _has_code_lines(text: str) -> bool:
    looks = (line.endswith(_CODE_ENDS) or line.startswith(_CODE_STARTS) for line in _lines(text))
    return sum(looks) >= _NUM_CODE_LINES


def _has_code_pieces(text: str) -> bool:
    return any(piece in text for piece in _CODE_PIECES)


def _has_trace(text: str) -> bool:
    return any(sign in text for sign in _TRACES)


def _has_sql(text: str) -> bool:
    if any(line.upper().startswith(_SQL_STARTS) for line in _lines(text)):
        return True
    flat = " ".join(text.split())
    if "SELECT " in flat and " FROM " in flat:
        return True
    lower = flat.lower()
    start = lower.find("select ")
    return (
        start >= 0
        and lower.find(" from ", start) >= 0
        and any(part in lower[start:] for part in _SQL_PARTS)
    )


def _has_sql_keywords(text: str) -> bool:
    return len(_SQL_KEYWORDS.intersection(_CAPITALS.findall(text))) >= 2


def _has_formula(text: str) -> bool:
    if any(sign in text for sign in _LATEX):
        return True
    return any(sign in text for sign in _OPERATORS) and bool(_OPERATIONS.search(text.lower()))


def _has_percent(text: str) -> bool:
    return "% of " in text or "%的" in text


def _has_some_numbers(text: str) -> bool:
    return sum(1 for _ in _NUMBERS.finditer(text)) >= _NUM_NUMBERS


_SHAPES: Final[Mapping[Shape, Callable[[str], bool]]] = MappingProxyType(
    {
        Shape.CODE_FENCE: _has_fence,
        Shape.CODE_LINES: _has_code_lines,
        Shape.CODE_PIECES: _has_code_pieces,
        Shape.TRACEBACK: _has_trace,
        Shape.SQL_STATEMENT: _has_sql,
        Shape.SQL_KEYWORDS: _has_sql_keywords,
        Shape.FORMULA: _has_formula,
        Shape.PERCENT: _has_percent,
        Shape.SOME_NUMBERS: _has_some_numbers,
    }
)
