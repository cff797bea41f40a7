"""Axes: pixels in proportion, round numbers at the ticks."""

from math import log10

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.tools.report.scales import Scale, linear, log_ticks, logarithmic, ticks


def test_a_linear_scale_is_proportional() -> None:
    scale = Scale(0, 10, 100, 300)
    assert [scale.at(value) for value in (0, 2.5, 10)] == [100, 150, 300]


def test_a_logarithmic_scale_gives_each_decade_the_same_room() -> None:
    scale = Scale(1, 1000, 0, 300, is_log=True)
    assert [scale.at(value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 100, 200, 300])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 47, [0, 10, 20, 30, 40]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_logarithmic_ticks_thin_out_over_many_decades() -> None:
    assert log_ticks(1, 60) == [1, 2, 5, 10, 20, 50]
    assert log_ticks(0.1, 1000) == pytest.approx([0.1, 1, 10, 100, 1000])


values = st.lists(st.floats(-1e9, 1e9).filter(lambda x: x == 0 or abs(x) > 1e-6), max_size=20)


@given(values)
def test_a_linear_scale_holds_every_value_and_zero(values: list[float]) -> None:
    scale = linear(values, 0, 100)
    slack = 1e-6 * (scale.high - scale.low)
    for value in (0.0, *values):
        assert scale.low - slack <= value <= scale.high + slack
    assert 2 <= len(scale.ticks()) <= 12


@given(st.lists(st.floats(1e3, 1e9), min_size=1, max_size=20))
def test_without_zero_a_linear_scale_still_holds_every_value(values: list[float]) -> None:
    scale = linear(values, 0, 100, from_zero=False)
    slack = 1e-6 * (scale.high - scale.low)
    for value in values:
        assert scale.low - slack <= value <= scale.high + slack
    if max(values) > 1.5 * min(values):
        room = (max(values) - min(values)) / (scale.high - scale.low)
        assert room >= 0.4, "the values fill the picture"


@given(st.lists(st.floats(1e-6, 1e9), max_size=20))
def test_a_logarithmic_scale_holds_every_value(values: list[float]) -> None:
    scale = logarithmic(values, 0, 100)
    for value in values:
        assert scale.shows(value)
        assert log10(scale.low) < log10(scale.high)
