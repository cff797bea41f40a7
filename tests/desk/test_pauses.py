"""Preempting for the short: who pauses, when, how often, and that nobody starves of it."""

from collections import Counter
from typing import Any

import pytest

from kvota.core.errors import Outcome
from kvota.core.request import Band
from kvota.desk.desk import Desk
from kvota.desk.pauses import PauseBudget
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


def test_a_ticket_that_will_hold_nothing_of_its_own_is_waited_for_like_any_other() -> None:
    """`max_tokens` 0, and all of its prompt is shared: its room was divided by nothing."""
    desk = pausing_desk(max_running_requests=1)
    hold(desk, "batch", 20, band=Band.BATCH)
    desk.progress("batch", 1, 0.5)
    desk.progress("batch", 2, 1.0)
    wait(desk, "scored", now=1.0, prompt_tokens=0, max_tokens=0)
    assert pauses(desk, 9.0) == ["batch"]


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


def paced_desk(**settings: Any) -> Desk:
    """A desk that knows its engine: 10 ms for each token of prompt, 100 ms for each of output."""
    desk = pausing_desk(max_waiting_queue=20, queue_timeout_s=900.0, request_timeout_s=900.0,
                        **settings)  # fmt: skip
    for number in range(10):
        prompt = 10 + number
        hold(desk, f"past {number}", prompt + 10)
        desk.progress(f"past {number}", 1, prompt * 0.01)
        desk.progress(f"past {number}", 10, prompt * 0.01 + 0.9)
        desk.release(f"past {number}", Outcome.COMPLETED, 1.0)
    return desk


def hold_until_short_waits(desk: Desk, *, output: int, num_waiting: int, now: float = 5.0) -> None:
    """A long lease of 80 tokens, its prompt read, and short ones that wait for its memory."""
    long = new_ticket("long", prompt_tokens=80 - output, max_tokens=output, arrived_s=now)
    assert isinstance(desk.arrive(long, now), Granted)
    hold(desk, "other", 20, now)
    desk.progress("long", 1, now + 0.8)
    desk.progress("other", 1, now + 0.1)
    for number in range(num_waiting):
        wait(desk, f"short {number}", now)


def test_a_lease_is_paused_where_those_behind_it_would_wait_longer_than_it_loses() -> None:
    """One waits; it ends in 39 steps of 0.1 s, and its 41 tokens take 0.4 s, for three."""
    desk = paced_desk()
    hold_until_short_waits(desk, output=39, num_waiting=1)
    assert pauses(desk, 8.0) == ["long"]


def test_a_lease_is_not_paused_that_ends_before_it_would_have_paid() -> None:
    """Its 78 tokens take 0.8 s to compute again, and it would have ended in 0.2 s."""
    desk = paced_desk()
    hold_until_short_waits(desk, output=3, num_waiting=1)
    assert pauses(desk, 8.0) == []


def test_nobody_is_paused_for_a_line_that_is_more_than_can_be_served_anyway() -> None:
    """All that wait would wait for what is computed again; only a few begin in its room."""
    desk = paced_desk()
    hold_until_short_waits(desk, output=20, num_waiting=19)
    assert pauses(desk, 8.0) == []


def test_every_pause_makes_the_next_run_longer() -> None:
    """At least twice the minimum, and as long again as the recomputation takes."""
    desk = pausing_desk(max_waiting_queue=20, preempt_after_s=0.5, pause_waste_max=1.0)
    hold(desk, "long", 100)
    desk.progress("long", 1, 0.1)
    granted_s = 0.0
    for number in range(2):
        at_s = granted_s + 1.0
        wait(desk, f"short {number}", at_s - 0.6)
        ran_s = 1.0
        while pauses(desk, granted_s + ran_s) != ["long"]:
            ran_s += 0.1
            assert ran_s < 10
        assert ran_s == pytest.approx(2.0**number, abs=0.11)
        [short] = desk.paused("long", granted_s + ran_s)
        granted_s += ran_s + 0.1
        assert [one.id for one in desk.release(short.id, Outcome.COMPLETED, granted_s)] == ["long"]


def test_what_pauses_lose_is_bounded_by_a_share_of_what_is_computed() -> None:
    budget = PauseBudget(share=0.1, saved_max=50)
    assert budget.is_open, "the first pause is free to overdraw it"
    budget.spend(100)
    budget.computed(900)
    assert not budget.is_open
    budget.computed(100)
    assert budget.is_open
    budget.computed(1_000_000)
    budget.spend(51)
    assert not budget.is_open, "a quiet night does not pay for a morning of pauses"
    assert not PauseBudget(share=0.0, saved_max=0).is_open


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
