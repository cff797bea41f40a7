"""Promises of places in line, and how they are judged."""

import pytest

from kvota.desk.retry import Promises, clamp_retry_s


@pytest.mark.parametrize(("wait_s", "told_s"), [(None, 5.0), (0.1, 1.0), (7.0, 7.0), (1e9, 120.0)])
def test_what_is_told_stays_within_what_clients_obey(wait_s: float | None, told_s: float) -> None:
    assert clamp_retry_s(wait_s) == told_s


def test_promised_places_count_until_their_time_has_come() -> None:
    promises = Promises()
    promises.make(1, 2.0, now=0.0)
    promises.make(3, 5.0, now=0.0)
    assert promises.num_ahead(1.9) == 4
    assert promises.num_ahead(2.0) == 3
    assert promises.num_ahead(9.0) == 0


def test_a_promise_is_judged_when_the_places_before_it_and_its_own_are_free() -> None:
    promises = Promises()
    promises.make(1, 2.0, now=0.0)
    promises.make(2, 4.0, now=1.0)
    assert promises.freed(1, now=3.0) == [(2.0, 3.0)]
    assert promises.freed(1, now=4.0) == []
    assert promises.freed(1, now=6.0) == [(4.0, 5.0)]
    assert promises.freed(9, now=7.0) == []


def test_endless_refusals_keep_a_bounded_memory() -> None:
    promises = Promises()
    for _ in range(10_000):
        promises.make(1, 120.0, now=0.0)
    assert promises.num_ahead(0.0) <= 4_096
    assert len(promises.freed(10_000, now=1.0)) <= 4_096
