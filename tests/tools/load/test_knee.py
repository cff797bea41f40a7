"""The knee on curves whose knee is known, with and without noise."""

from collections.abc import Callable
from math import exp
from random import Random

import pytest

from kvota.tools.load.knee import Knee, Search, Trial, has_held, knee_of, next_rate

Curve = Callable[[float], bool]


def searched(curve: Curve, **options: float) -> tuple[Knee | None, list[Trial]]:
    search = Search(**({"first_rps": 1.0} | options))  # type: ignore[arg-type]
    trials: list[Trial] = []
    while (rate := next_rate(search, trials)) is not None:
        trials.append(Trial(rate, curve(rate)))
        assert len(trials) <= search.trials_max
    return knee_of(trials), trials


@pytest.mark.parametrize("true_knee", [0.02, 0.9, 1.0, 1.1, 7.3, 500.0])
def test_a_sharp_knee_is_found_within_the_resolution(true_knee: float) -> None:
    knee, trials = searched(lambda rate: rate <= true_knee)
    assert knee is not None
    assert knee.failed_rps is not None
    assert knee.rate_rps <= true_knee < knee.failed_rps <= 1.15 * knee.rate_rps
    for rate in (knee.rate_rps, knee.failed_rps):
        assert sum(trial.rate_rps == rate for trial in trials) == 3, "repeated around the knee"


def test_a_knee_in_noise_is_found_nearly_always() -> None:
    """P(a trial holds) falls from 1 to 0 between about 8 and 12 requests/s, with 1 in 20 spoilt."""
    chance, num_near, num = Random(3), 0, 300
    for _ in range(num):

        def holds(rate: float) -> bool:
            p = 0.95 / (1 + exp((rate - 10) / 0.5))
            return chance.random() < p

        knee, _ = searched(holds)
        num_near += knee is not None and 7.5 <= knee.rate_rps <= 11.5
    assert num_near / num >= 0.9


def test_one_unlucky_trial_does_not_move_the_knee() -> None:
    num_at: dict[float, int] = {}

    def curve(rate: float) -> bool:
        num_at[rate] = num_at.get(rate, 0) + 1
        is_unlucky = 2.0 < rate < 3.5 and num_at[rate] == 1
        return rate <= 20 and not is_unlucky

    knee, _ = searched(curve)
    assert knee is not None
    assert 20 / 1.15 <= knee.rate_rps <= 20


def test_a_server_that_never_fails_has_no_upper_end() -> None:
    knee, trials = searched(lambda _: True, rate_max_rps=10.0)
    assert knee == Knee(10.0, None)
    assert [trial.rate_rps for trial in trials].count(10.0) == 3


def test_a_server_that_always_fails_has_no_knee_and_is_not_asked_for_ever() -> None:
    knee, trials = searched(lambda _: False, rate_min_rps=0.1)
    assert knee is None
    assert min(trial.rate_rps for trial in trials) == 0.1
    assert len(trials) < 15


def test_a_rate_above_a_failed_one_is_no_knee() -> None:
    assert knee_of([Trial(1, True), Trial(2, False), Trial(4, True)]) == Knee(1, 2)


def test_a_tie_is_a_failure() -> None:
    assert knee_of([Trial(1, True), Trial(2, True), Trial(2, False)]) == Knee(1, 2)


@pytest.mark.parametrize(
    ("attainment", "keeps_up", "holds"),
    [(0.9, True, True), (0.899, True, False), (1.0, False, False)],
)
def test_the_rule_of_one_trial(attainment: float, keeps_up: bool, holds: bool) -> None:
    assert has_held(attainment, is_keeping_up=keeps_up) is holds


def test_what_is_recommended_is_between_60_and_70_percent_of_the_knee() -> None:
    assert 0.6 * 8 <= Knee(8.0, 9.0).safe_rps <= 0.7 * 8
