"""The verdict on series that leak and on series that do not, and how often it is wrong."""

from collections import Counter
from collections.abc import Callable
from math import exp, isnan
from random import Random
from statistics import linear_regression

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.tools.load.leak import Verdict, fit, student_quantile, trend

Series = list[tuple[float, float]]
EVERY_S, NUM = 5.0, 360  # half an hour, a look every five seconds
WORTH = 10.0
NUM_SEEDS = 200


def series(value: Callable[[float, Random], float], seed: int) -> Series:
    chance = Random(seed)
    return [(at * EVERY_S, value(at * EVERY_S, chance)) for at in range(NUM)]


def noise(at: float, chance: Random) -> float:
    return 1000 + chance.gauss(0, 5)


def sawtooth(at: float, chance: Random) -> float:
    """Garbage that a collector takes away every three minutes."""
    return 1000 + at % 180 / 10 + chance.gauss(0, 1)


def warming(at: float, chance: Random) -> float:
    """Caches that fill, and are full."""
    return 1000 + 100 * (1 - exp(-at / 200)) + chance.gauss(0, 1)


def slow_warming(at: float, chance: Random) -> float:
    return 1000 + 100 * (1 - exp(-at / 500)) + chance.gauss(0, 1)


def one_step(at_s: float) -> Callable[[float, Random], float]:
    return lambda at, chance: 1000 + (50 if at >= at_s else 0) + chance.gauss(0, 1)


def staircase(at: float, chance: Random) -> float:
    """Ten more every five minutes, and never less."""
    return 1000 + 10 * (at // 300) + chance.gauss(0, 1)


def warming_and_leaking(at: float, chance: Random) -> float:
    return warming(at, chance) + 40 * at / 1800


def creeping(at: float, chance: Random) -> float:
    """A little more than what is worth mentioning: 10.6 in the judged time."""
    return 1000 + at * 16 / 1800 + chance.gauss(0, 5)


def leaking(at: float, chance: Random) -> float:
    """40 in half an hour."""
    return 1000 + at * 40 / 1800 + chance.gauss(0, 5)


def correlated(seed: int) -> Series:
    """What one value is, the next nearly is too: half a minute's memory."""
    chance, state, points = Random(seed), 0.0, []
    for at in range(NUM):
        state = 0.85 * state + chance.gauss(0, 1.5)
        points.append((at * EVERY_S, 1000 + state))
    return points


def verdicts(make: Callable[[int], Series]) -> Counter[Verdict]:
    return Counter(trend(make(seed), WORTH).verdict for seed in range(NUM_SEEDS))


@pytest.mark.parametrize(
    "value", [noise, sawtooth, warming, slow_warming, *map(one_step, (700, 1000, 1300, 1500))]
)
def test_what_does_not_leak_is_hardly_ever_called_a_leak(
    value: Callable[[float, Random], float],
) -> None:
    seen = verdicts(lambda seed: series(value, seed))
    assert seen[Verdict.LEAK] <= 0.01 * NUM_SEEDS, seen


def test_noise_that_is_like_itself_is_hardly_ever_called_a_leak() -> None:
    assert verdicts(correlated)[Verdict.LEAK] <= 0.02 * NUM_SEEDS


@pytest.mark.parametrize("value", [noise, warming])
def test_what_stands_still_is_called_steady(value: Callable[[float, Random], float]) -> None:
    assert verdicts(lambda seed: series(value, seed))[Verdict.STEADY] >= 0.95 * NUM_SEEDS


def filling(at: float, chance: Random) -> float:
    """Caches that still fill after the warm-up, and are full well before the end."""
    return 1000 + 100 * (1 - exp(-at / 330)) + chance.gauss(0, 1)


@pytest.mark.parametrize("value", [filling, one_step(700), one_step(1000)])
def test_what_grew_and_then_stands_still_has_settled(
    value: Callable[[float, Random], float],
) -> None:
    seen = verdicts(lambda seed: series(value, seed))
    assert seen[Verdict.SETTLED] >= 0.95 * NUM_SEEDS, seen


@pytest.mark.parametrize("value", [slow_warming, one_step(1300), one_step(1500)])
def test_what_has_only_just_grown_has_not_settled(
    value: Callable[[float, Random], float],
) -> None:
    seen = verdicts(lambda seed: series(value, seed))
    assert seen[Verdict.UNDECIDED] >= 0.95 * NUM_SEEDS, seen


@pytest.mark.parametrize("value", [leaking, staircase, warming_and_leaking])
def test_a_leak_is_found(value: Callable[[float, Random], float]) -> None:
    seen = verdicts(lambda seed: series(value, seed))
    assert seen[Verdict.LEAK] >= 0.95 * NUM_SEEDS, seen


def test_a_leak_above_the_resolution_is_hardly_ever_called_harmless() -> None:
    seen = verdicts(lambda seed: series(creeping, seed))
    assert seen[Verdict.STEADY] + seen[Verdict.SETTLED] <= 0.02 * NUM_SEEDS, seen


@pytest.mark.parametrize("total", [0.0, 4.0, 8.0])
def test_what_a_leak_may_still_be_is_hardly_ever_less_than_it_is(total: float) -> None:
    """The bound that STEADY and SETTLED name, for leaks below the resolution."""
    num_right = 0
    for seed in range(NUM_SEEDS):
        points = series(lambda at, chance: noise(at, chance) + total * at / 1800, seed)
        found = trend(points, WORTH)
        assert found.verdict is not Verdict.LEAK
        num_right += found.leak_max_per_s >= total / 1800
    assert num_right >= 0.98 * NUM_SEEDS


def test_the_bound_of_what_settled_is_of_its_later_half() -> None:
    found = trend(series(one_step(1000), 1), WORTH)
    assert found.verdict is Verdict.SETTLED
    assert found.leak_max_per_s == found.later.most_per_s < found.resolution_per_s
    assert found.resolution_per_s == WORTH / found.span_s


def test_the_slope_and_its_interval_are_those_of_the_leak() -> None:
    num_inside = 0
    for seed in range(NUM_SEEDS):
        slope = trend(series(leaking, seed), WORTH).slope
        num_inside += abs(slope.per_s - 40 / 1800) <= slope.margin
    assert num_inside >= 0.97 * NUM_SEEDS, "99 % by construction"


def test_growth_that_is_nobodys_worry_is_no_leak() -> None:
    assert trend([(at, 1000 + 0.001 * at) for at in range(1000)], WORTH).verdict is Verdict.STEADY


def test_a_short_series_is_undecided() -> None:
    few = trend([(0, 1.0), (5, 2.0), (10, 3.0)], 0.1)
    assert few.verdict is Verdict.UNDECIDED
    assert isnan(few.slope.per_s)
    assert trend([], 0.1).verdict is Verdict.UNDECIDED


@pytest.mark.parametrize(
    ("degrees", "published"), [(6, 3.707), (10, 3.169), (14, 2.977), (30, 2.750), (120, 2.617)]
)
def test_students_quantile_is_the_published_one(degrees: int, published: float) -> None:
    assert student_quantile(degrees) == pytest.approx(published, rel=0.002)


@given(st.lists(st.floats(-100, 100), min_size=4, max_size=30))
def test_the_line_is_the_one_of_least_squares(values: list[float]) -> None:
    points = list(enumerate(values))
    expected = linear_regression(range(len(values)), values)
    assert fit(points).per_s == pytest.approx(expected.slope, abs=1e-9)
