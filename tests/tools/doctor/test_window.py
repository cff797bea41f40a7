"""Two pages and what lies between: growth, histograms, restarts. The oracle is the observations."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.tools.doctor.page import Page
from kvota.tools.doctor.window import Histogram, Reading, Window

BOUNDS = (0.1, 0.5, 1.0, 5.0, float("inf"))


def window(first: str, last: str, **fields: Any) -> Window:
    return Window(
        [
            Reading(at_s=0.0, page=Page.parse(first)),
            Reading(at_s=10.0, page=Page.parse(last), **fields),
        ]
    )


def histogram(observed: list[float]) -> Histogram:
    counts = [(bound, sum(value <= bound for value in observed)) for bound in BOUNDS]
    return Histogram(len(observed), sum(observed), tuple(counts))


def test_a_counter_grows_over_all_its_labels_or_by_one_of_them() -> None:
    seen = window('a{x="1"} 2\na{x="2"} 3\n', 'a{x="1"} 5\na{x="2"} 3\na{x="3"} 1\n')
    assert seen.grew("a") == 4
    assert seen.grew_by("a", "x") == {"1": 3, "3": 1}
    assert seen.grew_by("a", "x", x="3") == {"3": 1}
    assert seen.grew("b") is None
    assert seen.grew("b", "a") == 4


def test_a_counter_that_fell_began_anew() -> None:
    assert window("a 100\n", "a 7\n").grew("a") == 7


def test_a_counter_that_was_not_there_began_at_nothing() -> None:
    assert window("b 1\n", "a 7\n").grew("a") == 7


def test_a_restart_is_seen_by_the_time_of_the_start() -> None:
    name = "process_start_time_seconds"
    assert window(f"{name} 100\n", f"{name} 200\n").has_restarted
    assert not window(f"{name} 100\n", f"{name} 100\n").has_restarted


def test_a_histogram_holds_the_window_alone() -> None:
    first = 'h_bucket{le="1"} 10\nh_bucket{le="+Inf"} 10\nh_count 10\nh_sum 5\n'
    last = 'h_bucket{le="1"} 10\nh_bucket{le="+Inf"} 14\nh_count 14\nh_sum 25\n'
    found = window(first, last).histogram("h")
    assert found is not None
    assert (found.count, found.mean) == (4, 5)
    assert found.share_above(1.0) == 1
    assert window(last, last).histogram("h") is None
    assert window(first, last).histogram("nothing") is None


@given(st.lists(st.floats(0.01, 20.0), min_size=1, max_size=60), st.sampled_from(BOUNDS[:-1]))
def test_at_a_bound_the_share_above_is_exact(observed: list[float], bound: float) -> None:
    exact = sum(value > bound for value in observed) / len(observed)
    assert histogram(observed).share_above(bound) == pytest.approx(exact)


@given(st.lists(st.floats(0.01, 4.9), min_size=1, max_size=60), st.floats(0.01, 4.9))
def test_between_bounds_it_lies_between_theirs(observed: list[float], at: float) -> None:
    found = histogram(observed)
    low = max((bound for bound in BOUNDS if bound <= at), default=0.0)
    high = min(bound for bound in BOUNDS if bound > at)
    share = found.share_above(at)
    assert found.share_above(high) - 1e-9 <= share <= found.share_above(low) + 1e-9


@given(st.lists(st.floats(0.01, 4.9), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(observed: list[float], share: float) -> None:
    rank = max(0, min(len(observed) - 1, -int(-share * len(observed) // 1) - 1))
    true = sorted(observed)[rank]
    high = min(bound for bound in BOUNDS if bound >= true)
    low = max((bound for bound in BOUNDS if bound < true), default=0.0)
    assert low - 1e-9 <= histogram(observed).quantile(share) <= high + 1e-9


def test_beyond_the_last_bound_the_quantile_is_that_bound() -> None:
    assert histogram([9.0, 9.0]).quantile(0.5) == 5.0


def test_looks_that_failed_count_only_as_being_away() -> None:
    good = Reading(at_s=0.0, page=Page.parse("a 1\n"))
    later = Reading(at_s=4.0, page=Page.parse("a 3\n"))
    failed = Reading(at_s=9.0, page=Page(), error="No answer.")
    seen = Window([good, later, failed])
    assert seen.is_away
    assert (seen.span_s, seen.grew("a")) == (4.0, 2.0)
    assert seen.gauge("a") == [1.0, 3.0]


def test_a_counter_that_began_anew_has_no_negative_rate() -> None:
    totals = ((0.0, 100), (2.0, 150), (4.0, 10))
    readings = [Reading(at_s=at_s, page=Page.parse(f"a_total {total}\n")) for at_s, total in totals]
    window = Window(readings)
    assert window.rate_over_time("b_total", "a_total") == [(2.0, 25.0), (4.0, 5.0)]
    assert window.over_time("b_total") == []


def test_a_setting_of_several_desks_is_the_largest_and_not_their_sum() -> None:
    page = Page.parse(
        'kvota_desk_limit{backend="a",setting="queue_timeout_s"} 30\n'
        'kvota_desk_limit{backend="b",setting="queue_timeout_s"} 20\n'
    )
    window = Window([Reading(at_s=float(at), page=page) for at in range(2)])
    assert window.limit("queue_timeout_s") == 30
    assert window.limit("max_waiting_queue") is None
