"""The patterns against Python's own regular expressions, which mean the same where both exist."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.gateway.filters.automaton import Automaton
from kvota.gateway.filters.patterns import can_be_empty, folded, literal, parse

ATOMS = ["a", "b", "é", "中", "_", r"\d", r"\w", r"\s", r"\W", r"\D", r"\S", ".", r"\b", r"\."]
SETS = ["[ab]", "[^a]", "[a-c1]", r"[\d_]", r"[^\s-]", r"[\]x]"]
TEXTS = st.text(st.sampled_from("abc1_ .\n-é中A"), max_size=24)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    def atom(depth: int) -> str:
        kinds = ["atom", "set", "group"] if depth else ["atom", "set"]
        kind = draw(st.sampled_from(kinds))
        if kind == "atom":
            return draw(st.sampled_from(ATOMS))
        if kind == "set":
            return draw(st.sampled_from(SETS))
        opening = draw(st.sampled_from(["(", "(?:"]))
        return f"{opening}{'|'.join(row(depth - 1) for _ in range(draw(st.integers(1, 3))))})"

    def row(depth: int) -> str:
        parts = []
        for _ in range(draw(st.integers(0 if depth < 2 else 1, 3))):
            part = atom(depth)
            repeats = ["", "", "?", "{2}", "{0,2}", "{1,3}"] if part != r"\b" else [""]
            parts.append(part + draw(st.sampled_from(repeats)))
        return "".join(parts)

    return row(2)


def finds(pattern: str, text: str, *, ignores_case: bool = False) -> bool:
    scan = Automaton([("r", parse(pattern, ignores_case=ignores_case))]).scan()
    return (scan.feed(text) or scan.finish()) is not None


@given(patterns(), TEXTS)
def test_a_pattern_is_found_where_python_finds_it(pattern: str, text: str) -> None:
    if can_be_empty(parse(pattern, ignores_case=False)):
        return
    assert finds(pattern, text) == (re.search(pattern, text) is not None)


@given(patterns(), TEXTS)
def test_case_can_be_ignored(pattern: str, text: str) -> None:
    if can_be_empty(parse(pattern)):
        return
    found = re.search(pattern, text, re.IGNORECASE) is not None
    assert finds(pattern, text, ignores_case=True) == found


@given(st.text(st.sampled_from("ab c.*"), min_size=1, max_size=6), TEXTS)
def test_a_literal_is_found_as_it_stands(word: str, text: str) -> None:
    scan = Automaton([("r", literal(word, ignores_case=False))]).scan()
    assert (scan.feed(text) is not None) == (word in text)


@pytest.mark.parametrize(
    ("word", "text", "is_found"),
    [
        ("cat", "a cat.", True),
        ("cat", "cat", True),
        ("cat", "concatenate", False),
        ("cat", "cats", False),
        ("C++", "I write C++", True),
        ("C++", "I write C++.", True),
        ("C++", "ABC++", False),
        ("two words", "these TWO WORDS here", True),
    ],
)
def test_whole_words(word: str, text: str, is_found: bool) -> None:
    scan = Automaton([("r", literal(word, whole_words=True))]).scan()
    assert ((scan.feed(text) or scan.finish()) is not None) == is_found


def test_case_and_width_are_folded_character_by_character() -> None:
    assert [folded(c) for c in "AaＡａ"] == ["a"] * 4
    assert folded("ß") == "ß"  # two characters when folded: left alone
    scan = Automaton([("r", literal("Secret"))]).scan()
    assert scan.feed("ｓＥCRＥt") == "r"


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a*", "give a bound"),
        ("a+b", "give a bound"),
        ("a{2,}", "give a bound"),
        ("a{3,2}", "in order"),
        ("a{0,257}", "0 to 256"),
        ("a{x}", "number"),
        ("a{2", "should be }"),
        ("a??", "use a group"),
        ("(a", r"should be \)"),
        ("a)", "closes nothing"),
        ("[a", "comes too early"),
        ("[", "comes too early"),
        ("[]", "empty set"),
        ("[b-a]", "in order"),
        (r"[\D]", "cannot stand in a set"),
        (r"[\b]", "cannot stand in a set"),
        (r"\1", "not known here"),
        (r"\Z", "not known here"),
        ("\\", "comes too early"),
        ("(?=a)", "no kind of group"),
        ("^a", "no meaning"),
        ("a$", "no meaning"),
        ("{2}", "no meaning"),
        ("(" * 40 + "a" + ")" * 40, "more than 32 groups"),
    ],
)
def test_what_is_not_in_the_language_is_refused_with_the_place(pattern: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        parse(pattern)
    assert "position" in refused.value.message


@given(st.text(st.sampled_from(string.printable), max_size=20))
def test_any_text_is_a_pattern_or_refused(pattern: str) -> None:
    try:
        part = parse(pattern)
    except ConfigError:
        return
    assert isinstance(can_be_empty(part), bool)
