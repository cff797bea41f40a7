"""Limits that change while the desk works: nothing that runs or waits is lost or taken away."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from kvota.core.errors import ConfigError, Outcome, Refusal
from kvota.desk.settings import Admission
from kvota.desk.ticket import Granted, Queued, Refused
from tests.desk.desk_world import DeskWorld, new_desk, new_ticket


def world(**settings: Any) -> DeskWorld:
    return DeskWorld(new_desk(capacity_tokens=10_000, **settings))


def change(one: DeskWorld, **limits: Any) -> list[str]:
    """Names of the tickets that begin by it."""
    leases = one.desk.reconfigure(replace(one.desk.settings, **limits), one.now)
    one._start(leases)
    one.desk.check()
    return [lease.id for lease in leases]


def test_more_places_let_in_who_waits_at_once() -> None:
    one = world(max_running_requests=1)
    for name in ("a", "b", "c", "d"):
        one.arrive(new_ticket(name), length=10)
    assert change(one, max_running_requests=3) == ["b", "c"]
    one.drain()
    assert set(one.outcomes.values()) == {Outcome.COMPLETED}


def test_fewer_places_take_nothing_away_and_let_nobody_in_until_they_hold() -> None:
    one = world(max_running_requests=4)
    for name in ("a", "b", "c", "d"):
        assert isinstance(one.arrive(new_ticket(name), length=10), Granted)
    assert change(one, max_running_requests=2) == []
    assert one.desk.snapshot().num_choices == 4
    assert isinstance(one.arrive(new_ticket("e"), length=10), Queued)
    one._release("a", Outcome.COMPLETED)
    one._release("b", Outcome.COMPLETED)
    assert "e" not in one.granted_s, "two are left, and no more may run"
    one._release("c", Outcome.COMPLETED)
    assert "e" in one.granted_s
    one.desk.check()


def test_a_shorter_line_keeps_who_waits_and_refuses_who_comes() -> None:
    one = world(max_running_requests=1, max_waiting_queue=3)
    for name in ("a", "b", "c", "d"):
        one.arrive(new_ticket(name), length=10)
    change(one, max_waiting_queue=1)
    late = one.arrive(new_ticket("e"), length=10)
    assert isinstance(late, Refused)
    assert late.reason is Refusal.QUEUE_FULL
    one.drain()
    assert [one.outcomes[name] for name in "abcd"] == [Outcome.COMPLETED] * 4


def test_the_long_lane_gets_more_places() -> None:
    one = world(long_request_threshold=20, long_request_concurrency=1)
    for name in ("a", "b"):
        one.arrive(new_ticket(name, prompt_tokens=50), length=10)
    assert change(one, long_request_concurrency=2) == ["b"]


def test_what_needs_a_restart_is_refused_and_changes_nothing() -> None:
    one = world()
    before = one.desk.settings
    with pytest.raises(ConfigError, match=r"^risk cannot change while the server runs"):
        one.desk.reconfigure(replace(before, risk=3.0, max_running_requests=5), 0.0)
    assert one.desk.settings is before


def test_a_limit_that_somebody_here_could_never_pass_is_refused() -> None:
    one = world(max_running_requests=8)
    one.arrive(new_ticket("a", n=4), length=10)
    with pytest.raises(ConfigError, match=r"a request for 4 choices is here"):
        change(one, max_running_requests=3)
    assert one.desk.settings.max_running_requests == 8
    change(one, max_running_requests=4)
    one.drain()
    change(one, max_running_requests=1)


# --- the capacity


def test_more_memory_lets_in_who_waits_with_the_next_tick() -> None:
    one = DeskWorld(new_desk(capacity_tokens=30, admission=Admission.RESERVE))
    for name in ("a", "b", "c"):
        one.arrive(new_ticket(name), length=10)
    assert list(one.granted_s) == ["a"]
    one.desk.resize(60)
    assert [lease.id for lease in one.desk.tick(one.now).granted] == ["b", "c"]


def test_less_memory_takes_nothing_away_and_lets_nobody_in_until_it_is_enough() -> None:
    one = DeskWorld(new_desk(capacity_tokens=60, admission=Admission.RESERVE))
    for name in ("a", "b", "c"):
        assert isinstance(one.arrive(new_ticket(name), length=10), Granted)
    one.desk.resize(40)
    one.desk.check()
    assert isinstance(one.arrive(new_ticket("d"), length=10), Queued)
    one._release("a", Outcome.COMPLETED)
    assert "d" not in one.granted_s
    one._release("b", Outcome.COMPLETED)
    assert "d" in one.granted_s
    too_large = one.arrive(new_ticket("e", prompt_tokens=35), length=10)
    assert isinstance(too_large, Refused)
    assert "there are 40" in too_large.message


def test_who_waits_while_the_memory_shrinks_below_its_need_runs_alone() -> None:
    one = DeskWorld(new_desk(capacity_tokens=60, admission=Admission.RESERVE))
    one.arrive(new_ticket("a"), length=10)
    one.arrive(new_ticket("large", prompt_tokens=45), length=10)
    one.desk.resize(40)
    one.drain()
    assert set(one.outcomes.values()) == {Outcome.COMPLETED}


moves = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 3), st.integers(1, 30)),
        st.tuples(st.just("limits"), st.integers(1, 6), st.integers(0, 6)),
        st.tuples(st.just("step"), st.integers(1, 8), st.just(0)),
    ),
    max_size=60,
)


@given_settings(deadline=None, max_examples=150)
@given(moves, st.booleans())
def test_above_a_lowered_limit_there_are_only_fewer_and_every_ticket_ends_once(
    done: list[tuple[str, int, int]], late: bool
) -> None:
    desk = new_desk(capacity_tokens=300, max_running_requests=3, max_waiting_queue=5)
    one = DeskWorld(desk, confirm_late=late)
    for number, (kind, first, second) in enumerate(done):
        before = desk.snapshot()
        if kind == "arrive":
            one.arrive(new_ticket(str(number), n=first, max_tokens=30), length=second)
        elif kind == "step":
            one.run(first)
        else:
            with suppress(ConfigError):
                change(one, max_running_requests=first, max_waiting_queue=second)
        after, limits = desk.snapshot(), desk.settings
        assert after.num_choices <= max(limits.max_running_requests, before.num_choices)
        assert after.num_waiting_choices <= max(
            limits.max_waiting_queue, before.num_waiting_choices
        )
    one.drain()
    assert set(one.endings.values()) <= {1}
