"""What may be tried again, how often, and who pays for it."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.gateway.policy.retries import (
    RULES,
    Attempts,
    Blame,
    Failure,
    RetryBudget,
    RetrySettings,
    Stop,
    blame,
    failure_of_status,
    retry_delay_s,
)

SETTINGS = RetrySettings()


def new_attempts(settings: RetrySettings = SETTINGS, deadline_s: float | None = None) -> Attempts:
    return Attempts(settings, RetryBudget(settings), deadline_s)


def test_every_failure_has_a_rule() -> None:
    assert set(RULES) == set(Failure)


@pytest.mark.parametrize(
    ("status", "has_retry_after", "failure"),
    [
        (200, False, None),
        (304, False, None),
        (400, False, Failure.CLIENT_ERROR),
        (401, False, Failure.MISCONFIGURED),
        (402, False, Failure.MISCONFIGURED),
        (403, False, Failure.MISCONFIGURED),
        (404, False, Failure.NOT_OFFERED),
        (405, False, Failure.NOT_OFFERED),
        (408, False, Failure.ERROR),
        (424, False, Failure.ERROR),
        (413, False, Failure.CLIENT_ERROR),
        (422, False, Failure.CLIENT_ERROR),
        (429, False, Failure.BUSY),
        (500, False, Failure.ERROR),
        (503, False, Failure.ERROR),
        (503, True, Failure.BUSY),
        (599, False, Failure.ERROR),
    ],
)
def test_a_status_means_one_failure(
    status: int, has_retry_after: bool, failure: Failure | None
) -> None:
    assert failure_of_status(status, has_retry_after=has_retry_after) == failure


@pytest.mark.parametrize("failure", Failure)
def test_nothing_is_repeated_after_content_went_out(failure: Failure) -> None:
    attempts = new_attempts()
    attempts.begin("a")
    assert attempts.after(failure, content_sent=True, now=0.0) is Stop.BYTES_SENT
    with pytest.raises(AssertionError):
        attempts.begin("b")


@pytest.mark.parametrize("failure", [Failure.CLIENT_ERROR, Failure.CLIENT_GONE, Failure.CUT])
def test_what_would_fail_again_or_matters_to_nobody_is_not_repeated(failure: Failure) -> None:
    attempts = new_attempts()
    attempts.begin("a")
    assert attempts.after(failure, content_sent=False, now=0.0) is Stop.RULE


def test_a_second_attempt_needs_leave() -> None:
    attempts = new_attempts()
    attempts.begin("a")
    with pytest.raises(AssertionError):
        attempts.begin("b")


def test_a_request_has_so_many_attempts_over_all_backends_and_models() -> None:
    attempts = new_attempts()
    stops = []
    for backend in ("a", "b", "c"):
        attempts.begin(backend)
        stops.append(attempts.after(Failure.ERROR, content_sent=False, now=0.0))
    assert stops == [None, None, Stop.ATTEMPTS]
    assert attempts.tried == ["a", "b", "c"]


def test_a_refusal_of_our_own_desk_costs_no_retry() -> None:
    attempts = new_attempts()
    for backend in ("a", "b"):
        attempts.begin(backend)
        assert attempts.after(Failure.REFUSED, content_sent=False, now=0.0) is None
    assert attempts.num_left == 1
    assert attempts.budget.tokens(0.0) == SETTINGS.budget_burst
    attempts.begin("c")
    assert attempts.after(Failure.REFUSED, content_sent=False, now=0.0) is Stop.ATTEMPTS


def test_nothing_is_repeated_past_the_deadline() -> None:
    attempts = new_attempts(deadline_s=5.0)
    attempts.begin("a")
    assert attempts.after(Failure.LOST, content_sent=False, now=5.0) is Stop.DEADLINE


def test_an_empty_budget_stops_retries_and_is_not_charged_by_other_stops() -> None:
    settings = RetrySettings(budget_burst=1.0, budget_floor_per_s=0.0)
    budget = RetryBudget(settings)
    refused = Attempts(settings, budget)
    refused.begin("a")
    refused.after(Failure.CLIENT_ERROR, content_sent=False, now=0.0)
    stops = []
    for _ in range(2):
        attempts = Attempts(settings, budget)
        attempts.begin("a")
        stops.append(attempts.after(Failure.LOST, content_sent=False, now=0.0))
    assert stops == [None, Stop.BUDGET]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["request", "retry", "retry"]), st.floats(0, 3))),
    st.floats(0, 1),
    st.floats(0, 2),
    st.integers(1, 5),
)
def test_retries_stay_within_the_budget_over_every_stretch_of_time(
    steps: list[tuple[str, float]], ratio: float, floor_per_s: float, burst: int
) -> None:
    settings = RetrySettings(budget_ratio=ratio, budget_floor_per_s=floor_per_s, budget_burst=burst)
    budget, now = RetryBudget(settings), 0.0
    happened: list[tuple[float, float]] = []  # (when, +1 for a retry, −ratio for a request)
    for step, passed_s in steps:
        now += passed_s
        if step == "request":
            budget.note_request(now)
            happened.append((now, -ratio))
        elif budget.try_take(now):
            happened.append((now, 1.0))
        # every stretch that ends now
        excess = 0.0
        for began_s, change in reversed(happened):
            excess += change
            assert excess <= burst + floor_per_s * (now - began_s) + 1e-6
        assert 0 <= budget.tokens(now) <= burst


def test_a_tenth_of_many_requests_may_be_retried() -> None:
    budget = RetryBudget(RetrySettings(budget_floor_per_s=0.0))
    num_retries = 0
    for number in range(10_000):
        budget.note_request(number / 1_000)
        num_retries += budget.try_take(number / 1_000)
    assert num_retries == pytest.approx(1_000 + 10, abs=1)


def test_a_quiet_service_may_retry_now_and_then() -> None:
    budget = RetryBudget(RetrySettings(budget_ratio=0.0))
    while budget.try_take(0.0):
        pass
    assert not budget.try_take(9.0)
    assert budget.try_take(10.1)


@pytest.mark.parametrize(
    ("failure", "content_sent", "expected"),
    [
        (Failure.ERROR, False, Blame.FAILED),
        (Failure.LOST, True, Blame.FAILED),
        (Failure.BUSY, False, Blame.HELD),
        (Failure.BUSY, True, Blame.FAILED),
        (Failure.REFUSED, False, Blame.NOTHING),
        (Failure.MISCONFIGURED, False, Blame.SHUT),
        (Failure.NOT_OFFERED, False, Blame.SHUT),
        (Failure.CLIENT_ERROR, False, Blame.NOTHING),
        (Failure.CLIENT_GONE, True, Blame.NOTHING),
    ],
)
def test_only_what_is_the_backends_fault_counts_against_it(
    failure: Failure, content_sent: bool, expected: Blame
) -> None:
    assert blame(failure, content_sent=content_sent) is expected


def test_a_backend_is_not_asked_before_it_said_and_not_by_all_at_once() -> None:
    random = Random(0)
    delays = [retry_delay_s(SETTINGS, 1, 2.0, random) for _ in range(20)]
    assert min(delays) >= 2.0
    assert max(delays) - min(delays) > 0.2


def test_the_delay_grows_up_to_its_bound() -> None:
    random = Random(0)
    longest = [
        max(retry_delay_s(SETTINGS, num, None, random) for _ in range(500)) for num in range(1, 12)
    ]
    assert longest[0] <= 0.1
    assert 0.35 < longest[2] <= 0.4
    assert longest[-1] <= SETTINGS.backoff_max_s


@pytest.mark.parametrize(
    ("field", "value"),
    [("attempts_max", 0), ("budget_ratio", 2.0), ("budget_burst", 0.0), ("backoff_s", 9.0)],
)
def test_senseless_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        RetrySettings(**{field: value})  # type: ignore[arg-type]
