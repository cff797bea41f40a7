"""The bounds against their definition, and against noise that is looked at after every call."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.gateway.policy.evidence import (
    Hits,
    highest_rate,
    is_surely_above,
    is_surely_below,
    log_evidence,
    lowest_rate,
)

hits = st.integers(0, 60).flatmap(lambda num: st.integers(0, num).map(lambda some: Hits(some, num)))


def mixture(seen: Hits, rate: float) -> float:
    """The mean of the likelihood ratio over the arcsine prior, by the midpoint rule."""
    num_points, misses = 4_000, seen.num - seen.hits
    total = 0.0
    for point in range(num_points):
        angle = math.pi / 2 * (point + 0.5) / num_points
        drawn = math.sin(angle) ** 2
        total += (drawn / rate) ** seen.hits * ((1 - drawn) / (1 - rate)) ** misses
    return total / num_points


@pytest.mark.parametrize("seen", [Hits(0, 0), Hits(1, 1), Hits(3, 10), Hits(0, 25), Hits(9, 12)])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_the_evidence_is_the_mixed_likelihood_ratio(seen: Hits, rate: float) -> None:
    assert log_evidence(seen, rate) == pytest.approx(math.log(mixture(seen, rate)), abs=1e-4)


def test_what_cannot_happen_is_refuted_by_one_call() -> None:
    assert log_evidence(Hits(1, 5), 0.0) == math.inf
    assert log_evidence(Hits(4, 5), 1.0) == math.inf


@settings(deadline=None)
@given(hits, st.floats(0.001, 0.5))
def test_the_bounds_enclose_what_was_seen_and_end_where_certainty_ends(
    seen: Hits, risk: float
) -> None:
    low, high = lowest_rate(seen, risk), highest_rate(seen, risk)
    assert 0 <= low <= seen.rate <= high <= 1
    assert not is_surely_above(seen, min(low + 1e-6, 1.0), risk)
    assert low < 1e-6 or is_surely_above(seen, low - 1e-9, risk)
    assert high > 1 - 1e-6 or is_surely_below(seen, high + 1e-9, risk)


def test_nothing_is_known_without_calls() -> None:
    assert lowest_rate(Hits(0, 0), 0.01) == pytest.approx(0.0)
    assert highest_rate(Hits(0, 0), 0.01) == pytest.approx(1.0)


@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_looking_after_every_call_is_wrong_as_rarely_as_promised(rate: float) -> None:
    """A fixed-sample test of risk 5 %, looked at 400 times, is wrong in a third of the runs."""
    random, risk, num_runs, num_wrong = Random(7), 0.05, 600, 0
    for _ in range(num_runs):
        some = 0
        for num in range(1, 401):
            some += random.random() < rate
            if is_surely_above(Hits(some, num), rate, risk):
                num_wrong += 1
                break
    assert num_wrong <= risk * num_runs


def test_strong_evidence_for_the_other_side_is_none() -> None:
    assert not is_surely_above(Hits(0, 300), 0.5, 0.001)
    assert not is_surely_below(Hits(300, 300), 0.5, 0.001)


def test_a_real_difference_is_seen() -> None:
    assert is_surely_above(Hits(40, 200), 0.05, 0.001)
    assert is_surely_below(Hits(0, 300), 0.05, 0.001)
