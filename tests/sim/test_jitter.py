from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.sim.jitter import STEPS_MIN, WIDEST, Jitter

SHORT, LONG = 0.01, 0.1


def taken(expected: list[float], factors: list[float]) -> list[float]:
    return [one * factor for one, factor in zip(expected, factors, strict=True)]


def test_steps_that_are_alike_are_played_back_in_their_order() -> None:
    factors = [0.8, 1.0, 1.7, 0.9]
    jitter = Jitter.of([SHORT] * 4, taken([SHORT] * 4, factors))
    for seed in range(8):
        player = jitter.player(Random(seed))
        played = [player.next(SHORT) for _ in range(8)]
        first = factors.index(round(played[0], 9))
        assert played == pytest.approx((factors * 3)[first : first + 8])


def test_a_long_step_never_meets_what_happened_to_a_short_one() -> None:
    """Short steps stall now and then and take three times as long; long ones do not."""
    rng = Random(5)
    expected = [rng.choice((SHORT, SHORT, SHORT, LONG)) for _ in range(400)]
    factors = [1.02 if one == LONG else rng.choice((0.9, 3.0)) for one in expected]
    player = Jitter.of(expected, taken(expected, factors)).player(rng)
    asked = [rng.choice((SHORT, LONG)) for _ in range(1000)]
    played = [(one, round(player.next(one), 9)) for one in asked]
    assert {factor for one, factor in played if one == LONG} == {1.02}
    assert {factor for one, factor in played if one == SHORT} == {0.9, 3.0}


def test_the_few_that_read_prompts_never_meet_the_stalls_of_the_many_that_do_not() -> None:
    """One step in ten is long; one in thirty, of any length, stalls for ten times a short one."""
    rng = Random(8)
    expected = [0.2 if at % 10 == 0 else rng.uniform(0.015, 0.025) for at in range(3000)]
    stalls = [0.2 if rng.random() < 1 / 30 else 0.0 for _ in expected]
    recorded = [one + stall for one, stall in zip(expected, stalls, strict=True)]
    player = Jitter.of(expected, recorded).player(rng)
    played = [player.next(one) for one in expected]
    longs = [factor for one, factor in zip(expected, played, strict=True) if one == 0.2]
    assert max(played) > 8
    assert {round(factor, 9) for factor in longs} == {1.0, 2.0}


def test_long_steps_in_a_row_are_not_slow_as_one() -> None:
    """None of its neighbours is as slow as the only slow one of them."""
    expected = [LONG if at % 10 == 0 else SHORT for at in range(1000)]
    factors = [3.0 if at % 100 == 0 else 1.0 for at in range(1000)]
    jitter = Jitter.of(expected, taken(expected, factors))
    for seed in range(200):
        player = jitter.player(Random(seed))
        played = [player.next(LONG), player.next(LONG)]
        assert sum(factor > 2 for factor in played) <= 1


def test_what_is_slow_together_stays_together() -> None:
    """A slow minute of the machine is one for both kinds of steps at the same time."""
    expected = [LONG if at % 5 == 0 else SHORT for at in range(1000)]
    factors = [2.0 if 300 <= at < 600 else 1.0 for at in range(1000)]
    player = Jitter.of(expected, taken(expected, factors)).player(Random(2))
    played = [round(player.next(LONG if at % 5 == 0 else SHORT)) for at in range(1000)]
    changes = sum(one != other for one, other in pairwise(played))
    assert sum(one == 2 for one in played) == pytest.approx(300, abs=10)
    assert changes <= 12  # a few at each border; by chance there would be 400


def test_a_step_longer_than_any_recorded_one_is_of_the_longest_kind() -> None:
    expected = [SHORT] * STEPS_MIN + [LONG] * STEPS_MIN
    factors = [1.0] * STEPS_MIN + [2.0] * STEPS_MIN
    player = Jitter.of(expected, taken(expected, factors)).player(Random(1))
    assert player.next(10.0) == pytest.approx(2)


def test_too_few_to_be_a_kind_belong_to_the_one_before() -> None:
    expected = [SHORT] * STEPS_MIN + [LONG] * (STEPS_MIN - 1)
    assert Jitter.of(expected, expected).longest == []


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=400))
def test_a_kind_is_an_octave_wherever_it_has_enough_steps(expected: list[float]) -> None:
    jitter = Jitter.of(expected, expected)
    kinds = np.searchsorted(jitter.longest, expected)
    members = [np.array(expected)[kinds == kind] for kind in range(len(jitter.longest) + 1)]
    for each in members[:-1]:
        assert len(each) >= STEPS_MIN
        if each.max() > WIDEST * each.min():
            assert (each < each.max()).sum() < STEPS_MIN


@given(
    st.lists(st.sampled_from((SHORT, LONG)), min_size=1, max_size=200),
    st.lists(st.sampled_from((SHORT, LONG)), max_size=200),
    st.integers(),
)
def test_no_recorded_step_is_taken_twice_running(
    expected: list[float], asked: list[float], seed: int
) -> None:
    jitter = Jitter.of(expected, taken(expected, [float(1 + at) for at in range(len(expected))]))
    player = jitter.player(Random(seed))
    played = [(sum(one > each for each in jitter.longest), player.next(one)) for one in asked]
    for kind, places in enumerate(jitter.following):
        own = [factor for each, factor in played if each == kind]
        if len(set(places)) > 1:
            assert all(one != other for one, other in pairwise(own))


@given(
    st.lists(st.tuples(st.floats(1e-4, 10), st.floats(1e-4, 10)), min_size=1, max_size=40),
    st.lists(st.floats(1e-5, 100), max_size=60),
    st.integers(),
)
def test_every_factor_played_was_recorded(
    recorded: list[tuple[float, float]], asked: list[float], seed: int
) -> None:
    jitter = Jitter.of([one for one, _ in recorded], [one for _, one in recorded])
    player = jitter.player(Random(seed))
    assert {player.next(one) for one in asked} <= set(jitter.factors)
