"""Every client has one fate, and goodput counts only what was due in the window."""

import pytest

from bench.desk_live_judge import Fate, fate, is_at_the_door, judge
from bench.desk_live_load import Seen
from bench.desk_live_mix import Ask
from kvota.core.errors import Outcome
from kvota.desk.desk import Desk
from kvota.desk.forecast import Forecast
from kvota.desk.settings import DeskSettings
from kvota.desk.ticket import Granted, Refused, Ticket

SHORT = Ask(0.0, 100, 11)
LONG = Ask(0.0, 2_000, 11, is_long=True)


def whole(first_s: float, per_token_s: float = 0.1, num_tokens: int = 11) -> Seen:
    last_s = first_s + per_token_s * (num_tokens - 1)
    return Seen(0.001, last_s, first_s, last_s, status=200, is_whole=True, num_tokens=num_tokens)


def refused(code: str, after_s: float = 0.01, lag_s: float = 0.0) -> Seen:
    message = "The line is full: 8 choices wait." if code == "queue_full" else "It did not begin."
    return Seen(lag_s, after_s, status=503, code=code, message=message)


@pytest.mark.parametrize(
    ("one", "seen", "expected"),
    [
        (SHORT, whole(3.0, 0.24), Fate.GOOD),
        (SHORT, whole(3.1), Fate.LATE),
        (SHORT, whole(1.0, 0.26), Fate.LATE),
        (LONG, whole(20.0, 0.26), Fate.GOOD),  # a long one has no target per token
        (LONG, whole(20.1), Fate.LATE),
        (SHORT, refused("queue_full"), Fate.REFUSED),
        (SHORT, refused("queue_timeout", 3.0), Fate.REFUSED),
        (LONG, Seen(0.0, 15.0, status=200, code="deadline_unreachable"), Fate.REFUSED),
        (SHORT, Seen(0.0, 9.0, status=504, code="request_timeout"), Fate.TIMED_OUT),
        (SHORT, Seen(0.0, 9.0, 1.0, 2.0, 200, "request_timeout"), Fate.TIMED_OUT),
        (SHORT, Seen(0.0, 9.0, 1.0, 2.0, 200), Fate.FAILED),  # cut off
        (SHORT, whole(1.0, num_tokens=10), Fate.FAILED),  # a token is missing
        (SHORT, Seen(0.0, 0.1, code="connection: refused"), Fate.FAILED),
        (SHORT, Seen(0.0, 0.1, status=500, code="internal_error"), Fate.FAILED),
        (SHORT, Seen(0.0, 130.0, 1.0, 2.0, 200, is_hanging=True), Fate.HANGING),
    ],
)
def test_a_client_has_one_fate(one: Ask, seen: Seen, expected: Fate) -> None:
    assert fate(one, seen) is expected


def test_goodput_counts_what_was_due_in_the_window_and_fates_count_all() -> None:
    asks = [Ask(at_s, 100, 11, is_long=at_s == 5.0) for at_s in (1.0, 2.0, 5.0, 9.9, 10.0)]
    seen = [whole(1.0), whole(1.0), whole(21.0), refused("queue_full"), whole(1.0)]
    found = judge(asks, seen, 0.5, (2.0, 10.0))
    assert found.goodput_rps == 1 / 8
    assert found.attainment == pytest.approx(1 / 3)
    assert found.long_attainment == 0.0
    assert found.fates == {Fate.GOOD: 3, Fate.LATE: 1, Fate.REFUSED: 1}
    assert found.codes == {"queue_full": 1}


def test_only_refusals_at_the_door_are_timed() -> None:
    asks = [Ask(0.0, 100, 11)] * 3
    seen = [refused("queue_full", 0.010), refused("queue_timeout", 3.0), whole(1.0)]
    found = judge(asks, seen, 1.0, (0.0, 1.0))
    assert found.refusal_p99_s == found.refusal_p50_s == 0.010
    assert found.fates[Fate.REFUSED] == 2


@pytest.mark.parametrize(("lag_s", "is_valid"), [(0.020, True), (0.030, False)])
def test_a_late_generator_spoils_the_result(lag_s: float, is_valid: bool) -> None:
    found = judge([SHORT], [refused("queue_full", lag_s=lag_s)], 1.0, (0.0, 1.0))
    assert found.is_valid is is_valid
    assert found.lag_max_s == lag_s


def ticket(name: str, at_s: float, tokens: int = 100) -> Ticket:
    return Ticket(id=name, tenant="t", prompt_tokens=tokens, max_tokens=10, arrived_s=at_s)


def told(refused: object) -> Seen:
    assert isinstance(refused, Refused)
    return Seen(0.0, 0.01, status=503, code=refused.reason, message=refused.message)


def test_the_desk_refuses_whoever_comes_in_words_that_are_known_here() -> None:
    settings = DeskSettings(max_running_requests=1, max_waiting_queue=0)
    desk = Desk(10_000, settings, Forecast())
    assert isinstance(desk.arrive(ticket("a", 0.0), 0.0), Granted)
    full = told(desk.arrive(ticket("b", 0.0), 0.0))
    assert (full.code, is_at_the_door(full)) == ("queue_full", True)


def test_a_desk_that_has_seen_slow_prompts_says_so_in_words_that_are_known_here() -> None:
    settings = DeskSettings(max_running_requests=8, first_token_timeout_s=1.0)
    desk = Desk(10_000, settings, Forecast())
    for number in range(20):
        at_s, tokens = 10.0 * number, 100 + number
        assert isinstance(desk.arrive(ticket(f"r{number}", at_s, tokens), at_s), Granted)
        desk.progress(f"r{number}", 1, at_s + 0.003 * tokens)
        desk.release(f"r{number}", Outcome.COMPLETED, at_s + 1.0)
    verdicts = [desk.arrive(ticket(f"n{number}", 300.0), 300.0) for number in range(5)]
    late = told(verdicts[-1])
    assert (late.code, is_at_the_door(late)) == ("deadline_unreachable", True)
