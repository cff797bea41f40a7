"""What the desk answers: grants, places in line, refusals, and one ending for each ticket."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvota.core.errors import Outcome, Refusal
from kvota.core.request import Band
from kvota.desk.desk import Desk
from kvota.desk.forecast import Forecast
from kvota.desk.settings import DeskSettings
from kvota.desk.ticket import (
    TRANSITIONS,
    EtaBasis,
    Granted,
    IllegalMove,
    Lane,
    Queued,
    Refused,
    Stage,
    Ticked,
)
from tests.desk.desk_world import DeskWorld, new_desk, new_ticket


def fill(desk: Desk, tokens: int = 100) -> None:
    """Take memory with one lease named "filler"."""
    verdict = desk.arrive(new_ticket("filler", prompt_tokens=tokens - 10), 0.0)
    assert isinstance(verdict, Granted)


def refused(desk: Desk, now: float = 0.0, **fields: Any) -> Refused:
    verdict = desk.arrive(new_ticket("late", **fields), now)
    assert isinstance(verdict, Refused)
    return verdict


def ids(ticked: Ticked) -> list[str]:
    return [lease.id for lease in ticked.granted]


# --- granting and waiting -------------------------------------------------------------------------


def test_a_ticket_that_fits_is_granted_at_once() -> None:
    desk = new_desk()
    verdict = desk.arrive(new_ticket(), 0.0)
    assert isinstance(verdict, Granted)
    assert (verdict.lease.id, verdict.lease.lane) == ("a", Lane.SHORT)
    assert desk.snapshot().peak_tokens == 20


def test_one_that_does_not_fit_waits_for_the_room_that_a_release_makes() -> None:
    desk = new_desk()
    fill(desk)
    first, second = desk.arrive(new_ticket("a"), 0.0), desk.arrive(new_ticket("b"), 0.0)
    assert isinstance(first, Queued)
    assert isinstance(second, Queued)
    assert (first.position, second.position) == (0, 1)
    assert ids(desk.tick(1.0)) == []
    granted = desk.release("filler", Outcome.COMPLETED, 2.0)
    assert [lease.id for lease in granted] == ["a", "b"]


def test_a_small_ticket_does_not_overtake_a_large_one_before_it() -> None:
    desk = new_desk()
    fill(desk, 60)
    desk.arrive(new_ticket("large", prompt_tokens=50), 0.0)
    assert isinstance(desk.arrive(new_ticket("small"), 0.0), Queued)
    assert ids(desk.tick(1.0)) == []


def test_a_request_for_n_choices_counts_n() -> None:
    desk = new_desk(10_000, max_running_requests=4, max_waiting_queue=3, long_request_concurrency=1)
    assert isinstance(desk.arrive(new_ticket("a", n=3), 0.0), Granted)
    assert isinstance(desk.arrive(new_ticket("b", n=2), 0.0), Queued)
    assert refused(desk, n=2).reason is Refusal.QUEUE_FULL
    assert isinstance(desk.arrive(new_ticket("c", n=1), 0.0), Queued)
    assert desk.snapshot().num_waiting_choices == 3


def test_what_a_choice_that_ended_held_is_free_for_others() -> None:
    desk = new_desk(admission="reserve")
    desk.arrive(new_ticket("a", prompt_tokens=20, max_tokens=40, n=2), 0.0)
    desk.arrive(new_ticket("b", prompt_tokens=30), 0.0)
    desk.progress("a", 5, 1.0, choice=1, is_done=True)
    assert ids(desk.tick(1.0)) == ["b"]


def test_room_that_progress_makes_is_found_without_a_release() -> None:
    """With equal outputs behind it, a lease that is nearly done leaves its future to others."""
    forecast = Forecast()
    group = forecast.group("", "ann", "short")
    for _ in range(1_000):
        forecast.observe(group, 50)
    desk = Desk(160, DeskSettings(risk=0.0), forecast)
    desk.arrive(new_ticket("a", prompt_tokens=50, max_tokens=100), 0.0)
    assert isinstance(desk.arrive(new_ticket("b", prompt_tokens=50, max_tokens=100), 0.0), Queued)
    desk.progress("a", 45, 1.0)
    assert ids(desk.tick(1.0)) == ["b"]


def test_a_shared_prefix_lets_more_tickets_in() -> None:
    desk = new_desk(100, block_size=10, admission="reserve")
    blocks = ["w", "x", "y", "z"]
    for name in ("a", "b", "c"):
        ticket = new_ticket(name, prompt_tokens=50, cached_tokens=40, prefix_blocks=blocks)
        assert isinstance(desk.arrive(ticket, 0.0), Granted)
    assert desk.snapshot().pinned_tokens == 40
    assert isinstance(desk.arrive(new_ticket("d", prompt_tokens=50), 0.0), Queued)


@pytest.mark.parametrize("admission", ["forecast", "reserve", "optimistic", "quantile"])
def test_whatever_fits_at_all_runs_when_it_is_alone(admission: str) -> None:
    for prompt in range(1, 100, 7):
        desk = new_desk(112, block_size=16, admission=admission, risk=9.0)
        ticket = new_ticket(prompt_tokens=prompt, max_tokens=112 - prompt)
        assert isinstance(desk.arrive(ticket, 0.0), Granted)


# --- lanes and bands ------------------------------------------------------------------------------

LONG = {"prompt_tokens": 100}


def lanes_desk(capacity_tokens: int = 1_000, **settings: Any) -> Desk:
    return new_desk(capacity_tokens, admission="reserve", long_request_threshold=50, **settings)


def test_the_prompt_alone_decides_the_lane() -> None:
    desk = lanes_desk()
    for name, prompt, lane in (("a", 50, Lane.SHORT), ("b", 51, Lane.LONG)):
        verdict = desk.arrive(new_ticket(name, prompt_tokens=prompt, max_tokens=100), 0.0)
        assert isinstance(verdict, Granted)
        assert verdict.lease.lane is lane


def test_the_long_lane_has_its_own_number_and_short_ones_pass_it() -> None:
    desk = lanes_desk(long_request_concurrency=1)
    desk.arrive(new_ticket("a", **LONG), 0.0)
    assert isinstance(desk.arrive(new_ticket("b", **LONG), 0.0), Queued)
    assert isinstance(desk.arrive(new_ticket("c"), 0.0), Granted)


def test_the_long_lane_never_takes_more_than_its_share() -> None:
    desk = lanes_desk(long_kv_share=0.3, long_request_concurrency=9)
    verdicts = [desk.arrive(new_ticket(name, **LONG), 0.0) for name in "abcd"]
    assert [isinstance(verdict, Granted) for verdict in verdicts] == [True, True, False, False]
    assert isinstance(desk.arrive(new_ticket("short"), 0.0), Granted)


def test_a_ticket_larger_than_the_share_runs_as_the_only_long_one() -> None:
    desk = lanes_desk(long_kv_share=0.3)
    assert isinstance(desk.arrive(new_ticket("a", prompt_tokens=600), 0.0), Granted)
    assert isinstance(desk.arrive(new_ticket("b", prompt_tokens=60), 0.0), Queued)


def test_the_short_lane_borrows_what_no_long_ticket_waits_for() -> None:
    desk = lanes_desk(200)
    for number in range(9):
        assert isinstance(desk.arrive(new_ticket(str(number)), 0.0), Granted)
    desk.arrive(new_ticket("long", prompt_tokens=80), 0.0)
    for number in range(4):
        desk.release(str(number), Outcome.COMPLETED, 1.0)
        renewed = desk.arrive(new_ticket(f"new {number}"), 1.0)
        assert isinstance(renewed, Queued), "the loan is not renewed"
        assert desk.stage("long") is (Stage.QUEUED if number < 3 else Stage.GRANTED)


def test_interactive_comes_before_batch_and_batch_does_not_slip_through() -> None:
    desk = new_desk()
    fill(desk, 80)
    desk.arrive(new_ticket("batch", prompt_tokens=25, band=Band.BATCH), 0.0)
    desk.arrive(new_ticket("chat", prompt_tokens=40), 0.0)
    desk.arrive(new_ticket("tiny", prompt_tokens=1, max_tokens=1, band=Band.BATCH), 0.0)
    assert ids(desk.tick(1.0)) == []
    granted = desk.release("filler", Outcome.COMPLETED, 2.0)
    assert [lease.id for lease in granted] == ["chat", "batch", "tiny"]


# --- refusing -------------------------------------------------------------------------------------


def test_a_full_line_is_refused_with_a_time_to_come_back() -> None:
    desk = new_desk(max_waiting_queue=1)
    fill(desk)
    desk.arrive(new_ticket("a"), 0.0)
    no = refused(desk)
    assert no.reason is Refusal.QUEUE_FULL
    assert 1 <= no.retry_after_s <= 120
    assert "at most 1" in no.message


@pytest.mark.parametrize("others", [Band.INTERACTIVE, Band.BATCH])
def test_a_band_that_has_filled_its_line_leaves_the_other_bands(others: Band) -> None:
    desk = new_desk(max_waiting_queue=2)
    fill(desk)
    for number in range(2):
        desk.arrive(new_ticket(f"a{number}", band=others), 0.0)
    assert refused(desk, band=others).reason is Refusal.QUEUE_FULL
    mine = Band.BATCH if others is Band.INTERACTIVE else Band.INTERACTIVE
    for number in range(2):
        assert isinstance(desk.arrive(new_ticket(f"b{number}", band=mine), 0.0), Queued)
    assert "2 choices wait and at most 2 may" in refused(desk, band=mine).message
    assert desk.snapshot().num_waiting_choices == 4
    desk.check()


def test_a_tenant_that_has_filled_the_line_leaves_every_other_one_place() -> None:
    desk = new_desk(max_waiting_queue=2)
    fill(desk)
    for number in range(2):
        desk.arrive(new_ticket(f"a{number}"), 0.0)
    assert refused(desk).reason is Refusal.QUEUE_FULL
    assert refused(desk, tenant="bob", n=3).reason is Refusal.QUEUE_FULL, "more than a whole line"
    waits = desk.arrive(new_ticket("bob's", tenant="bob", n=2), 0.0)
    assert isinstance(waits, Queued)
    assert waits.position == 0, "and comes first: it has had nothing yet"
    assert refused(desk, tenant="bob").reason is Refusal.QUEUE_FULL
    desk.check()
    desk.cancel("bob's", Outcome.CLIENT_CLOSED, 1.0)
    assert refused(desk).reason is Refusal.QUEUE_FULL, "that place was nobody else's"
    assert isinstance(desk.arrive(new_ticket("again", tenant="bob"), 1.0), Queued)
    desk.check()


def test_of_places_beyond_a_full_line_there_are_as_many_again() -> None:
    desk = new_desk(max_waiting_queue=3)
    fill(desk)
    for number in range(3):
        desk.arrive(new_ticket(f"a{number}"), 0.0)
    for number in range(3):
        waits = desk.arrive(new_ticket(f"b{number}", tenant=f"t{number}"), 0.0)
        assert isinstance(waits, Queued)
    assert refused(desk, tenant="one too many").reason is Refusal.QUEUE_FULL
    desk.check()
    desk.cancel("b0", Outcome.CLIENT_CLOSED, 1.0)
    assert isinstance(desk.arrive(new_ticket("again", tenant="one more"), 1.0), Queued)
    desk.check()


def test_with_no_line_at_all_whatever_does_not_fit_is_refused() -> None:
    desk = new_desk(max_waiting_queue=0)
    fill(desk)
    assert refused(desk).reason is Refusal.QUEUE_FULL


@pytest.mark.parametrize(
    "fields", [{"prompt_tokens": 91}, {"max_tokens": 91}, {"max_tokens": 46, "n": 2}]
)
def test_what_could_never_fit_is_refused_with_both_numbers(fields: dict[str, int]) -> None:
    no = refused(new_desk(), **fields)
    assert no.reason is Refusal.KV_BUDGET_EXHAUSTED
    assert "100" in no.message


def test_more_choices_than_may_run_at_once_are_refused() -> None:
    desk = new_desk(10_000, max_running_requests=4)
    assert refused(desk, n=5).reason is Refusal.KV_BUDGET_EXHAUSTED


def test_nothing_is_kept_of_a_refused_ticket() -> None:
    desk = new_desk(max_waiting_queue=0)
    fill(desk)
    for _ in range(3):
        refused(desk)
        desk.check()
    assert desk.stage("late") is Stage.CLOSED
    assert desk.snapshot().num_waiting_choices == 0


def saturated_world(history: Sequence[int] = (40,) * 60) -> DeskWorld:
    """Everybody needs 50 of 100 tokens and 40 steps of 0.1 s: two run, and a pace is known."""
    desk = new_desk(history=history, queue_timeout_s=100.0, max_waiting_queue=10)
    world = DeskWorld(desk)
    for number in range(10):
        world.arrive(new_ticket(str(number), max_tokens=40), 40)
    world.run(100)
    return world


def test_a_deadline_that_the_line_cannot_keep_is_refused_at_the_door() -> None:
    world = saturated_world()
    ticket = new_ticket("x", max_tokens=40, arrived_s=world.now, deadline_s=world.now + 0.5)
    verdict = world.arrive(ticket, 40)
    assert isinstance(verdict, Refused)
    assert verdict.reason is Refusal.DEADLINE_UNREACHABLE
    patient = new_ticket("y", max_tokens=40, arrived_s=world.now, deadline_s=world.now + 90.0)
    assert isinstance(world.arrive(patient, 40), Queued)


def test_an_eta_is_told_as_soon_as_a_pace_is_known_and_grows_with_the_position() -> None:
    world = saturated_world()
    asked = [world.desk.position(str(number), world.now) for number in range(6, 10)]
    etas = [told.eta_s for told in asked if told is not None]
    assert len(etas) == 4
    assert etas == sorted(etas)
    assert etas[-1] > 2 * world.step_s


def test_while_nothing_is_known_nobody_is_refused_for_a_wait() -> None:
    desk = new_desk(queue_timeout_s=100.0)
    fill(desk)
    told = desk.arrive(new_ticket("a", max_tokens=40), 0.0)
    assert isinstance(told, Queued)
    assert told.basis is EtaBasis.DEADLINES
    hasty = new_ticket("x", max_tokens=40, deadline_s=0.5)
    assert isinstance(desk.arrive(hasty, 0.0), Queued)


def test_etas_of_a_steady_line_are_about_right() -> None:
    world = DeskWorld(new_desk(500, queue_timeout_s=100.0))
    for number in range(300):
        ticket = new_ticket(str(number), max_tokens=60, arrived_s=world.now)
        world.arrive(ticket, 10 + number * 37 % 50)
        world.run(2)
    world.drain()
    wait = world.desk.snapshot().tally.wait
    assert wait.num > 100
    assert wait.predicted == pytest.approx(wait.actual, rel=0.25)
    assert wait.absolute_error < 0.5 * wait.actual


def test_the_kth_of_a_burst_is_told_to_come_back_for_the_kth_place() -> None:
    world = saturated_world()
    for number in range(10):
        world.arrive(new_ticket(f"b{number}", max_tokens=40, arrived_s=world.now), 40)
    told = []
    for number in range(5):
        verdict = world.arrive(new_ticket(f"c{number}", max_tokens=40, arrived_s=world.now), 40)
        assert isinstance(verdict, Refused)
        told.append(verdict.retry_after_s)
    assert told == sorted(set(told))


# --- deadlines ------------------------------------------------------------------------------------


def test_who_waits_too_long_ends_with_a_queue_timeout_once() -> None:
    desk = new_desk(queue_timeout_s=5.0)
    fill(desk)
    desk.arrive(new_ticket("a"), 0.0)
    assert desk.tick(4.9).expired == []
    (expired,) = desk.tick(5.0).expired
    assert (expired.ticket.id, expired.outcome) == ("a", Outcome.QUEUE_TIMEOUT)
    assert desk.tick(6.0).expired == []
    assert desk.stage("a") is Stage.CLOSED
    desk.check()


def test_a_lease_past_its_deadline_is_closing_until_its_blocks_are_back() -> None:
    desk = new_desk(request_timeout_s=40.0)
    fill(desk, 90)
    desk.progress("filler", 3, 1.0)
    (overdue,) = desk.tick(40.0).overdue
    assert (overdue.lease.id, overdue.outcome) == ("filler", Outcome.REQUEST_TIMEOUT)
    assert desk.stage("filler") is Stage.CLOSING
    assert desk.snapshot().held_after_end_tokens == 83
    desk.release("filler", Outcome.CLIENT_CLOSED, 40.1)
    assert desk.snapshot().held_after_end_tokens == 0
    assert desk.snapshot().tally.ended == {Outcome.REQUEST_TIMEOUT: 1}, "the first reason counts"


def test_a_first_token_that_does_not_come_in_time_ends_the_lease() -> None:
    desk = new_desk(first_token_timeout_s=3.0)
    desk.arrive(new_ticket("slow"), 0.0)
    desk.arrive(new_ticket("quick"), 0.0)
    desk.progress("quick", 1, 2.0)
    assert [one.lease.id for one in desk.tick(3.0).overdue] == ["slow"]


def test_the_first_token_of_a_long_prompt_may_come_later() -> None:
    desk = new_desk(
        first_token_timeout_s=3.0, long_first_token_timeout_s=20.0, long_request_threshold=15
    )
    desk.arrive(new_ticket("short"), 0.0)
    desk.arrive(new_ticket("long", prompt_tokens=20), 0.0)
    assert [one.lease.id for one in desk.tick(3.0).overdue] == ["short"]
    assert desk.tick(19.9).overdue == []
    [overdue] = desk.tick(20.0).overdue
    assert (overdue.lease.id, overdue.limit_s, overdue.has_token) == ("long", 20.0, False)


def test_a_tickets_own_deadlines_only_shorten_the_settings() -> None:
    desk = new_desk(queue_timeout_s=5.0)
    fill(desk)
    desk.arrive(new_ticket("soon", queue_deadline_s=2.0), 0.0)
    desk.arrive(new_ticket("later", queue_deadline_s=500.0), 0.0)
    assert [one.ticket.id for one in desk.tick(2.0).expired] == ["soon"]
    assert [one.ticket.id for one in desk.tick(5.0).expired] == ["later"]


# --- one ending -----------------------------------------------------------------------------------


def test_a_client_that_leaves_the_line_is_gone_at_once_and_makes_room() -> None:
    desk = new_desk()
    fill(desk, 70)
    desk.arrive(new_ticket("large", prompt_tokens=50), 0.0)
    desk.arrive(new_ticket("small"), 0.0)
    granted = desk.cancel("large", Outcome.CLIENT_CLOSED, 1.0)
    assert [lease.id for lease in granted] == ["small"]
    assert desk.stage("large") is Stage.CLOSED


def test_a_client_that_leaves_a_lease_keeps_its_memory_charged_until_release() -> None:
    desk = new_desk()
    fill(desk)
    desk.arrive(new_ticket("a"), 0.0)
    assert desk.cancel("filler", Outcome.CLIENT_CLOSED, 1.0) == []
    assert ids(desk.tick(1.0)) == []
    assert desk.snapshot().held_after_end_tokens == 90
    assert [one.id for one in desk.release("filler", Outcome.COMPLETED, 2.0)] == ["a"]
    assert desk.snapshot().tally.ended == {Outcome.CLIENT_CLOSED: 1}


def test_what_has_ended_can_be_cancelled_and_told_of_again_without_effect() -> None:
    desk = new_desk()
    fill(desk)
    desk.cancel("filler", Outcome.CLIENT_CLOSED, 1.0)
    desk.cancel("filler", Outcome.SHUTDOWN, 1.0)
    desk.progress("filler", 5, 1.0)
    desk.release("filler", Outcome.COMPLETED, 2.0)
    assert desk.cancel("filler", Outcome.CLIENT_CLOSED, 3.0) == []
    assert desk.paused("filler", 3.0) == []
    desk.progress("filler", 9, 3.0)
    desk.check()
    with pytest.raises(KeyError):
        desk.release("filler", Outcome.COMPLETED, 4.0)


def test_an_illegal_move_changes_nothing() -> None:
    desk = new_desk()
    fill(desk)
    with pytest.raises(IllegalMove, match="granted and cannot become paused"):
        desk.paused("filler", 1.0)
    assert desk.stage("filler") is Stage.GRANTED
    desk.check()


def test_every_stage_but_the_last_leads_to_the_end() -> None:
    for stage, following in TRANSITIONS.items():
        assert (Stage.CLOSED in following) == (stage is not Stage.CLOSED)


# --- counting -------------------------------------------------------------------------------------


def test_cached_prompt_tokens_are_not_charged_to_the_tenant() -> None:
    desk = new_desk()
    desk.arrive(new_ticket(prompt_tokens=50, cached_tokens=40), 0.0)
    desk.progress("a", 3, 1.0)
    assert desk.service("ann") == 10 + 2 * 3


class Listener:
    def __init__(self) -> None:
        self.forecasts: list[tuple[float, int]] = []

    def forecast_judged(self, predicted_tokens: float, actual_tokens: int) -> None:
        self.forecasts.append((predicted_tokens, actual_tokens))

    def wait_judged(self, predicted_s: float, actual_s: float) -> None: ...

    def retry_judged(self, predicted_s: float, actual_s: float) -> None: ...

    def lease_paused(self, *, is_repeated: bool) -> None: ...


def test_a_forecast_is_judged_when_an_output_ends_but_not_when_it_is_stopped() -> None:
    listener = Listener()
    desk = Desk(1_000, DeskSettings(), Forecast(), observer=listener)
    for name, tokens, outcome in (
        ("a", 4, Outcome.COMPLETED),
        ("b", 7, Outcome.CLIENT_CLOSED),
        ("c", 10, Outcome.COMPLETED),
    ):
        desk.arrive(new_ticket(name), 0.0)
        desk.progress(name, tokens, 1.0)
        desk.release(name, outcome, 1.0)
    assert listener.forecasts == [(10.0, 4), (10.0, 10)]
    assert desk.snapshot().tally.forecast.absolute_error == 6.0


def test_retries_are_judged_when_their_place_is_free() -> None:
    desk = new_desk(max_waiting_queue=1)
    fill(desk)
    desk.arrive(new_ticket("a"), 0.0)
    refused(desk)
    desk.release("filler", Outcome.COMPLETED, 3.0)
    tally = desk.snapshot().tally.retry_after
    assert (tally.num, tally.predicted, tally.actual) == (1, 5.0, 3.0)
