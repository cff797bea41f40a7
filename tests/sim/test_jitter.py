from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.sim.jitter import Jitter

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


def test_what_is_slow_together_stays_together() -> None:
    """A slow minute of the machine is one for both kinds of steps at the same time."""
    expected = [LONG if at % 5 == 0 else SHORT for at in range(1000)]
    factors = [2.0 if 300 <= at < 600 else 1.0 for at in range(1000)]
    player = Jitter.of(expected, taken(expected, factors)).player(Random(2))
    played = [round(player.next(LONG if at % 5 == 0 else SHORT)) for at in range(1000)]
    changes = sum(one != other for one, other in pairwise(played))
    assert sum(one == 2 for one in played) == pytest.approx(300, abs=10)
    assert changes <= 6


def test_a_step_longer_than_any_recorded_one_is_of_the_longest_kind() -> None:
    expected = [SHORT] * 3 + [LONG]
    player = Jitter.of(expected, taken(expected, [1, 1, 1, 2])).player(Random(1))
    assert player.next(10.0) == pytest.approx(2)


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
