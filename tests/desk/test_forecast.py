"""Survival of outputs, against a Kaplan–Meier estimate written out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.desk.forecast import (
    LENGTH_MAX,
    Float32Array,
    Forecast,
    IntArray,
    bucket_edges,
    bucket_of,
)

unhurried = settings(deadline=None)  # other processes may hold the machine up
Outputs = list[tuple[int, bool]]  # (length, is cut)


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def tokens(*values: int) -> Float32Array:
    return np.array(values, dtype=np.float32)


def reaches(outputs: Outputs, length: int) -> float:
    """P(an output has at least `length` tokens), one that never ends being among them."""
    chance = 1.0
    for ended_at in range(length):
        at_risk = 1 + sum(other >= ended_at for other, _ in outputs)
        num_ended = sum(other == ended_at and not is_cut for other, is_cut in outputs)
        chance *= 1 - num_ended / at_risk
    return chance


def survival(forecast: Forecast, group: int, produced: int, ahead: int) -> float:
    table = forecast.survival(ints(group), ints(produced), tokens(ahead).reshape(1, 1))
    return float(table[0, 0])


def taught(outputs: Outputs, *, thin_below: int = 1, window: int = 1_000) -> tuple[Forecast, int]:
    forecast = Forecast(thin_below=thin_below, window=window)
    group = forecast.group("model", "ann", "short")
    for length, is_cut in outputs:
        forecast.observe(group, length, is_cut=is_cut)
    forecast.check()
    return forecast, group


def test_lengths_below_64_have_a_bucket_each() -> None:
    assert len(set(bucket_of(np.arange(64, dtype=np.int64)))) == 64


@unhurried
@given(st.integers(0, LENGTH_MAX))
def test_a_bucket_is_no_wider_than_a_64th_of_its_lengths(length: int) -> None:
    edges = bucket_edges()
    bucket = int(bucket_of(ints(length))[0])
    assert edges[bucket] <= length < edges[bucket + 1]
    assert edges[bucket + 1] - edges[bucket] <= max(1, (length + 1) / 64)


lengths_below_64 = st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=40)


@unhurried
@given(lengths_below_64, st.integers(0, 60), st.integers(0, 63))
def test_survival_is_kaplan_meier_given_what_was_produced(
    outputs: Outputs, produced: int, ahead: int
) -> None:
    outputs[0] = (outputs[0][0], False)  # else nothing is known
    forecast, group = taught(outputs)
    expected = min(1.0, reaches(outputs, produced + ahead) / reaches(outputs, produced + 1))
    assert survival(forecast, group, produced, ahead) == pytest.approx(expected)


@unhurried
@given(lengths_below_64, st.integers(0, 63))
def test_the_mean_is_the_area_under_the_survival_curve(outputs: Outputs, length_max: int) -> None:
    outputs[0] = (outputs[0][0], False)
    forecast, group = taught(outputs)
    chances = {length: reaches(outputs, length) for length in range(1, length_max + 1)}
    growth = sum(length * chance for length, chance in chances.items())
    expected = sum(chances.values()), growth
    assert forecast.expected(group, length_max) == pytest.approx(expected)


def test_the_mean_of_long_outputs_is_right_to_the_width_of_their_buckets() -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 5_000, 1_000)
    forecast, group = taught([(int(length), False) for length in lengths])
    tokens, growth = forecast.expected(group, 5_000)
    assert tokens == pytest.approx(lengths.mean(), rel=0.02)
    assert growth == pytest.approx((lengths * (lengths + 1.0) / 2).mean(), rel=0.03)


@unhurried
@given(lengths_below_64, st.integers(0, 50), st.sampled_from([0.3, 0.6, 0.9]))
def test_the_quantile_is_the_first_length_that_enough_outputs_end_within(
    outputs: Outputs, produced: int, share: float
) -> None:
    outputs[0] = (outputs[0][0], False)
    forecast, group = taught(outputs)
    known = reaches(outputs, produced + 1)
    enough = [
        total
        for total in range(produced, 62)
        if reaches(outputs, total + 1) <= (1 - share) * known + 1e-12
    ]
    found = int(forecast.quantile(ints(group), ints(produced), share)[0])
    if enough and abs(reaches(outputs, enough[0] + 1) - (1 - share) * known) > 1e-9:
        assert found == enough[0]
    elif not enough:
        assert found > 60


def test_with_nothing_known_everything_runs_on() -> None:
    forecast = Forecast()
    group = forecast.group("model", "ann", "short")
    assert survival(forecast, group, 0, 100_000) == 1.0
    assert forecast.expected(group, 500) == (500, 500 * 501 / 2)
    assert forecast.num_known(group) == 0


def test_past_the_longest_output_ever_seen_everything_runs_on() -> None:
    forecast, group = taught([(20, False)] * 100)
    assert survival(forecast, group, 30, 1_000) == 1.0
    assert survival(forecast, group, 0, 21) == pytest.approx(1 / 101)


def test_an_output_that_was_cut_never_makes_the_forecast_shorter() -> None:
    ended: Outputs = [(10, False), (30, False), (50, False)]
    before, group = taught(ended)
    after, same = taught([*ended, (20, True), (20, True)])
    for ahead in range(60):
        assert survival(after, same, 0, ahead) >= survival(before, group, 0, ahead) - 1e-12


def test_a_window_forgets_the_oldest_outputs() -> None:
    forecast, group = taught([(500, False)] * 50 + [(10, False)] * 20, window=20)
    assert survival(forecast, group, 0, 11) == pytest.approx(1 / 21)


def test_a_thin_group_asks_the_wider_one_and_then_speaks_for_itself() -> None:
    forecast = Forecast(thin_below=10)
    ann = forecast.group("model", "ann", "short")
    bob = forecast.group("model", "bob", "short")
    long = forecast.group("model", "bob", "long")
    for _ in range(10):
        forecast.observe(ann, 5)
    assert survival(forecast, bob, 0, 6) == pytest.approx(1 / 11), "of the same lane"
    assert survival(forecast, long, 0, 6) == pytest.approx(1 / 11), "of the same model"
    assert survival(forecast, forecast.group("other", "bob", "short"), 0, 6) == 1.0
    for _ in range(10):
        forecast.observe(bob, 50)
    assert survival(forecast, bob, 0, 6) == 1.0
    assert survival(forecast, ann, 0, 6) == pytest.approx(1 / 11)
    forecast.check()


def test_more_tenants_than_groups_share_the_history_of_their_lane() -> None:
    forecast = Forecast(num_groups_max=4, thin_below=1)
    first = forecast.group("model", "ann", "short")
    second = forecast.group("model", "bob", "short")
    assert second != first
    assert second == forecast.group("model", "cid", "short")
    forecast.observe(second, 7)
    assert survival(forecast, forecast.group("model", "dan", "short"), 0, 8) == 0.5


def test_a_window_smaller_than_the_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="thin_below"):
        Forecast(window=10, thin_below=50)
