from math import expm1, log
from random import Random

import pytest

from kvota.tools.evaluate.agreement import Agreement
from kvota.tools.evaluate.estimate import Estimate, ratio
from kvota.tools.evaluate.gate import (
    Check,
    Rules,
    Verdict,
    agreement_checks,
    judge,
    judge_parts,
    likelihood_checks,
    task_checks,
    verdict_of,
)
from kvota.tools.evaluate.likelihood import WindowScore, summarize
from kvota.tools.evaluate.tasks import TaskScore

NUM_TRIALS = 400


def drop_of(mean: float, chance: Random, num: int = 40) -> Estimate:
    """What a noisy measurement of a true drop looks like."""
    return ratio([chance.gauss(mean, 0.05) for _ in range(num)], [1.0] * num)


def share_of(verdict: Verdict, mean: float, seed: int) -> float:
    chance = Random(seed)
    found = [judge("drop", drop_of(mean, chance), 0.05, "").verdict for _ in range(NUM_TRIALS)]
    return found.count(verdict) / NUM_TRIALS


@pytest.mark.parametrize(
    ("mean", "error", "verdict"),
    [
        (0.010, 0.001, Verdict.GOOD),
        (0.090, 0.001, Verdict.WORSE),
        (0.060, 0.020, Verdict.UNDECIDED),
        (0.040, 0.020, Verdict.UNDECIDED),
        (-0.50, 0.020, Verdict.GOOD),
        (0.050, 0.000, Verdict.GOOD),
    ],
)
def test_what_is_allowed_is_compared_with_both_bounds(
    mean: float, error: float, verdict: Verdict
) -> None:
    assert judge("drop", Estimate(mean, error, 40), 0.05, "").verdict is verdict


def test_noise_around_no_drop_never_fails() -> None:
    assert share_of(Verdict.WORSE, 0.0, seed=1) == 0


def test_a_drop_of_just_what_is_allowed_fails_and_passes_rarely() -> None:
    assert share_of(Verdict.WORSE, 0.05, seed=2) == pytest.approx(0.05, abs=0.04)
    assert share_of(Verdict.GOOD, 0.05, seed=3) == pytest.approx(0.05, abs=0.04)


def test_a_large_drop_always_fails() -> None:
    assert share_of(Verdict.WORSE, 0.12, seed=4) == 1


def test_few_pieces_decide_nothing() -> None:
    check = judge("drop", Estimate(0.9, 0.001, 7), 0.05, "")
    assert (check.verdict, check.reason) == (Verdict.UNDECIDED, "only 7 independent pieces")


def test_what_was_not_measured_is_undecided_and_says_why() -> None:
    check = judge("drop", None, 0.05, "the server is mute")
    assert (check.verdict, check.reason) == (Verdict.UNDECIDED, "the server is mute")


def test_many_equal_parts_seldom_raise_a_false_alarm() -> None:
    chance, alarms = Random(6), 0
    for _ in range(NUM_TRIALS):
        parts = [(str(part), drop_of(0.05, chance, 12), 0.05) for part in range(9)]
        alarms += bool(judge_parts("drop", parts))
    assert alarms / NUM_TRIALS <= 0.09


def windows(text: str, rise: float, num: int = 10) -> list[WindowScore]:
    return [WindowScore(text, 100, 200.0, 200.0 + 100 * log(1 + rise)) for _ in range(num)]


def test_perplexity_is_judged_by_its_relative_rise() -> None:
    [check] = likelihood_checks(Rules(0.05), summarize(windows("english", 0.03)), "")
    assert check.verdict is Verdict.GOOD
    assert check.measured == pytest.approx(0.03)
    assert check.high == pytest.approx(0.03)


def test_one_ruined_language_fails_though_the_whole_is_within_limits() -> None:
    scores = windows("english", 0.0, 90) + windows("chinese", 0.3, 10)
    checks = likelihood_checks(Rules(0.05), summarize(scores), "")
    assert [(one.name, one.verdict) for one in checks] == [
        ("perplexity", Verdict.GOOD),
        ("perplexity, chinese", Verdict.WORSE),
    ]
    assert checks[0].measured == pytest.approx(expm1(0.1 * log(1.3)))


def test_a_limit_of_kl_needs_a_kl() -> None:
    checks = likelihood_checks(Rules(max_kl=0.1), summarize(windows("english", 0.0)), "no tokens")
    assert (checks[1].name, checks[1].reason) == ("KL divergence, lower bound", "no tokens")


def agreeing(share: float) -> Agreement:
    estimate = Estimate(share, 0.01, 32)
    return Agreement(32, estimate, estimate, estimate, True)


def test_agreement_is_judged_only_where_a_limit_is_given() -> None:
    assert agreement_checks(Rules(), agreeing(0.1), agreeing(1)) == []
    verdicts = [
        agreement_checks(Rules(min_agreement=0.8), agreeing(share), agreeing(1))[0].verdict
        for share in (0.9, 0.7, 0.8)
    ]
    assert verdicts == [Verdict.GOOD, Verdict.WORSE, Verdict.UNDECIDED]


def test_a_baseline_that_does_not_agree_with_itself_decides_nothing() -> None:
    [check] = agreement_checks(Rules(min_agreement=0.8), agreeing(0.1), agreeing(0.6))
    assert check.verdict is Verdict.UNDECIDED
    assert check.reason == "the baseline agrees with itself only to 60.0%"


def task(name: str, baseline: float, drop: Estimate) -> TaskScore:
    return TaskScore(name, "acc", drop.num_pieces, baseline, baseline - drop.mean, drop)


def test_tasks_are_judged_relative_to_what_the_baseline_gets_right() -> None:
    found = [task("one", 0.5, Estimate(0.02, 0.001, 500))]
    assert [one.verdict for one in task_checks(Rules(0.05), found, None)] == [Verdict.GOOD]
    assert [one.verdict for one in task_checks(Rules(0.03), found, None)] == [Verdict.WORSE]


def test_tasks_that_were_asked_for_and_not_run_are_undecided() -> None:
    assert task_checks(Rules(), [], None) == []
    [check] = task_checks(Rules(), [], "lm_eval is not installed")
    assert (check.verdict, check.reason) == (Verdict.UNDECIDED, "lm_eval is not installed")


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ([Verdict.GOOD, Verdict.GOOD], Verdict.GOOD),
        ([Verdict.GOOD, Verdict.UNDECIDED], Verdict.UNDECIDED),
        ([Verdict.UNDECIDED, Verdict.WORSE], Verdict.WORSE),
    ],
)
def test_the_worst_check_decides(verdicts: list[Verdict], whole: Verdict) -> None:
    checks = [Check("any", 0, 0, 0, 0, verdict, "") for verdict in verdicts]
    assert verdict_of(checks) is whole
