import math

import numpy as np
import pytest

from bench.sim_vs_live_figures import (
    Array,
    Figure,
    Latency,
    Summary,
    apart,
    figures_of,
    interval,
    of_itself,
    percentiles,
    summary_of,
)


def figures(live: Array, made: Array) -> dict[str, Figure]:
    return {"TTFT": Figure(live, made)}


def drawn(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).lognormal(0.0, 0.5, shape)


def test_percentiles_are_samples() -> None:
    assert percentiles(np.arange(1.0, 101.0)) == [50.0, 95.0, 99.0]


def test_errors_are_shares_of_the_live_figure() -> None:
    assert apart(np.full(100, 1.0), np.full(100, 1.1)) == pytest.approx([0.1] * 3)
    assert apart(np.array([2.0]), np.array([1.0])) == [0.5] * 3


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    assert math.isnan(Latency(0.1, 0.1, 1).per_token_s)
    assert Latency(0.1, 0.5, 5).per_token_s == pytest.approx(0.1)
    run = [Latency(0.1, 0.1, 1), Latency(0.1, 0.5, 5)]
    found = figures_of([run], [run])
    assert found["TTFT"].live.shape == (1, 2)
    assert found["time per token"].live.tolist() == pytest.approx(np.array([[0.1]]))


def test_the_summary_is_of_all_errors_and_of_those_at_p99() -> None:
    found = Summary.of([0.01, 0.02, 0.12, 0.30, 0.02, 0.07])
    assert found.mean == pytest.approx(0.09)
    assert found.at_p99 == 0.12


def test_replays_are_halved_in_all_ways() -> None:
    """Of four replays, one is twice as slow: whichever half has it is off, by 1 or by 1/2."""
    live = np.array([[1.0] * 9, [1.0] * 9, [1.0] * 9, [2.0] * 9])
    own, by_figure = of_itself(figures(live, live))
    assert by_figure["TTFT"] == pytest.approx([0.0, 0.75, 0.75])
    assert (own.mean, own.at_p99) == pytest.approx((0.5, 0.75))


def test_three_replays_are_one_against_two() -> None:
    own, _ = of_itself(figures(np.ones((3, 5)), np.ones((1, 5))))
    assert (own.mean, own.at_p99) == (0.0, 0.0)


def test_pooled_replays_are_nearer_to_the_truth_than_one() -> None:
    """What pooling is for: chance that differs from replay to replay averages out."""
    shift = np.array([0.8, 1.2, 0.9, 1.1])[:, None]
    requests = drawn(1, 300)
    one = summary_of(figures(shift[:1] * requests, requests[None]))
    four = summary_of(figures(shift * requests, requests[None]))
    assert four.mean < one.mean / 2


def test_the_interval_holds_the_true_error_and_narrows_with_more_requests() -> None:
    def found(num: int) -> tuple[float, float]:
        live, made = drawn(2, 4, num), 1.05 * drawn(3, 8, num)
        return interval(figures(live, made), np.random.default_rng(1))[0]

    few, many = found(40), found(2000)
    assert many[0] < 0.06 < many[1] + 0.02
    assert many[1] - many[0] < few[1] - few[0]
