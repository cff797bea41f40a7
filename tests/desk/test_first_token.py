"""The time to a first token, learned from those that came and from those that never did."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.desk.first_token import QUANTILE, FadingLine, FirstTokens, censored_quantile

TRUE_BASE_S, TRUE_PER_TOKEN_S = 0.2, 0.002


def true_seconds(tokens: int, rng: Random) -> float:
    return (TRUE_BASE_S + TRUE_PER_TOKEN_S * tokens) * rng.uniform(0.8, 1.2)


def taught(patience_s: float, *, is_told_of_cuts: bool, num: int = 400) -> FirstTokens:
    """One that has seen many leases, each ended after `patience_s` when no token had come."""
    rng, times = Random(3), FirstTokens()
    for _ in range(num):
        tokens = rng.randint(50, 2_000)
        seconds = true_seconds(tokens, rng)
        if seconds <= patience_s:
            times.came(tokens, seconds, 0.0)
        elif is_told_of_cuts:
            times.was_cut(tokens, patience_s, 0.0)
    return times


def test_nothing_is_known_at_first() -> None:
    times = FirstTokens()
    assert times.bound_s(1_000) == times.fastest_s(1_000) == 0.0


def test_a_line_that_was_put_in_comes_out() -> None:
    line = FadingLine()
    for x in (100, 2_000, 300, 1_000) * 5:
        line.add(x, 0.3 + 0.002 * x)
    assert line.at(5_000) == pytest.approx(10.3)


def test_the_bound_is_kept_by_the_stated_share() -> None:
    times = taught(100.0, is_told_of_cuts=True)
    rng = Random(8)
    tokens = [rng.randint(50, 2_000) for _ in range(2_000)]
    kept = sum(true_seconds(num, rng) <= times.bound_s(num) for num in tokens) / len(tokens)
    assert kept == pytest.approx(QUANTILE, abs=0.07)


def test_the_bound_is_wider_than_the_mean_and_no_margin_is_made_up_from_a_few() -> None:
    few, many = taught(100.0, is_told_of_cuts=True, num=3), taught(100.0, is_told_of_cuts=True)
    assert many.bound_s(1_000) > 1.05 * (TRUE_BASE_S + 1_000 * TRUE_PER_TOKEN_S)
    assert few.bound_s(1_000) == pytest.approx(TRUE_BASE_S + 1_000 * TRUE_PER_TOKEN_S, rel=0.25)


def test_those_that_were_ended_before_correct_what_only_the_fast_ones_show() -> None:
    """Half of all leases never get their token: a model of the other half thinks all is well."""
    patience_s, slow = 2.2, 1_600
    assert TRUE_BASE_S + slow * TRUE_PER_TOKEN_S > 1.5 * patience_s
    blind = FirstTokens()
    rng = Random(3)
    for _ in range(400):  # the slower the lease, the less of its like is seen
        seconds = true_seconds(slow, rng) * rng.uniform(0.5, 1.5)
        if seconds <= patience_s:
            blind.came(slow, seconds, 0.0)
    assert blind.bound_s(slow) <= patience_s, "the survivors alone cannot show it"
    told = FirstTokens()
    rng = Random(3)
    for _ in range(400):
        seconds = true_seconds(slow, rng) * rng.uniform(0.5, 1.5)
        if seconds <= patience_s:
            told.came(slow, seconds, 0.0)
        else:
            told.was_cut(slow, patience_s, 0.0)
    assert told.bound_s(slow) > patience_s


def test_the_fastest_is_that_of_a_token_that_came() -> None:
    times = FirstTokens()
    times.came(100, 1.0, 0.0)
    times.came(100, 0.5, 0.0)
    times.was_cut(100, 0.1, 0.0)
    assert times.fastest_s(100) == pytest.approx(0.5)


def test_what_a_step_costs_is_not_counted_with_every_token_of_a_longer_prompt() -> None:
    """One word took a step: that says nothing of what 2,000 take, and nobody may be refused."""
    times = FirstTokens()
    times.came(1, 0.06, 0.0)
    assert times.fastest_s(2_000) == pytest.approx(0.06)
    times.came(400, 0.46, 0.0)
    assert times.fastest_s(400) == pytest.approx(0.46)
    assert 2.0 < times.fastest_s(2_000) < 2.3  # 0.059 for the step and 1 ms a token


def test_the_longest_prompt_that_counts_is_one_that_is_remembered() -> None:
    times = FirstTokens()
    times.came(2_000, 10.0, 0.0)
    for _ in range(300):
        times.came(1, 0.06, 0.0)
    assert times.fastest_s(2_000) < 60.0


# --- the quantile of censored values, against what is known by hand


def test_without_cut_values_it_is_the_plain_quantile() -> None:
    values = [(float(value), False, 1.0) for value in range(1, 11)]
    assert censored_quantile(values, 0.5) == 5.0
    assert censored_quantile(values, 0.9) == 9.0


def test_a_cut_value_counts_for_all_that_are_larger() -> None:
    """Kaplan–Meier by hand: 1, 2+, 3, 4: S = 3/4, then 3/4 · 1/2 = 3/8, then 0."""
    values = [(1.0, False, 1.0), (2.0, True, 1.0), (3.0, False, 1.0), (4.0, False, 1.0)]
    assert censored_quantile(values, 0.25) == 1.0
    assert censored_quantile(values, 0.5) == 3.0
    assert censored_quantile(values, 0.7) == 4.0


def test_where_all_are_cut_it_is_the_largest() -> None:
    assert censored_quantile([(2.0, True, 1.0), (5.0, True, 1.0), (1.0, True, 1.0)], 0.9) == 5.0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.booleans()), max_size=300))
def test_the_best_speed_is_that_of_the_last_ones_remembered(
    seen: list[tuple[int, int, bool]],
) -> None:
    times = FirstTokens()
    for number, (tokens, seconds, is_cut) in enumerate(seen, start=1):
        (times.was_cut if is_cut else times.came)(tokens, float(seconds), 0.0)
        last = seen[max(number - 128, 0) : number]
        speeds = [took_s / max(read, 1) for read, took_s, cut in last if not cut]
        assert times.fastest_s(1) == min(speeds, default=0.0)


def test_weights_count_like_repetitions() -> None:
    values = [(1.0, False, 1.0), (2.0, False, 3.0), (3.0, True, 2.0), (4.0, False, 2.0)]
    repeated = [(value, cut, 1.0) for value, cut, times in values for _ in range(int(times))]
    for share in (0.1, 0.3, 0.5, 0.6, 0.8, 0.9):
        assert censored_quantile(values, share) == censored_quantile(repeated, share)


# --- what is long ago


def test_a_slow_minute_is_outweighed_by_a_fast_one() -> None:
    times, rng = FirstTokens(), Random(5)
    for number in range(120):
        tokens = rng.randint(50, 2_000)
        times.came(tokens, 10 * true_seconds(tokens, rng), number / 2)
    assert times.bound_s(1_000) > 20
    for number in range(20):
        tokens = rng.randint(50, 2_000)
        times.came(tokens, true_seconds(tokens, rng), 120.0 + 3 * number)
    assert times.bound_s(1_000) < 1.5 * (TRUE_BASE_S + 1_000 * TRUE_PER_TOKEN_S)


def test_a_night_without_requests_makes_it_forget_nothing() -> None:
    times = FirstTokens()
    for tokens in (100, 2_000, 300, 1_000) * 5:
        times.came(tokens, 0.3 + 0.002 * tokens, 0.0)
    before_s = times.bound_s(5_000)
    times.came(500, 1.3, 100_000.0)
    assert times.bound_s(5_000) == pytest.approx(before_s)


@given(st.integers(0, 10**6), st.integers(1, 300), st.floats(0.01, 200.0))
def test_whether_a_bound_is_kept_is_told_as_the_bound_itself_says(
    seed: int, num: int, limit_s: float
) -> None:
    rng, asked, told = Random(seed), FirstTokens(), FirstTokens()
    for number in range(num):
        tokens, seconds = rng.randint(1, 3_000), rng.lognormvariate(0.0, 2.0)
        for times in (asked, told):
            learn = times.came if seconds < 20.0 else times.was_cut
            learn(tokens, seconds, number / 4)
        tokens = rng.randint(1, 3_000)
        assert told.is_within(tokens, limit_s) == (asked.bound_s(tokens) <= limit_s)
