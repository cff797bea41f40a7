from math import inf, sqrt
from random import Random
from statistics import mean, stdev

import pytest

from kvota.tools.evaluate.estimate import Estimate, ratio, student_probability, student_quantile

# Printed in every textbook: t for a probability, by degrees of freedom.
QUANTILES = [
    (0.95, 1, 6.314), (0.95, 2, 2.920), (0.95, 3, 2.353), (0.95, 7, 1.895), (0.95, 10, 1.812),
    (0.95, 30, 1.697), (0.975, 4, 2.776), (0.99, 5, 3.365), (0.995, 20, 2.845), (0.95, 120, 1.658),
]  # fmt: skip


@pytest.mark.parametrize(("probability", "freedom", "quantile"), QUANTILES)
def test_quantiles_are_those_of_the_tables(
    probability: float, freedom: int, quantile: float
) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(quantile, abs=6e-4)
    assert student_probability(quantile, freedom) == pytest.approx(probability, abs=3e-4)


def test_many_degrees_of_freedom_are_normal() -> None:
    assert student_quantile(0.95, 399) == pytest.approx(student_quantile(0.95, 400), abs=0.005)


def test_pieces_of_one_size_have_the_standard_error_of_the_mean() -> None:
    values = [3.0, 4.5, 1.0, 2.0, 7.0]
    found = ratio(values, [1.0] * 5)
    assert found.mean == pytest.approx(mean(values))
    assert found.error == pytest.approx(stdev(values) / sqrt(5))


def test_pieces_count_by_their_size() -> None:
    assert ratio([10.0, 2.0], [10.0, 1.0]).mean == pytest.approx(12 / 11)


def test_a_single_piece_has_no_bounds() -> None:
    found = ratio([1.0], [2.0])
    assert found == Estimate(0.5, inf, 1)
    assert (found.low(), found.high()) == (-inf, inf)


def test_equal_pieces_have_no_error() -> None:
    found = ratio([2.0, 4.0], [1.0, 2.0])
    assert (found.low(0.99), found.high(0.99)) == (2.0, 2.0)


def test_the_bounds_hold_as_often_as_they_say() -> None:
    """Tokens of one window share most of their luck: a bound by tokens would fail far too often."""
    chance, num_trials, misses = Random(5), 1500, 0
    for _ in range(num_trials):
        sizes = [float(chance.randint(20, 40)) for _ in range(12)]
        totals = [size * chance.gauss(0.3, 1) for size in sizes]
        misses += ratio(totals, sizes).low(0.95) > 0.3
    assert misses / num_trials == pytest.approx(0.05, abs=0.02)
