"""Preempting for the short: who pauses, when, how often, and that nobody starves of it."""

from collections import Counter
from typing import Any

import pytest

from kvota.core.errors import Outcome
from kvota.core.request import Band
from kvota.desk.desk import Desk
from kvota.desk.ticket import Granted, Queued, Stage
from tests.desk.desk_world import DeskWorld, new_desk, new_ticket


def pausing_desk(**settings: Any) -> Desk:
    defaults: dict[str, Any] = {
        "admission": "reserve",
        "long_request_threshold": 40,
        "long_kv_share": 1.0,
        "preempt_after_s": 2.0,
        "preempt_min_run_s": 1.0,
        "max_waiting_queue": 1,
    }
    return new_desk(100, **(defaults | settings))


def hold(desk: Desk, name: str, tokens: int, now: float = 0.0, **fields: Any) -> None:
    ticket = new_ticket(name, prompt_tokens=tokens - 10, arrived_s=now, **fields)
    assert isinstance(desk.arrive(ticket, now), Granted)


def wait(desk: Desk, name: str, now: float = 0.0, **fields: Any) -> None:
    assert isinstance(desk.arrive(new_ticket(name, arrived_s=now, **fields), now), Queued)


def pauses(desk: Desk, now: float) -> list[str]:
    return [pause.lease.id for pause in desk.tick(now).pauses]


def test_a_short_ticket_that_waited_long_enough_gets_a_long_lease_paused() -> None:
    desk = pausing_desk()
    hold(desk, "long", 100)
    wait(desk, "short")
    assert pauses(desk, 1.9) == []
    assert pauses(desk, 2.0) == ["long"]
    assert pauses(desk, 3.0) == [], "memory is on its way back"
    assert desk.stage("long") is Stage.PAUSING
    granted = desk.paused("long", 3.1)
    assert [lease.id for lease in granted] == ["short"]
    assert desk.stage("long") is Stage.PAUSED
    desk.check()


def test_a_paused_lease_goes_on_with_what_it_had_produced_and_is_not_charged_again() -> None:
    desk = pausing_desk()
    hold(desk, "long", 100)
    desk.progress("long", 4, 1.0)
    wait(desk, "short")
    pauses(desk, 2.0)
    desk.paused("long", 2.1)
    (lease,) = desk.release("short", Outcome.COMPLETED, 3.0)
    assert (lease.id, lease.num_pauses) == ("long", 1)
    desk.progress("long", 5, 3.5)
    assert desk.service("ann") == 90 + 10 + 2 * 5
    desk.release("long", Outcome.COMPLETED, 4.0)
    tally = desk.snapshot().tally
    assert (tally.granted, tally.resumed, tally.pauses) == (2, 1, 1)
    desk.check()


def test_a_paused_ticket_does_not_count_against_the_bound_of_the_line() -> None:
    desk = pausing_desk()
    hold(desk, "long", 100)
    wait(desk, "short")
    pauses(desk, 2.0)
    desk.paused("long", 2.1)
    assert desk.snapshot().num_waiting_choices == 0
    wait(desk, "other", 2.2, prompt_tokens=35)


def test_nobody_is_paused_for_a_long_ticket() -> None:
    desk = pausing_desk()
    hold(desk, "long", 100)
    wait(desk, "too long", prompt_tokens=60)
    assert pauses(desk, 20.0) == []


def test_short_interactive_leases_are_never_paused() -> None:
    desk = pausing_desk(long_request_threshold=95)
    hold(desk, "short", 100)
    wait(desk, "other")
    assert pauses(desk, 20.0) == []


def test_batch_is_paused_before_long_and_the_latest_before_earlier_ones() -> None:
    desk = pausing_desk()
    hold(desk, "long", 60)
    hold(desk, "old batch", 20, band=Band.BATCH)
    hold(desk, "new batch", 20, now=0.1, band=Band.BATCH)
    wait(desk, "short", now=0.1)
    assert pauses(desk, 3.0) == ["new batch"]


def test_no_more_are_paused_than_needed() -> None:
    desk = pausing_desk()
    for number in range(3):
        hold(desk, str(number), 20, now=number / 10, band=Band.BATCH)
    hold(desk, "chat", 40)
    wait(desk, "short", prompt_tokens=30)
    assert pauses(desk, 3.0) == ["2", "1"]


def test_nobody_is_paused_when_it_would_not_be_enough() -> None:
    desk = pausing_desk()
    hold(desk, "chat", 40)
    hold(desk, "chat 2", 40)
    hold(desk, "batch", 20, band=Band.BATCH)
    wait(desk, "short", prompt_tokens=30)
    assert pauses(desk, 20.0) == []


def test_nobody_is_paused_who_has_run_for_too_short_a_time() -> None:
    desk = pausing_desk(preempt_min_run_s=5.0)
    hold(desk, "long", 100)
    wait(desk, "short")
    assert pauses(desk, 4.9) == []
    assert pauses(desk, 5.1) == ["long"]


def test_a_lease_that_ends_instead_of_pausing_is_simply_over() -> None:
    desk = pausing_desk()
    hold(desk, "long", 100)
    wait(desk, "short")
    pauses(desk, 2.0)
    granted = desk.release("long", Outcome.COMPLETED, 2.1)
    assert [lease.id for lease in granted] == ["short"]
    assert desk.paused("long", 2.2) == []
    desk.check()


def test_a_client_may_leave_in_the_middle_of_a_pause_and_while_paused() -> None:
    desk = pausing_desk()
    hold(desk, "long", 100)
    wait(desk, "short")
    pauses(desk, 2.0)
    desk.cancel("long", Outcome.CLIENT_CLOSED, 2.1)
    assert desk.paused("long", 2.2) == [], "the release will say that the blocks are back"
    assert [one.id for one in desk.release("long", Outcome.CLIENT_CLOSED, 2.3)] == ["short"]
    desk.check()

    desk = pausing_desk()
    hold(desk, "long", 100)
    wait(desk, "short")
    pauses(desk, 2.0)
    desk.paused("long", 2.1)
    desk.cancel("long", Outcome.CLIENT_CLOSED, 2.2)
    assert desk.stage("long") is Stage.CLOSED
    desk.check()


def test_a_paused_ticket_ends_at_its_own_deadline_not_at_that_of_the_line() -> None:
    desk = pausing_desk(queue_timeout_s=5.0, request_timeout_s=9.0)
    hold(desk, "long", 100)
    wait(desk, "short")
    pauses(desk, 2.0)
    desk.paused("long", 2.1)
    desk.progress("short", 1, 2.2)
    assert desk.tick(8.9).expired == []
    ticked = desk.tick(9.0)
    assert [(one.ticket.id, one.outcome) for one in ticked.expired] == [
        ("long", Outcome.REQUEST_TIMEOUT)
    ]


def test_a_ticket_that_only_waits_its_turn_makes_nobody_pause() -> None:
    """The waiting long ticket has the first claim; the short one would fit without pausing."""
    desk = pausing_desk(max_waiting_queue=9)
    hold(desk, "running", 50)
    hold(desk, "batch", 20, band=Band.BATCH)
    wait(desk, "long", prompt_tokens=50)
    wait(desk, "short")
    assert pauses(desk, 20.0) == []


@pytest.mark.parametrize("confirm_late", [False, True])
def test_under_a_flood_of_short_tickets_a_long_one_is_paused_at_most_so_often_and_ends(
    confirm_late: bool,
) -> None:
    desk = pausing_desk(
        max_waiting_queue=20, preempt_min_run_s=0.5, preempt_after_s=0.5, preemptions_max=2
    )
    world = DeskWorld(desk, confirm_late=confirm_late)
    world.arrive(new_ticket("long", prompt_tokens=60, max_tokens=40), 40)
    paused: Counter[str] = Counter()
    for number in range(400):
        world.arrive(new_ticket(f"s{number}", prompt_tokens=15, arrived_s=world.now), 10)
        before = world.num_pauses
        world.step()
        paused["long"] += world.num_pauses - before
    assert world.outcomes["long"] is Outcome.COMPLETED
    assert 1 <= paused["long"] <= 2
    tally = desk.snapshot().tally
    assert tally.repeated_pauses <= 1
    world.drain()
    assert set(world.endings.values()) == {1}


def test_the_room_of_a_paused_lease_is_lent_once() -> None:
    desk = pausing_desk(max_waiting_queue=20, queue_timeout_s=100.0)
    hold(desk, "long", 100)
    for number in range(12):
        wait(desk, f"early {number}", prompt_tokens=15)
    pauses(desk, 2.0)
    begun = [lease.id for lease in desk.paused("long", 2.1)]
    assert begun == [f"early {number}" for number in range(4)]
    resumed: list[str] = []
    for name in begun:
        resumed += [lease.id for lease in desk.release(name, Outcome.COMPLETED, 3.0)]
    assert resumed == ["long"], "the other early ones do not take over the loan"
