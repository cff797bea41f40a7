"""The windows against an obvious reference: a list of everything that was ever taken."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.gateway.store.limit_windows import Window

WINDOW_S = 60


@dataclass
class Ledger:
    """Every amount with its second; what counts is found by looking at all of them."""

    entries: list[list[int]] = field(default_factory=list)

    def total(self, now: float) -> int:
        return sum(amount for second, amount in self.entries if now < second + 1 + WINDOW_S)

    def give_back(self, second: int, amount: int, now: float) -> None:
        for entry in self.entries:
            if entry[0] == second and now < second + 1 + WINDOW_S:
                returned = min(entry[1], amount)
                entry[1] -= returned
                amount -= returned


STEPS = st.lists(
    st.tuples(
        st.floats(0, 40, allow_nan=False),  # seconds later
        st.integers(0, 50),  # taken
        st.integers(0, 80),  # given back ...
        st.integers(0, 5),  # ... so many entries ago
    ),
    max_size=60,
)


@given(STEPS)
def test_a_window_holds_what_the_ledger_counts(
    steps: list[tuple[float, int, int, int]],
) -> None:
    window, ledger, seconds, now = Window(WINDOW_S), Ledger(), [0], 1000.0
    for wait_s, taken, returned, ago in steps:
        now += wait_s
        window.advance(now)
        assert window.total == ledger.total(now)
        second = int(now)
        seconds.append(second)
        window.add(second, taken)
        ledger.entries.append([second, taken])
        back_to = seconds[-1 - min(ago, len(seconds) - 1)]
        window.give_back(back_to, returned)
        ledger.give_back(back_to, returned, now)
        assert window.total == ledger.total(now)


@given(STEPS, st.integers(1, 60))
def test_room_comes_exactly_when_it_was_said(
    steps: list[tuple[float, int, int, int]], excess: int
) -> None:
    window, ledger, now = Window(WINDOW_S), Ledger(), 1000.0
    for wait_s, taken, _, _ in steps:
        now += wait_s
        window.advance(now)
        window.add(int(now), taken)
        ledger.entries.append([int(now), taken])
    if window.total < excess:
        return
    at = window.room_at(excess)
    wanted = window.total - excess
    assert ledger.total(at) <= wanted
    assert ledger.total(at - 0.001) > wanted or at - 0.001 < now


def test_no_minute_ever_holds_more_than_the_limit() -> None:
    chance, window, limit, now = random.Random(5), Window(WINDOW_S), 100, 0.0
    taken: list[tuple[float, int]] = []
    for _ in range(5000):
        now += chance.expovariate(2.0)
        window.advance(now)
        cost = chance.randint(1, 30)
        if window.total + cost <= limit:
            window.add(int(now), cost)
            taken.append((now, cost))
    for start, _ in taken:
        assert sum(cost for at, cost in taken if start <= at < start + WINDOW_S) <= limit


def test_memory_is_bounded_by_the_length_of_the_window() -> None:
    window = Window(WINDOW_S)
    for step in range(100_000):
        now = step / 100
        window.advance(now)
        window.add(int(now), 1)
    assert window.empty_at(0.0) == 999 + 1 + WINDOW_S
    window.advance(999 + WINDOW_S)
    assert window.total == 100  # only second 999 is left


def test_an_empty_window_is_empty_now() -> None:
    assert Window(WINDOW_S).empty_at(5.0) == 5.0


def test_asking_for_more_room_than_is_taken_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        Window(WINDOW_S).room_at(1)
