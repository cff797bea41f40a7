"""Searches a text for many patterns at once, one look-up per character, however it is cut up.

    patterns ──▶ a graph without cycles ──▶ the places in it that a text can have reached, as one
                 (Thompson's construction)  state, made when first reached (a lazy automaton)

A step from a state by a class of characters (all characters that no pattern tells apart) is kept
once computed. So the time is linear in the text whatever the text is, and what is kept is bounded:
states beyond `STATES_MAX` start the collection anew. Thompson, "Regular Expression Search
Algorithm", CACM 11(6), 1968.

Every place knows the most characters that lead to it. The largest of them in a state is how many
of the last characters may be the beginning of a match: what a stream must hold back. For patterns
whose parts have one length, that is exact; for others it may be a few characters more.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from kvota.core.errors import ConfigError
from kvota.gateway.filters.patterns import CharSet, Choice, Edge, Part, Repeat, Series, is_word

PLACES_MAX: Final = 200_000
STATES_MAX: Final = 5_000
_CHARACTERS_MAX: Final = 50_000  # whose class is remembered


class _Place:
    """A place in the graph. Exactly one kind: reads a character, is an edge, forks, or accepts."""

    __slots__ = ("depth", "edge_to", "forks_to", "reads", "rule", "then")

    def __init__(self) -> None:
        self.reads: int | None = None  # index of a set of characters, followed by `then`
        self.then: _Place | None = None
        self.edge_to: _Place | None = None
        self.forks_to: tuple[_Place, ...] = ()
        self.rule: str | None = None
        self.depth = 0  # most characters read on a way to here


class _Class:
    """Characters that no pattern tells apart."""

    __slots__ = ("is_word", "number", "sets")

    def __init__(self, number: int, sets: frozenset[int], word: bool) -> None:
        self.number = number
        self.sets = sets  # indices of the sets that have them
        self.is_word = word


class State:
    """What the text so far has reached. `rule` is set once something is found."""

    __slots__ = ("after_word", "num_open", "places", "rule", "steps")

    def __init__(self, places: frozenset[_Place], after_word: bool, rule: str | None) -> None:
        self.places = places
        self.after_word = after_word
        self.rule = rule
        self.num_open = max((place.depth for place in places), default=0)
        self.steps: dict[int, State] = {}


class Automaton:
    """Built once from (rule, part) pairs and shared by all scans. Not for two threads at once."""

    def __init__(self, rules: Iterable[tuple[str, Part]]) -> None:
        builder = _Builder()
        self._starts = [builder.build(rule, part) for rule, part in rules]
        self._sets: Sequence[CharSet] = tuple(builder.sets)
        self._classes: dict[str, _Class] = {}
        self._class_numbers: dict[tuple[frozenset[int], bool], _Class] = {}
        self._states: dict[tuple[frozenset[_Place], bool, str | None], State] = {}
        self._reached_first: dict[tuple[int, bool], tuple[frozenset[_Place], str | None]] = {}
        self._start = State(frozenset(), False, None)

    def scan(self) -> "Scan":
        return Scan(self, self._start)

    def read(self, state: State, text: str) -> State:
        """The state after `text`, or the first one on the way in which a rule is found."""
        classes = self._classes
        for character in text:
            kind = classes.get(character) or self._class_of(character)
            state = state.steps.get(kind.number) or self._step(state, kind)
            if state.rule is not None:
                return state
        return state

    def rule_at_end(self, state: State) -> str | None:
        """What is found when nothing follows: the edge of a last word."""
        return state.rule or _close(state.places, state.after_word, False)[1]

    def _step(self, state: State, kind: _Class) -> State:
        """Compute a step and keep it."""
        first, rule = self._first_step(kind, state.after_word)
        reading, found = _close(state.places, state.after_word, kind.is_word)
        reached = _read(reading, kind) | first
        rule = found or rule or _close(reached, None, None)[1]
        after = self._state(reached, kind.is_word, rule)
        state.steps[kind.number] = after
        return after

    def _first_step(self, kind: _Class, after_word: bool) -> tuple[frozenset[_Place], str | None]:
        """Where a match that begins with this character gets; the same in every state."""
        key = (kind.number, after_word)
        known = self._reached_first.get(key)
        if known is None:
            reading, found = _close(self._starts, after_word, kind.is_word)
            known = self._reached_first[key] = (_read(reading, kind), found)
        return known

    def _state(self, places: frozenset[_Place], after_word: bool, rule: str | None) -> State:
        key = (places, after_word, rule)
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= STATES_MAX:
                self._states.clear()
                self._start.steps.clear()
            state = self._states[key] = State(places, after_word, rule)
        return state

    def _class_of(self, character: str) -> _Class:
        sets = frozenset(n for n, known in enumerate(self._sets) if known.has(character))
        key = (sets, is_word(character))
        kind = self._class_numbers.get(key)
        if kind is None:
            kind = _Class(len(self._class_numbers), *key)
            self._class_numbers[key] = kind
        if len(self._classes) >= _CHARACTERS_MAX:
            self._classes.clear()
        self._classes[character] = kind
        return kind


class Scan:
    """One text, read piece by piece."""

    __slots__ = ("_automaton", "_state")

    def __init__(self, automaton: Automaton, start: State) -> None:
        self._automaton = automaton
        self._state = start

    @property
    def num_open(self) -> int:
        """How many of the last characters may belong to a match that is not complete."""
        return self._state.num_open

    def feed(self, text: str) -> str | None:
        """The rule that is found with this piece, or None. Once found, it stays."""
        if self._state.rule is None:
            self._state = self._automaton.read(self._state, text)
        return self._state.rule

    def finish(self) -> str | None:
        """The rule that is found because nothing follows, or None."""
        return self._automaton.rule_at_end(self._state)


class _Builder:
    """Turns parts into places, from the end to the beginning: what follows is always there."""

    def __init__(self) -> None:
        self.sets: dict[CharSet, int] = {}
        self._num_places = 0

    def build(self, rule: str, part: Part) -> _Place:
        accepting = self._place()
        accepting.rule = rule
        start = self._before(part, accepting)
        _set_depths(start)
        return start

    def _place(self) -> _Place:
        self._num_places += 1
        if self._num_places > PLACES_MAX:
            raise ConfigError(
                f"The block lists together need more than {PLACES_MAX} places. "
                "Use fewer or shorter literals, or smaller repeats."
            )
        return _Place()

    def _before(self, part: Part, follows: _Place) -> _Place:
        """A place from which `part` leads to `follows`."""
        match part:
            case CharSet():
                place = self._place()
                place.reads = self.sets.setdefault(part, len(self.sets))
                place.then = follows
                return place
            case Edge():
                place = self._place()
                place.edge_to = follows
                return place
            case Series(parts):
                for inner in reversed(parts):
                    follows = self._before(inner, follows)
                return follows
            case Choice(parts):
                return self._fork([self._before(inner, follows) for inner in parts])
            case Repeat(inner, least, most):
                end = follows
                for number in range(most, 0, -1):
                    again = self._before(inner, follows)
                    follows = again if number <= least else self._fork([again, end])
                return follows

    def _fork(self, ways: Sequence[_Place]) -> _Place:
        place = self._place()
        place.forks_to = tuple(ways)
        return place


def _set_depths(start: _Place) -> None:
    """Longest ways from `start`, in an order in which every place comes after those before it."""
    for place in _in_order(start):
        if place.then is not None:
            place.then.depth = max(place.then.depth, place.depth + 1)
        for target in _ways(place):
            target.depth = max(target.depth, place.depth)


def _in_order(start: _Place) -> list[_Place]:
    """A topological order. Without recursion, for a literal may be long."""
    finished: list[_Place] = []
    seen = {start}
    stack = [(start, iter(_followers(start)))]
    while stack:
        place, followers = stack[-1]
        follower = next((found for found in followers if found not in seen), None)
        if follower is None:
            finished.append(place)
            stack.pop()
        else:
            seen.add(follower)
            stack.append((follower, iter(_followers(follower))))
    return finished[::-1]


def _followers(place: _Place) -> list[_Place]:
    return [*([place.then] if place.then is not None else []), *_ways(place)]


def _ways(place: _Place) -> tuple[_Place, ...]:
    """Where one gets from here without reading."""
    return place.forks_to if place.edge_to is None else (place.edge_to,)


def _close(
    places: Iterable[_Place], after_word: bool | None, before_word: bool | None
) -> tuple[list[_Place], str | None]:
    """The reading places that are reached without reading, and the rule that is, if any.

    Edges are passed where a word begins or ends; with None, because it is not known yet, never.
    """
    passes_edges = after_word is not None and after_word != before_word
    reading: list[_Place] = []
    rule: str | None = None
    seen = set(places)
    stack = list(seen)
    while stack:
        place = stack.pop()
        if place.reads is not None:
            reading.append(place)
        elif place.rule is not None:
            rule = place.rule if rule is None else min(rule, place.rule)
        elif place.edge_to is None or passes_edges:
            fresh = [target for target in _ways(place) if target not in seen]
            seen.update(fresh)
            stack += fresh
    return reading, rule


def _read(reading: Iterable[_Place], kind: _Class) -> frozenset[_Place]:
    return frozenset(
        place.then for place in reading if place.reads in kind.sets and place.then is not None
    )
