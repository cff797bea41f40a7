"""Each policy's peak, against a slow evaluation at every moment, and against chance itself."""

from dataclasses import dataclass
from math import comb, sqrt
from operator import mul

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.desk.forecast import Float32Array, Forecast
from kvota.desk.policies import ExpectedPeak, Policy, Rows, margin, new_policy, time_grid
from kvota.desk.settings import Admission, DeskSettings

unhurried = settings(deadline=None)  # other processes may hold the machine up


@dataclass(frozen=True)
class Lease:
    """One lease in plain numbers."""

    prompt: int
    produced: int
    max_tokens: int
    num_open: int = 1

    @property
    def left(self) -> int:
        return self.max_tokens - self.produced


def rows_of(leases: list[Lease], group: int, block_size: int = 1) -> Rows:
    columns = [
        (
            one.prompt // block_size * block_size,
            one.prompt % block_size + one.produced,
            one.produced,
            one.left,
            one.num_open,
            group,
        )
        for one in leases
    ]
    return Rows(*np.array(columns, dtype=np.int64).reshape(len(leases), 6).T)


def peak_of(policy: Policy, leases: list[Lease], group: int, block_size: int = 1) -> float:
    return policy.peak(rows_of(leases, group, block_size))


def in_blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) * block_size


def chance(forecast: Forecast, group: int, produced: int, ahead: int) -> float:
    groups, tokens = np.array([group]), np.array([produced])
    steps = np.array([[ahead]], dtype=np.float32)
    return float(forecast.survival(groups, tokens, steps)[0, 0])


def expected_need(
    forecast: Forecast,
    group: int,
    leases: list[Lease],
    ahead: int,
    risk: float,
    block_size: int = 1,
) -> float:
    """The formula of the module at one moment, with every number of choices that may run."""
    mean = variance = third = worst = 0.0
    for one in leases:
        if ahead > one.left:
            continue
        part = one.prompt % block_size
        own = in_blocks(part + one.produced + ahead, block_size)
        running = chance(forecast, group, one.produced, ahead)
        held = [0] + [one.prompt - part + num * own for num in range(1, one.num_open + 1)]
        likely = [
            comb(one.num_open, num) * running**num * (1 - running) ** (one.num_open - num)
            for num in range(one.num_open + 1)
        ]
        expected = sum(map(mul, held, likely))
        mean += expected
        variance += sum(
            (each - expected) ** 2 * weight for each, weight in zip(held, likely, strict=True)
        )
        third += sum(
            (each - expected) ** 3 * weight for each, weight in zip(held, likely, strict=True)
        )
        worst += held[-1]
    skewness = third / max(variance**1.5, 1.0)
    return min(mean + pearson(risk, skewness) * sqrt(variance), worst)


def pearson(risk: float, skewness: float) -> float:
    """The frequency factor as it is written in books."""
    if abs(skewness) < 1e-3:
        return risk + (risk**2 - 1) * skewness / 6
    root = 1 + skewness * risk / 6 - skewness**2 / 36
    return 2 / skewness * (root**3 - 1) if root > 0 else float(margin(risk, f32(skewness))[0])


def f32(value: float) -> Float32Array:
    return np.array([value], dtype=np.float32)


def taught(lengths: list[int], window: int = 1_000) -> tuple[Forecast, int]:
    forecast = Forecast(thin_below=1, window=window)
    group = forecast.group("model", "ann", "short")
    for length in lengths:
        forecast.observe(group, length)
    return forecast, group


leases_strategy = st.lists(
    st.builds(
        lambda prompt, produced, left: Lease(prompt, produced, produced + left),
        st.integers(0, 200),
        st.integers(0, 100),
        st.integers(1, 300),
    ),
    min_size=1,
    max_size=8,
)


@unhurried
@given(
    leases_strategy,
    st.lists(st.integers(1, 3), min_size=8, max_size=8),
    st.lists(st.integers(1, 150), max_size=30),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([1, 7, 16]),
)
def test_the_expected_peak_is_the_formula_at_every_point_of_the_grid(
    leases: list[Lease], choices: list[int], lengths: list[int], risk: float, block_size: int
) -> None:
    forecast, group = taught(lengths)
    longest = 1 << max(max(one.left for one in leases) - 1, 0).bit_length()
    points, _ = time_grid(longest)
    same_cut = [
        Lease(one.prompt, one.produced, one.produced + longest, num)
        for one, num in zip(leases, choices, strict=False)
    ]
    slow = max(
        expected_need(forecast, group, same_cut, int(tau), risk, block_size) for tau in points.flat
    )
    fast = peak_of(ExpectedPeak(forecast, risk, block_size), same_cut, group, block_size)
    assert fast == pytest.approx(slow)


@unhurried
@given(leases_strategy)
def test_with_nothing_known_the_peak_is_never_below_that_of_every_moment(
    leases: list[Lease],
) -> None:
    forecast, group = taught([])
    slow = max(
        expected_need(forecast, group, leases, ahead, 2.0)
        for ahead in range(max(one.left for one in leases) + 1)
    )
    fast = peak_of(ExpectedPeak(forecast, 2.0, 1), leases, group)
    assert slow <= fast <= sum(one.prompt + one.max_tokens for one in leases)


@pytest.mark.parametrize("shape", [1.0, 4.0, 100.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_margin_is_the_quantile_of_a_skewed_sum(shape: float, sign: int) -> None:
    """Gamma numbers have the skewness 2/√shape; turned over, its negative."""
    drawn = sign * np.random.default_rng(5).gamma(shape, 1.0, 400_000)
    standard = (drawn - drawn.mean()) / drawn.std()
    for risk, share in ((1.0, 0.8413), (2.0, 0.9772)):
        found = float(margin(risk, f32(sign * 2 / sqrt(shape)))[0])
        assert found == pytest.approx(np.quantile(standard, share), abs=0.06)


@pytest.mark.parametrize("risk", [0.5, 2.0, 3.0])
def test_the_margin_is_the_risk_without_skew_and_not_negative_for_a_sum_that_leans_left(
    risk: float,
) -> None:
    assert float(margin(risk, f32(0.0))[0]) == pytest.approx(risk)
    margins = margin(risk, np.linspace(-6, 0, 50, dtype=np.float32))
    assert (margins > 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_the_grid_loses_less_than_2_percent_against_every_moment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forecast, group = taught([int(length) for length in rng.lognormal(4.5, 1.0, 500)])
    leases = [
        Lease(int(rng.integers(10, 2_000)), int(rng.integers(0, 150)), 1_024) for _ in range(40)
    ]
    slow = max(expected_need(forecast, group, leases, ahead, 2.0) for ahead in range(600))
    fast = peak_of(ExpectedPeak(forecast, 2.0, 1), leases, group)
    assert 0.98 * slow <= fast <= 1.02 * slow


@pytest.mark.parametrize(("risk", "most"), [(1.0, 0.45), (2.0, 0.10), (3.0, 0.02)])
def test_futures_drawn_from_the_history_rarely_need_more_than_the_peak(
    risk: float, most: float
) -> None:
    """z is about each moment; over all moments together the chance is somewhat larger."""
    rng = np.random.default_rng(7)
    history = np.minimum(rng.lognormal(4.5, 0.8, 1_000), 1_000).astype(np.int64)
    forecast, group = taught([int(length) for length in history])
    leases = [
        Lease(int(rng.integers(10, 400)), int(rng.integers(0, 120)), 1_000) for _ in range(60)
    ]
    peak = peak_of(ExpectedPeak(forecast, risk, 1), leases, group)
    ends = np.array(
        [rng.choice(history[history > one.produced], size=1_000) - one.produced for one in leases]
    )
    held = np.array([one.prompt + one.produced for one in leases])
    moments = np.arange(0, 1_000, 5)
    needs = np.array([(held[:, None] + tau).T @ (ends >= tau) for tau in moments])
    over = float((needs.max(axis=0) > peak).mean())
    assert over <= most
    if risk == 1.0:
        assert over > 0.02, "a peak that is never reached is no forecast"


def test_while_most_run_on_a_risk_of_2_is_nearer_one_in_forty_than_two_deviations_are() -> None:
    rng = np.random.default_rng(11)
    forecast, group = taught([10] * 15 + [100] * 85)
    leases = [Lease(int(size), 0, 128) for size in rng.lognormal(6, 0.8, 25)]
    needs = ExpectedPeak(forecast, 2.0, 1).needs(rows_of(leases, group))
    points, _ = time_grid(128)
    place = int(np.searchsorted(points[:, 0], 20))
    ahead = int(points[place, 0])
    mean, variance, third, _ = needs[:, place].astype(float)
    sizes = np.array([one.prompt + ahead for one in leases])
    drawn = (rng.random((200_000, 25)) < chance(forecast, group, 0, ahead)) @ sizes
    factor = float(margin(2.0, f32(third / variance**1.5))[0])
    exceeded = (drawn > mean + factor * sqrt(variance)).mean()
    assert (drawn > mean + 2 * sqrt(variance)).mean() < exceeded < 0.03
    assert exceeded > 0.005


def test_choices_share_a_prompt_that_stays_until_the_last_of_them_ends() -> None:
    rng = np.random.default_rng(3)
    history = rng.integers(1, 60, 20_000)
    forecast, group = taught([int(length) for length in history], window=20_000)
    needs = ExpectedPeak(forecast, 0.0, 1).needs(rows_of([Lease(500, 0, 64, num_open=3)], group))
    points, _ = time_grid(64)
    ends = rng.choice(history, size=(3, 200_000))
    for place, tau in enumerate(points.flat):
        running = ends >= tau
        need = 500 * running.any(axis=0) + tau * running.sum(axis=0)
        assert needs[0, place] == pytest.approx(need.mean(), rel=0.02, abs=5)
        assert sqrt(needs[1, place]) == pytest.approx(need.std(), rel=0.02, abs=8)


@unhurried
@given(leases_strategy, leases_strategy, st.sampled_from(Admission), st.integers(1, 16))
def test_whoever_comes_on_top_never_lowers_the_peak_and_the_order_is_nothing_to_it(
    some: list[Lease], others: list[Lease], admission: Admission, block_size: int
) -> None:
    forecast, group = taught([20, 40, 80])
    policy = new_policy(DeskSettings(admission=admission), forecast, block_size)
    together = peak_of(policy, some + others, group, block_size)
    assert peak_of(policy, others + some, group, block_size) == pytest.approx(together)
    assert peak_of(policy, some, group, block_size) <= together + 1e-9


@pytest.mark.parametrize("admission", Admission)
def test_nobody_needs_nothing(admission: Admission) -> None:
    forecast, group = taught([20])
    policy = new_policy(DeskSettings(admission=admission), forecast, 16)
    assert peak_of(policy, [], group) == 0


@unhurried
@given(leases_strategy, st.integers(1, 16), st.integers(1, 3))
def test_reserve_is_everybodys_max_tokens_in_whole_blocks(
    leases: list[Lease], block_size: int, num_open: int
) -> None:
    leases = [Lease(one.prompt, one.produced, one.max_tokens, num_open) for one in leases]
    forecast, group = taught([5])
    policy = new_policy(DeskSettings(admission=Admission.RESERVE), forecast, block_size)
    need = 0
    for one in leases:
        part = one.prompt % block_size
        need += one.prompt - part + num_open * in_blocks(part + one.max_tokens, block_size)
    assert peak_of(policy, leases, group, block_size) == need


@unhurried
@given(leases_strategy, st.integers(1, 16))
def test_no_forecast_is_above_reserve(leases: list[Lease], block_size: int) -> None:
    forecast, group = taught([20, 40, 80])
    reserve = new_policy(DeskSettings(admission=Admission.RESERVE), forecast, block_size)
    expected = ExpectedPeak(forecast, 5.0, block_size)
    most = peak_of(reserve, leases, group, block_size)
    assert peak_of(expected, leases, group, block_size) <= most


def test_optimistic_sees_only_the_next_token_and_keeps_a_watermark() -> None:
    forecast, group = taught([])
    policy = new_policy(DeskSettings(admission=Admission.OPTIMISTIC), forecast, 1)
    leases = [Lease(100, 5, 1_000), Lease(50, 0, 1_000)]
    assert peak_of(policy, leases, group) == pytest.approx((106 + 51) / 0.99)


@unhurried
@given(leases_strategy)
def test_a_point_forecast_peaks_as_if_every_output_got_exactly_its_guess(
    leases: list[Lease],
) -> None:
    forecast, group = taught([])  # nothing known: the guess is max_tokens
    policy = new_policy(DeskSettings(admission=Admission.QUANTILE), forecast, 1)
    slow = max(
        sum(one.prompt + one.produced + ahead for one in leases if one.left >= ahead)
        for ahead in range(max(one.left for one in leases) + 1)
    )
    assert peak_of(policy, leases, group) == slow


def test_the_quantile_policy_guesses_from_the_history() -> None:
    forecast, group = taught([10] * 50 + [30] * 50)
    policy = new_policy(DeskSettings(admission=Admission.QUANTILE, quantile=0.4), forecast, 1)
    assert peak_of(policy, [Lease(100, 0, 500)], group) == 110
    assert peak_of(policy, [Lease(100, 15, 500)], group) == 130


@pytest.mark.parametrize(
    ("produced", "max_tokens", "remaining"),
    [(0, 4_096, 1_029), (2_000, 4_096, 205), (0, 100, 100), (90, 100, 10)],
)
def test_running_length_is_lightllms_heuristic(
    produced: int, max_tokens: int, remaining: int
) -> None:
    forecast, group = taught([])
    policy = new_policy(DeskSettings(admission=Admission.RUNNING_LENGTH), forecast, 1)
    lease = Lease(10, produced, max_tokens)
    assert peak_of(policy, [lease], group) == 10 + produced + remaining


def test_the_typical_output_of_running_length_can_be_set() -> None:
    forecast, group = taught([])
    chosen = DeskSettings(admission=Admission.RUNNING_LENGTH, typical_output=128)
    assert peak_of(new_policy(chosen, forecast, 1), [Lease(10, 0, 1_000)], group) == 10 + 133
