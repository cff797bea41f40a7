"""What a run amounts to: small runs counted by hand, larger ones by a slow count."""

from math import inf
from random import Random

import pytest

from kvota.tools.load.asked import UNFINISHED, Seen
from kvota.tools.load.lag import Lag
from kvota.tools.load.measure import Measured, OpenRequests, Slo, measure, tokens_within

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def answer(
    at: float, ttft: float = 0.1, num: int = 11, gap: float = 0.05, *, code: str | None = None,
    status: int = 200,
) -> Seen:  # fmt: skip
    tokens = [ttft + number * gap for number in range(num)]
    return Seen(
        scheduled_s=at, sent_s=0.0, ended_s=tokens[-1], first_token_s=ttft, token_s=tokens,
        status=status, code=code, output_tokens=num, max_tokens=num,
    )  # fmt: skip


def refused(at: float) -> Seen:
    return Seen(scheduled_s=at, sent_s=0.0, ended_s=0.001, status=503, code="queue_full")


def measured(seen: list[Seen], window: tuple[float, float] = (0.0, 10.0)) -> Measured:
    return measure(seen, len(seen) / 10, window, SLO, Lag())


def test_fast_refusals_are_in_no_latency_and_make_the_tail_unbounded() -> None:
    """90 answers at 100 ms, 10 rejected with 503 at 1 ms."""
    seen = [answer(at / 10) for at in range(90)] + [refused(9 + at / 10) for at in range(10)]
    one = measured(seen)
    assert one.ttft is not None
    assert one.ttft_or_unserved is not None
    assert (one.ttft.p50, one.ttft.p95, one.ttft.p99) == (0.1, 0.1, 0.1)
    assert one.ttft.num == 90
    assert (one.ttft_or_unserved.p95, one.ttft_or_unserved.p99) == (inf, inf)
    assert one.errors == {"queue_full": 10}
    assert (one.num_due, one.num_whole, one.num_refused, one.num_failed) == (100, 90, 10, 0)
    assert one.attainment == 0.9
    assert one.goodput_rps == pytest.approx(9.0)


def test_unfinished_ones_are_apart_and_their_tokens_count_up_to_the_end() -> None:
    whole = [answer(0.0, num=10, gap=0.1)]
    cut = Seen(
        scheduled_s=5.0, sent_s=0.0, ended_s=9.0, first_token_s=1.0, status=200, code=UNFINISHED,
        token_s=[1.0 + number for number in range(9)], output_tokens=9, max_tokens=50,
    )  # fmt: skip
    one = measured([*whole, cut])
    assert (one.num_whole, one.num_unfinished, one.num_failed) == (1, 1, 0)
    assert one.ttft is not None
    assert one.ttft.num == 1
    assert one.output_tokens_per_s == pytest.approx((10 + 4) / 10), "those at 6, 7, 8 and 9 s"


def test_only_what_was_due_in_the_window_is_judged() -> None:
    one = measured([answer(1), answer(4), answer(6), refused(9)], window=(3.0, 8.0))
    assert (one.num_due, one.num_whole, one.num_refused) == (2, 2, 0)
    assert one.goodput_rps == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("one", "is_good"),
    [
        (answer(0, ttft=1.0, gap=0.1), True),
        (answer(0, ttft=1.01), False),
        (answer(0, gap=0.11), False),
        (answer(0, num=1), True),
        (answer(0, code="broken_stream"), False),
        (refused(0), False),
    ],
)
def test_good_is_whole_and_within_both_limits(one: Seen, is_good: bool) -> None:
    assert SLO.is_met(one) is is_good


def test_several_tokens_in_an_event_are_spread_over_events() -> None:
    one = Seen(
        scheduled_s=0.0, sent_s=0.0, ended_s=4.0, token_s=[1.0, 2.0, 3.0, 4.0], output_tokens=20,
    )  # fmt: skip
    assert tokens_within([one], 0.0, 2.5) == 10
    assert tokens_within([one], 0.0, 9.0) == 20


def test_open_requests_are_those_of_a_slow_count() -> None:
    chance = Random(3)
    seen = [
        Seen(scheduled_s=chance.uniform(0, 50), sent_s=0.0, ended_s=chance.uniform(0.1, 9))
        for _ in range(60)
    ]
    spans = [(one.scheduled_s, one.scheduled_s + one.ended_s) for one in seen]
    opened = OpenRequests(seen)
    moments = [chance.uniform(0, 55) for _ in range(100)]
    for moment in moments:
        assert opened.at(moment) == sum(begin <= moment < end for begin, end in spans)
    fine = [5 + number / 1000 for number in range(20_000)]
    slow = sum(opened.at(moment) for moment in fine) / len(fine)
    assert opened.mean(5, 25) == pytest.approx(slow, abs=0.01)
    for one in seen:
        others = sum(begin < one.scheduled_s < end for begin, end in spans)
        assert opened.before(one) == others


def overload(rate: float, served: float, seconds: float = 60.0) -> list[Seen]:
    """A queue that is served in order at `served` requests/s, arrivals at even distances."""
    seen, free = [], 0.0
    for number in range(round(rate * seconds)):
        at = number / rate
        free = max(free, at) + 1 / served
        seen.append(Seen(scheduled_s=at, sent_s=0.0, ended_s=free - at, first_token_s=free - at))
    return seen


def test_a_queue_that_grows_is_not_keeping_up_although_no_limit_is_broken_yet() -> None:
    falling = measure(overload(12, 10), 12, (10.0, 60.0), Slo(99, 9), Lag())
    assert falling.attainment == 1.0
    assert not falling.is_keeping_up
    steady = measure(overload(9, 10), 9, (10.0, 60.0), Slo(99, 9), Lag())
    assert steady.is_keeping_up


def test_an_empty_run_has_no_figures_and_no_failures() -> None:
    one = measure([], 1.0, (0, 10), SLO, Lag())
    assert (one.num_due, one.attainment, one.ttft) == (0, 0.0, None)
    assert not one.is_rate_missed
