"""Rollbacks for a reason, never from noise: exact cases, and seeded simulations of rollouts."""

from random import Random

import pytest

from kvota.core.errors import ConfigError
from kvota.gateway.policy.evidence import Hits
from kvota.gateway.policy.watch import Tally, Verdict, Watch, WatchSettings

SETTINGS = WatchSettings()


def simulate(
    *,
    seed: int,
    num_calls: int,
    new_share: float,
    failure_rates: tuple[float, float],
    ttft_factor: float = 1.0,
    settings: WatchSettings = SETTINGS,
) -> tuple[int, str] | None:
    """Calls go to "new" with `new_share`, else to "old". When and why "new" was first rolled back.

    Times to first token are lognormal (median 0.3 s, p95 about 4 times it); `ttft_factor` is the
    new version's. `failure_rates`: of (old, new).
    """
    random, watch = Random(seed), Watch(settings, "old", ["old", "new"])
    for number in range(num_calls):
        is_new = random.random() < new_share
        ok = random.random() >= failure_rates[is_new]
        ttft_s = 0.3 * random.lognormvariate(0, 0.85) * (ttft_factor if is_new else 1.0)
        verdict = watch.observe("new" if is_new else "old", ok, ttft_s, number / 10)
        if verdict.reason is not None:
            return number, verdict.reason
    return None


@pytest.mark.parametrize("new_share", [0.05, 0.5])
@pytest.mark.parametrize("failure_rate", [0.0, 0.02, 0.3])
def test_equal_versions_are_never_rolled_back(new_share: float, failure_rate: float) -> None:
    """20 × 3,000 calls for each case, at one risk in ten thousand for each round."""
    for seed in range(20):
        wrong = simulate(
            seed=seed,
            num_calls=3_000,
            new_share=new_share,
            failure_rates=(failure_rate, failure_rate),
        )
        assert wrong is None


def test_at_the_very_bound_a_rollback_is_as_rare_as_the_risk_says() -> None:
    """The hardest case: exactly as bad as allowed, a high risk, and a look after every call."""
    settings = WatchSettings(failure_margin=0.05, ttft_factor=1.5, risk=0.1)
    num_runs = 80
    num_wrong = sum(
        simulate(
            seed=seed,
            num_calls=900,
            new_share=0.5,
            failure_rates=(0.05, 0.10),
            ttft_factor=1.5,
            settings=settings,
        )
        is not None
        for seed in range(num_runs)
    )
    assert num_wrong <= 0.1 * num_runs


def test_bursts_that_hit_both_versions_are_noise_too() -> None:
    """Every 200 calls the whole service fails for 20 of them."""
    for seed in range(15):
        random, watch = Random(seed), Watch(SETTINGS, "old", ["old", "new"])
        for number in range(3_000):
            ok = number % 200 >= 20 and random.random() > 0.01
            version = "new" if random.random() < 0.1 else "old"
            assert watch.observe(version, ok, 0.2, number / 10).reason is None


def test_a_version_that_always_fails_goes_at_the_first_look() -> None:
    watch = Watch(SETTINGS, "old", ["old", "new"])
    for _ in range(500):
        watch.observe("old", True, 0.2, 0.0)
    verdicts = [watch.observe("new", False, None, 0.0) for _ in range(SETTINGS.num_failed_first)]
    assert [one.rolls_back for one in verdicts] == [False] * 9 + [True]
    reason = verdicts[-1].reason
    assert reason is not None
    assert "'new' failed in 10 of 10 calls (100.0%)" in reason
    assert "'old' in 0 of 500 (0.0%)" in reason
    assert "more than 2 points" in reason


@pytest.mark.parametrize(
    ("failure_rates", "ttft_factor", "word"),
    [
        ((0.01, 0.15), 1.0, "failed"),
        ((0.01, 0.01), 4.0, "first tokens"),
        ((0.3, 0.6), 1.0, "failed"),
    ],
)
def test_a_version_that_is_clearly_worse_is_rolled_back_with_the_right_reason(
    failure_rates: tuple[float, float], ttft_factor: float, word: str
) -> None:
    for seed in range(5):
        found = simulate(
            seed=seed,
            num_calls=6_000,
            new_share=0.1,
            failure_rates=failure_rates,
            ttft_factor=ttft_factor,
        )
        assert found is not None
        assert word in found[1]


def test_the_latency_reason_gives_the_bound_in_seconds() -> None:
    watch = Watch(SETTINGS, "old", ["old", "new"])
    for _ in range(400):
        watch.observe("old", True, 0.1, 0.0)
    reasons = [watch.observe("new", True, 0.9, 0.0).reason for _ in range(40)]
    reason = next(one for one in reasons if one is not None)
    assert reason.startswith("20 of 20 first tokens of 'new' (100.0%) took longer than 0.159 s")
    assert "its p95 is more than 1.5 times that of 'old', which is at most 0.10" in reason


def test_slower_within_the_factor_is_kept() -> None:
    watch = Watch(SETTINGS, "old", ["old", "new"])
    for _ in range(2_000):
        watch.observe("old", True, 0.1, 0.0)
    assert all(watch.observe("new", True, 0.149, 0.0).reason is None for _ in range(900))


def test_what_a_version_misses_while_its_breakers_are_open_counts_as_failed() -> None:
    watch = Watch(SETTINGS, "old", ["old", "new"])
    for _ in range(500):
        watch.observe("old", True, 0.2, 0.0)
    asked = [watch.observe("new", False, None, 0.0) for _ in range(6)]
    missed = [watch.turned_away("new", 1, 0.0) for _ in range(4)]
    assert [one.rolls_back for one in (*asked, *missed)] == [False] * 9 + [True]
    assert "10 of 10 calls (100.0%), 4 of them turned away by its breakers" in str(missed[-1])


def test_a_version_that_has_answered_is_given_one_open_time_to_recover() -> None:
    watch = Watch(SETTINGS, "old", ["old", "new"])
    for _ in range(100):
        watch.observe("old", True, 0.2, 0.0)
        watch.observe("new", True, 0.2, 0.0)
    assert not any(watch.turned_away("new", 1, 0.0).rolls_back for _ in range(900))
    assert any(watch.turned_away("new", 2, 0.0).rolls_back for _ in range(60))


def test_an_old_version_that_is_left_out_alike_keeps_the_new_one() -> None:
    watch = Watch(SETTINGS, "old", ["old", "new"])
    for _ in range(500):
        watch.turned_away("old", 1, 0.0)
        assert not watch.turned_away("new", 1, 0.0).rolls_back


def test_few_calls_of_the_old_version_are_no_reason() -> None:
    """0 of 5 believably means less than 78 % or so: ten failures in ten do not rule that out."""
    watch = Watch(SETTINGS, "old", ["old", "new"])
    for _ in range(5):
        watch.observe("old", True, 0.2, 0.0)
    assert not any(watch.observe("new", False, None, 0.0).rolls_back for _ in range(10))


def test_a_version_that_turns_bad_late_is_not_hidden_by_its_good_past() -> None:
    watch, random = Watch(SETTINGS, "old", ["old", "new"]), Random(1)
    for number in range(40_000):
        watch.observe("new" if number % 2 else "old", random.random() > 0.01, 0.2, float(number))
    num_bad = 0
    for number in range(40_000, 41_000):
        if number % 2:
            num_bad += 1
            verdict = watch.observe("new", random.random() > 0.5, 0.2, float(number))
            if verdict.rolls_back:
                break
        else:
            watch.observe("old", random.random() > 0.01, 0.2, float(number))
    assert num_bad < 200


def test_nothing_is_said_without_a_stable_version_to_compare_with() -> None:
    watch = Watch(SETTINGS, "old", ["old", "new"])
    assert all(watch.observe("new", False, None, 0.0).reason is None for _ in range(500))


def test_the_stable_version_is_never_judged() -> None:
    watch = Watch(SETTINGS, "old", ["old", "new"])
    assert all(watch.observe("old", False, None, 0.0) == Verdict("old") for _ in range(100))


def test_a_restart_forgets() -> None:
    watch = Watch(SETTINGS, "old", ["old", "new"])
    watch.observe("new", True, 0.1, 0.0)
    for _ in range(500):
        watch.observe("old", True, 0.2, 0.0)
    for _ in range(18):
        watch.observe("new", False, None, 0.0)
    watch.restart("new")
    verdicts = [watch.observe("new", False, None, 0.0) for _ in range(30)]
    assert not any(one.rolls_back for one in verdicts)


def test_the_tally_counts_what_took_longer_than_each_step_of_the_grid() -> None:
    random, tally = Random(5), Tally()
    times_s = [random.lognormvariate(-1, 2) for _ in range(500)] + [0.0, 0.001, 5_000.0]
    for seconds in times_s:
        tally.add(True, seconds)
    tally.add(False, None)
    slower = tally.slower()
    for step in range(0, 320, 7):
        edge_s = 0.001 * 2 ** (step / 16)
        expected = sum(seconds > edge_s for seconds in times_s)
        assert slower.than(step) == Hits(expected, len(times_s))
    assert tally.failed == Hits(1, len(times_s) + 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("failure_margin", 1.0),
        ("ttft_factor", 0.5),
        ("risk", 0.0),
        ("num_calls_min", 0),
        ("num_failed_first", 0),
        ("round_s", 0.0),
    ],
)
def test_senseless_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        WatchSettings(**{field: value})  # type: ignore[arg-type]
