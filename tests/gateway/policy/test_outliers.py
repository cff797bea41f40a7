"""Who is much worse than the others is left out; noise and common trouble leave nobody out."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.gateway.policy.outliers import Outliers, OutlierSettings

REPLICAS = ["r1", "r2", "r3", "r4"]


def new_outliers() -> Outliers:
    outliers = Outliers(OutlierSettings(jitter=0.0), Random(0))
    outliers.review(REPLICAS, 0.0)
    return outliers


def feed(
    outliers: Outliers,
    failure_rates: dict[str, float],
    latencies_s: dict[str, float],
    *,
    num: int = 60,
    now: float = 1.0,
    seed: int = 1,
) -> None:
    random = Random(seed)
    for _ in range(num):
        for replica, rate in failure_rates.items():
            latency_s = latencies_s.get(replica, 0.1) * random.lognormvariate(0, 0.5)
            outliers.observe(replica, random.random() >= rate, latency_s, now)


def test_a_replica_that_fails_more_than_the_others_is_ejected_with_a_reason() -> None:
    outliers = new_outliers()
    feed(outliers, {"r1": 0.0, "r2": 0.6, "r3": 0.0, "r4": 0.02}, {})
    (ejection,) = outliers.review(REPLICAS, 2.0)
    assert ejection.replica == "r2"
    assert "calls failed" in ejection.reason
    assert outliers.is_ejected("r2", 2.0)
    assert not outliers.is_ejected("r1", 2.0)


def test_a_replica_that_is_much_slower_than_the_others_is_ejected() -> None:
    outliers = new_outliers()
    feed(outliers, dict.fromkeys(REPLICAS, 0.0), {"r3": 1.0})
    (ejection,) = outliers.review(REPLICAS, 2.0)
    assert ejection.replica == "r3"
    assert "median latency" in ejection.reason


def test_it_works_for_two_replicas_where_deviations_say_nothing() -> None:
    outliers = Outliers(OutlierSettings(), Random(0))
    outliers.review(["r1", "r2"], 0.0)
    feed(outliers, {"r1": 0.0, "r2": 0.7}, {})
    assert [one.replica for one in outliers.review(["r1", "r2"], 2.0)] == ["r2"]


def test_trouble_that_all_share_makes_nobody_an_outlier() -> None:
    outliers = new_outliers()
    feed(outliers, dict.fromkeys(REPLICAS, 0.7), dict.fromkeys(REPLICAS, 9.0))
    assert outliers.review(REPLICAS, 2.0) == ()


def test_noise_makes_nobody_an_outlier() -> None:
    num_ejected = 0
    for seed in range(150):
        outliers = new_outliers()
        for second in range(1, 11):
            feed(
                outliers,
                dict.fromkeys(REPLICAS, 0.1),
                {},
                num=6,
                now=second,
                seed=99 * seed + second,
            )
            num_ejected += len(outliers.review(REPLICAS, float(second)))
    # 600 replicas, each at risk 0.001 of each kind for every window
    assert num_ejected <= 2


def test_a_few_calls_prove_nothing() -> None:
    outliers = new_outliers()
    feed(outliers, {"r1": 0.0, "r2": 1.0, "r3": 0.0, "r4": 0.0}, {}, num=5)
    assert outliers.review(REPLICAS, 2.0) == ()


def test_it_comes_back_with_a_clean_record_and_stays_out_longer_the_next_time() -> None:
    outliers = new_outliers()
    bad = {"r1": 0.0, "r2": 0.9, "r3": 0.0, "r4": 0.0}
    feed(outliers, bad, {}, now=1.0)
    (first,) = outliers.review(REPLICAS, 1.0)
    assert first.until_s == pytest.approx(31.0)
    assert outliers.review(REPLICAS, 31.0) == ()
    assert not outliers.is_ejected("r2", 31.0)
    feed(outliers, bad, {}, now=32.0)
    (second,) = outliers.review(REPLICAS, 32.0)
    assert second.until_s - 32.0 == pytest.approx(60.0)


def test_answers_to_calls_from_before_the_ejection_do_not_count() -> None:
    outliers = new_outliers()
    feed(outliers, {"r1": 0.0, "r2": 0.9, "r3": 0.0, "r4": 0.0}, {}, now=1.0)
    outliers.review(REPLICAS, 1.0)
    feed(outliers, {"r2": 1.0}, {}, now=2.0)
    feed(outliers, {"r1": 0.0, "r3": 0.0, "r4": 0.0}, {}, now=30.0)
    assert outliers.review(REPLICAS, 31.5) == ()


def test_a_difference_that_may_be_within_the_margin_is_tolerated() -> None:
    """16 % against 5 % is above the margin of ten points, but not for sure after 1,000 calls."""
    outliers = new_outliers()
    for number in range(1_000):
        for name in REPLICAS:
            ok = number % 100 >= (16 if name == "r2" else 5)
            outliers.observe(name, ok, None, 1.0)
    assert outliers.review(REPLICAS, 2.0) == ()


def test_when_replicas_go_the_share_that_is_out_shrinks_with_them() -> None:
    outliers = new_outliers()
    feed(outliers, {"r1": 0.9, "r2": 0.9, "r3": 0.0, "r4": 0.0}, {}, num=200)
    feed(outliers, {"r3": 0.0, "r4": 0.0}, {}, num=3_000)
    assert {one.replica for one in outliers.review(REPLICAS, 2.0)} == {"r1", "r2"}
    outliers.review(["r1", "r2", "r3"], 3.0)
    outliers.check()
    assert len(outliers.ejected(3.0)) == 1


observations = st.lists(
    st.tuples(st.sampled_from("abcdefg"), st.floats(0, 1), st.integers(1, 60)), max_size=30
)


@settings(deadline=None)
@given(observations, st.floats(0, 1), st.lists(st.integers(1, 7), min_size=1, max_size=30))
def test_never_more_than_the_stated_share_is_out(
    steps: list[tuple[str, float, int]], share: float, sizes: list[int]
) -> None:
    outliers = Outliers(OutlierSettings(ejected_share_max=share, num_calls_min=1), Random(0))
    now = 0.0
    for number, (replica, rate, num) in enumerate(steps):
        listed = "abcdefg"[: sizes[number % len(sizes)]]
        now += 7.0
        outliers.review(listed, now)
        feed(
            outliers, dict.fromkeys(listed, 0.0) | {replica: rate}, {replica: 5.0}, num=num, now=now
        )
        outliers.review(listed, now)
        outliers.check()
        num_out = sum(outliers.is_ejected(one, now) for one in listed)
        assert num_out <= share * len(listed)
        assert num_out < len(listed)
        assert num_out == len(outliers.ejected(now))


@pytest.mark.parametrize(
    ("field", "value"),
    [("window_s", 0.0), ("latency_factor", 1.0), ("ejected_share_max", 1.1), ("num_calls_min", 0)],
)
def test_senseless_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        OutlierSettings(**{field: value})  # type: ignore[arg-type]
