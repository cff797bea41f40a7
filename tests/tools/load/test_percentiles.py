"""Percentiles against a slow count, and their confidence against repeated sampling."""

from math import inf, isnan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.tools.load.percentiles import Spread, bounds, percentile

samples = st.lists(st.floats(0, 1e6) | st.just(inf), min_size=1, max_size=60)
shares = st.integers(1, 100).map(lambda percent: percent / 100)


@given(samples, shares)
def test_a_percentile_is_the_smallest_sample_that_enough_are_not_above(
    values: list[float], share: float
) -> None:
    def share_below(value: float) -> float:
        return sum(other <= value for other in values) / len(values)

    expected = min(value for value in values if share_below(value) >= share - 1e-9)
    assert percentile(sorted(values), share) == expected


def test_known_percentiles() -> None:
    ordered = [float(value) for value in range(1, 101)]
    assert [percentile(ordered, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert isnan(percentile([], 0.5))


def test_ten_percent_of_failures_make_p95_unbounded_and_leave_p90() -> None:
    spread = Spread.of([0.1] * 90 + [inf] * 10)
    assert spread is not None
    assert (spread.p50, spread.p95, spread.p99) == (0.1, inf, inf)


@pytest.mark.parametrize(("num", "is_sure"), [(367, False), (368, True)])
def test_p99_can_be_bounded_from_above_from_368_samples_on(num: int, is_sure: bool) -> None:
    spread = Spread.of(range(num))
    assert spread is not None
    assert spread.is_p99_sure is is_sure


@pytest.mark.parametrize("num", [30, 500])
def test_the_bounds_hold_the_true_p99_nineteen_times_in_twenty(num: int) -> None:
    chance, trials, hits = Random(11), 800, 0
    for _ in range(trials):
        low, high = bounds(sorted(chance.random() for _ in range(num)), 0.99)
        hits += low <= 0.99 <= high
    assert hits / trials >= 0.95 - 2 * (0.05 * 0.95 / trials) ** 0.5


def test_without_samples_there_is_no_spread() -> None:
    assert Spread.of([]) is None
