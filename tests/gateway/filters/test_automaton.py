import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.gateway.filters import automaton
from kvota.gateway.filters.automaton import Automaton, State
from kvota.gateway.filters.patterns import literal, parse

WORDS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6)


def of(*patterns: str) -> Automaton:
    return Automaton((pattern, parse(pattern)) for pattern in patterns)


def reachable(start: State) -> set[State]:
    """Every state that is kept alive by `start`."""
    seen, waiting = {start}, [start]
    while waiting:
        fresh = set(waiting.pop().steps.values()) - seen
        seen |= fresh
        waiting += fresh
    return seen


def longest_open(words: list[str], text: str) -> int:
    """The reference: the longest end of the text that begins a word and is no whole word."""
    return max(
        (length for word in words for length in range(len(word)) if text.endswith(word[:length])),
        default=0,
    )


@given(WORDS, st.text("abc", max_size=30))
def test_exactly_what_may_begin_a_literal_is_open(words: list[str], text: str) -> None:
    scan = Automaton((word, literal(word)) for word in words).scan()
    for end, character in enumerate(text, 1):
        found = scan.feed(character)
        assert (found is not None) == any(word in text[:end] for word in words)
        if found is not None:
            return
        assert scan.num_open == longest_open(words, text[:end])


@given(WORDS, st.text("abc", max_size=40), st.randoms(use_true_random=False))
def test_it_does_not_matter_how_a_text_is_cut(
    words: list[str], text: str, chance: random.Random
) -> None:
    known = Automaton((word, literal(word)) for word in words)
    whole, pieces = known.scan(), known.scan()
    whole.feed(text)
    rest = text
    while rest:
        cut = chance.randint(0, len(rest))
        pieces.feed(rest[:cut])
        rest = rest[cut:]
    assert (pieces.feed(""), pieces.num_open) == (whole.feed(""), whole.num_open)


def test_scans_of_one_automaton_do_not_disturb_each_other() -> None:
    known = of("abc")
    one, other = known.scan(), known.scan()
    one.feed("ab")
    other.feed("xc")
    assert other.feed("c") is None
    assert one.feed("c") == "abc"


def test_the_edge_of_a_word_is_open_until_something_or_nothing_follows() -> None:
    known = of(r"\bcat\b")
    waiting, refuted, ended = known.scan(), known.scan(), known.scan()
    for scan in (waiting, refuted, ended):
        assert scan.feed("a cat") is None
        assert scan.num_open == 3
    assert waiting.feed("!") == r"\bcat\b"
    assert refuted.feed("s") is None
    assert refuted.num_open == 0
    assert refuted.finish() is None
    assert ended.finish() == r"\bcat\b"


def test_of_patterns_of_several_lengths_never_too_little_is_open() -> None:
    scan = of("a{1,4}b").scan()
    for text, at_least in (("a", 1), ("a", 2), ("aaa", 4), ("a", 4)):
        assert scan.feed(text) is None
        assert at_least <= scan.num_open <= 4
    assert scan.feed("x") is None
    assert scan.num_open == 0


def test_a_find_stays_found() -> None:
    scan = of("ab").scan()
    assert scan.feed("xab") == "ab"
    assert scan.feed("zzz") == "ab"
    assert scan.finish() == "ab"


def test_the_name_of_the_rule_is_told_and_of_several_the_first_by_name() -> None:
    known = Automaton([("two", literal("bc")), ("one", literal("abc"))])
    assert known.scan().feed("xabc") == "one"
    assert known.scan().feed("xbc") == "two"


def test_what_is_kept_is_bounded_whatever_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automaton, "STATES_MAX", 20)
    monkeypatch.setattr(automaton, "_CHARACTERS_MAX", 30)
    known, chance = of("a{3}b{3}", "[ab]{6}c", r"\bfoo\b"), random.Random(3)
    fresh, scan = of("a{3}b{3}", "[ab]{6}c", r"\bfoo\b").scan(), known.scan()
    for _ in range(3000):
        text = chance.choice("ab") if chance.random() < 0.95 else chr(chance.randrange(200, 5000))
        assert scan.feed(text) == fresh.feed(text)
        assert scan.num_open == fresh.num_open
        if scan.feed("") is not None:
            scan, fresh = known.scan(), of("a{3}b{3}", "[ab]{6}c", r"\bfoo\b").scan()
    assert len(known._states) <= 20
    assert len(known._classes) <= 30
    assert len(reachable(known._start)) <= 21


def test_a_text_made_against_backtracking_takes_one_look_up_per_character() -> None:
    """(a?){30}a{30} takes a backtracking matcher 2^30 steps on 29 letters a."""
    known = of("(a?){30}a{30}")
    scan = known.scan()
    assert scan.feed("a" * 29) is None
    assert scan.feed("a") is not None
    assert len(known._states) <= 31


def test_lists_that_would_need_too_much_are_refused() -> None:
    with pytest.raises(ConfigError, match="places"):
        of("((a{200}){200}){200}")
