"""When to try again and how long to wait."""

import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from kvota.client.patience import (
    Ending,
    Patience,
    RetryBudget,
    is_worth_a_retry,
    retry_after_s,
    wait_s,
)

PATIENCE = Patience()
NOW = 1_800_000_000.0


def ending(status: int | None, **headers: str) -> Ending:
    return Ending(status, {name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, None])
def test_what_may_pass_is_tried_again(status: int | None) -> None:
    assert is_worth_a_retry(ending(status))


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 410, 413, 422])
def test_what_stays_wrong_is_not(status: int) -> None:
    assert not is_worth_a_retry(ending(status))


def test_the_servers_word_counts_more_than_the_status() -> None:
    assert not is_worth_a_retry(ending(503, x_should_retry="false"))
    assert is_worth_a_retry(ending(400, x_should_retry="true"))
    assert is_worth_a_retry(ending(503, x_should_retry="perhaps"))


def test_retry_after_is_kept_to_exactly() -> None:
    for number in (1, 2, 5):
        assert wait_s(ending(503, retry_after="7"), number, PATIENCE, Random(1), NOW) == 7.0


def test_longer_than_anyone_waits_is_given_up() -> None:
    assert wait_s(ending(503, retry_after="121"), 1, PATIENCE, Random(1), NOW) is None


def test_without_a_word_waits_grow_twofold_up_to_a_bound_with_full_jitter() -> None:
    rng = Random(3)
    for number, most in ((1, 0.5), (2, 1.0), (4, 4.0), (7, 30.0), (20, 30.0)):
        waits = [wait_s(ending(503), number, PATIENCE, rng, NOW) for _ in range(400)]
        found = [wait for wait in waits if wait is not None]
        assert len(found) == 400
        assert 0.0 <= min(found) < 0.1 * most
        assert 0.9 * most < max(found) <= most


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("-4", 0.0),
        ("Fri, 15 Jan 2027 08:00:10 GMT", 10.0),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("inf", None),
    ],
)
def test_both_forms_of_retry_after_are_read(told: str, seconds: float | None) -> None:
    assert retry_after_s({"retry-after": told}, NOW) == seconds


def test_an_answer_in_one_piece_may_take_as_long_as_its_tokens() -> None:
    patience = Patience(first_token_s=60.0, per_token_s=0.5, silence_s=45.0)
    assert patience.read_s(is_stream=False, max_tokens=100) == 110.0
    assert patience.read_s(is_stream=False, max_tokens=None) == 60.0 + 0.5 * 1024
    assert patience.read_s(is_stream=True, max_tokens=4000) == 45.0


def test_retries_are_a_tenth_of_requests_and_a_reserve() -> None:
    budget = RetryBudget(PATIENCE)
    spent = 0
    for _ in range(1000):
        budget.earn()
        while budget.spend():
            spent += 1
    assert 100 <= spent <= 110


def test_a_quiet_time_saves_no_more_than_the_reserve() -> None:
    budget = RetryBudget(PATIENCE)
    for _ in range(10_000):
        budget.earn()
    assert sum(budget.spend() for _ in range(100)) == 10


def test_threads_that_share_a_client_share_its_budget_to_the_last_retry() -> None:
    budget = RetryBudget(Patience(budget_reserve=5000.0))
    was_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            spent = list(threads.map(lambda _: sum(budget.spend() for _ in range(1000)), range(8)))
    finally:
        sys.setswitchinterval(was_s)
    assert sum(spent) == 5000
