"""Prompts in the engine, who is held to what, and that the desk learns from all of them."""

from typing import Any

from kvota.core.errors import Outcome, Refusal
from kvota.desk.desk import Desk
from kvota.desk.ticket import Granted, Queued, Refused, Stage
from tests.desk.desk_world import new_desk, new_ticket

ROOM = 100_000


def taught_desk(seconds_per_token: float = 0.01, **settings: Any) -> Desk:
    """A desk over an engine that has read twenty prompts, one after the other."""
    desk = new_desk(ROOM, **settings)
    now = 0.0
    for number in range(20):
        tokens = 50 + 10 * number
        ticket = new_ticket(f"past {number}", prompt_tokens=tokens, arrived_s=now)
        assert isinstance(desk.arrive(ticket, now), Granted)
        now += tokens * seconds_per_token
        desk.progress(ticket.id, 1, now)
        desk.release(ticket.id, Outcome.COMPLETED, now)
    return desk


def test_prompts_that_are_being_read_count_for_those_behind_them() -> None:
    desk = taught_desk()
    for number in range(4):
        ticket = new_ticket(f"a{number}", prompt_tokens=100, arrived_s=50.0)
        assert isinstance(desk.arrive(ticket, 50.0), Granted)
    hasty = new_ticket("hasty", prompt_tokens=100, arrived_s=50.0, first_token_deadline_s=53.5)
    verdict = desk.arrive(hasty, 50.0)
    assert isinstance(verdict, Refused)
    assert verdict.reason is Refusal.DEADLINE_UNREACHABLE
    assert "expected in 5 s" in verdict.message
    desk.progress("a0", 1, 51.0)
    desk.progress("a1", 1, 51.0)
    desk.progress("a2", 1, 51.0)
    assert isinstance(desk.arrive(hasty, 51.0), Granted), "three of the four have been read"
    desk.check()


def test_long_prompts_have_a_share_of_their_own_and_are_not_before_a_short_one() -> None:
    desk = taught_desk(long_request_threshold=1_000)
    long = new_ticket("long", prompt_tokens=5_000, arrived_s=50.0)
    assert isinstance(desk.arrive(long, 50.0), Granted)
    hasty = new_ticket("hasty", prompt_tokens=100, arrived_s=50.0, first_token_deadline_s=53.0)
    assert isinstance(desk.arrive(hasty, 50.0), Granted)


def test_what_has_been_read_of_a_prompt_counts_no_longer() -> None:
    desk = taught_desk()
    desk.arrive(new_ticket("a", prompt_tokens=300, arrived_s=50.0), 50.0)
    for at_s, is_early in ((50.0, True), (52.5, False)):
        hasty = new_ticket(
            "hasty", prompt_tokens=100, arrived_s=at_s, first_token_deadline_s=at_s + 2.0
        )
        assert isinstance(desk.arrive(hasty, at_s), Refused if is_early else Granted)


def test_the_engine_reads_while_a_ticket_waits_so_both_times_are_not_added() -> None:
    """A place is free in about 10 s. Until then the 8 s of reading before it are long over."""
    desk = taught_desk(max_running_requests=2, queue_timeout_s=90.0)
    for number in range(7):
        desk.arrive(new_ticket(f"past {number}", arrived_s=60.0), 60.0)
    for name in ("past 0", "past 1"):
        desk.progress(name, 1, 60.1)
    for number in range(7):  # the line moves every 10 s
        at_s = 70.0 + 10 * number
        for lease in desk.release(f"past {number}", Outcome.COMPLETED, at_s):
            desk.progress(lease.id, 1, at_s + 0.1)
    for name, tokens in (("a", 800), ("b", 10)):
        assert isinstance(
            desk.arrive(new_ticket(name, prompt_tokens=tokens, arrived_s=140.0), 140.0), Granted
        )
    patient, hasty = (
        new_ticket(name, prompt_tokens=100, arrived_s=140.0, first_token_deadline_s=140.0 + wait_s)
        for name, wait_s in (("patient", 15.0), ("hasty", 8.0))
    )
    assert isinstance(desk.arrive(hasty, 140.0), Refused)
    assert isinstance(desk.arrive(patient, 140.0), Queued)


def test_leases_ended_before_their_first_token_teach_that_it_takes_longer() -> None:
    """Each was given up after 3 s: the next ones behind others are refused at the door."""
    desk = taught_desk(seconds_per_token=0.001)
    before = new_ticket("before", prompt_tokens=100, arrived_s=50.0)
    hasty = new_ticket("hasty", prompt_tokens=100, arrived_s=50.0, first_token_deadline_s=53.0)
    desk.arrive(before, 50.0)
    assert isinstance(desk.arrive(hasty, 50.0), Granted)
    for number in range(30):
        desk.arrive(new_ticket(f"slow {number}", prompt_tokens=100, arrived_s=50.0), 50.0)
        desk.cancel(f"slow {number}", Outcome.REQUEST_TIMEOUT, 53.0)
        desk.release(f"slow {number}", Outcome.REQUEST_TIMEOUT, 53.1)
    late = new_ticket("late", prompt_tokens=100, arrived_s=54.0, first_token_deadline_s=57.0)
    assert isinstance(desk.arrive(late, 54.0), Refused)
    desk.check()


def test_a_desk_that_has_learned_slowness_lets_one_try_when_nothing_is_before_it() -> None:
    """Otherwise nobody could show that the engine is fast again, and all were refused for ever."""
    desk = taught_desk(seconds_per_token=0.001)
    for number in range(200):
        desk.arrive(new_ticket(f"slow {number}", prompt_tokens=100, arrived_s=50.0), 50.0)
        desk.cancel(f"slow {number}", Outcome.REQUEST_TIMEOUT, 80.0)
        desk.release(f"slow {number}", Outcome.REQUEST_TIMEOUT, 80.0)
    now, num_granted = 100.0, 0
    for number in range(300):  # the engine is fast again, and two at a time come
        for name in (f"x{number}", f"y{number}"):
            ticket = new_ticket(
                name, prompt_tokens=100, arrived_s=now, first_token_deadline_s=now + 3.0
            )
            num_granted += isinstance(desk.arrive(ticket, now), Granted)
        now += 0.1
        for name in (f"x{number}", f"y{number}"):
            if desk.stage(name) is Stage.GRANTED:
                desk.progress(name, 1, now)
                desk.release(name, Outcome.COMPLETED, now)
        if number == 0:
            assert num_granted == 1, "one tries, the other is told the truth as it is known"
    last = [
        new_ticket(name, prompt_tokens=100, arrived_s=now, first_token_deadline_s=now + 3.0)
        for name in "pq"
    ]
    assert all(isinstance(desk.arrive(ticket, now), Granted) for ticket in last)


def test_a_slow_minute_is_forgotten_within_half_a_fast_one() -> None:
    """Ten times slower for a minute; then two at a time come, and the engine is as it was."""
    desk = taught_desk(seconds_per_token=0.005)
    for number in range(60):
        at_s = 50.0 + number
        desk.arrive(new_ticket(f"slow {number}", prompt_tokens=100, arrived_s=at_s), at_s)
        desk.progress(f"slow {number}", 1, at_s + 5.0)
        desk.release(f"slow {number}", Outcome.COMPLETED, at_s + 5.0)
    now, refused_s = 120.0, []
    for number in range(120):
        names = [f"x{number}", f"y{number}"]
        for name in names:
            ticket = new_ticket(
                name, prompt_tokens=100, arrived_s=now, first_token_deadline_s=now + 3.0
            )
            if isinstance(desk.arrive(ticket, now), Refused):
                refused_s.append(now)
        for name in names:
            if desk.stage(name) is Stage.GRANTED:
                now += 0.5
                desk.progress(name, 1, now)
                desk.release(name, Outcome.COMPLETED, now)
    assert refused_s
    assert refused_s[-1] < 150.0


def test_what_could_not_be_done_at_the_best_speed_is_refused_even_by_an_idle_engine() -> None:
    desk = taught_desk(seconds_per_token=0.01)
    huge = new_ticket("huge", prompt_tokens=3_000, arrived_s=50.0, first_token_deadline_s=53.0)
    assert isinstance(desk.arrive(huge, 50.0), Refused)


def test_a_ticket_that_has_waited_too_long_to_get_its_token_in_time_is_not_begun() -> None:
    """What it would compute were for nobody; it is told so, and the next one begins."""
    desk = taught_desk(seconds_per_token=0.01, max_running_requests=2)
    desk.arrive(new_ticket("a", prompt_tokens=300, arrived_s=50.0), 50.0)
    desk.arrive(new_ticket("b", prompt_tokens=100, arrived_s=50.0), 50.0)
    hasty = new_ticket("hasty", prompt_tokens=100, arrived_s=50.0, first_token_deadline_s=56.0)
    assert isinstance(desk.arrive(hasty, 50.0), Queued)
    assert isinstance(desk.arrive(new_ticket("patient", arrived_s=50.0), 50.0), Queued)
    desk.progress("b", 1, 54.0)
    assert desk.release("b", Outcome.COMPLETED, 55.0) == [], "the line stands before it"
    ticked = desk.tick(55.0)
    [expired] = ticked.expired
    assert (expired.ticket.id, expired.outcome) == ("hasty", Outcome.REFUSED)
    assert expired.reason is Refusal.DEADLINE_UNREACHABLE
    assert expired.retry_after_s >= 1
    assert [lease.id for lease in ticked.granted] == ["patient"]
    assert desk.snapshot().tally.refused == {Refusal.DEADLINE_UNREACHABLE: 1}
    desk.check()


def test_who_would_be_granted_and_not_begun_before_its_wait_is_over_is_not_let_in() -> None:
    """The engine would end it before it has computed anything of it."""
    desk = taught_desk()
    desk.arrive(new_ticket("a", prompt_tokens=500, arrived_s=50.0), 50.0)
    for left_s in (4.0, 6.0):
        ticket = new_ticket("b", prompt_tokens=100, arrived_s=50.0, begin_by_s=50.0 + left_s)
        verdict = desk.arrive(ticket, 50.0)
        if left_s > 5.0:
            assert isinstance(verdict, Granted)
        else:
            assert isinstance(verdict, Refused)
            assert verdict.reason is Refusal.DEADLINE_UNREACHABLE
            assert "would begin in 5 s, after the longest wait is over in 4 s" in verdict.message
    desk.check()


def test_who_has_waited_too_long_to_be_begun_in_time_is_not_granted() -> None:
    desk = taught_desk(max_running_requests=2)
    desk.arrive(new_ticket("a", prompt_tokens=900, arrived_s=50.0), 50.0)
    desk.arrive(new_ticket("b", prompt_tokens=100, arrived_s=50.0), 50.0)
    ticket = new_ticket("c", prompt_tokens=100, arrived_s=50.0, begin_by_s=62.0)
    assert isinstance(desk.arrive(ticket, 50.0), Queued)
    desk.release("b", Outcome.CLIENT_CLOSED, 55.0)
    [expired] = desk.tick(55.0).expired
    assert (expired.ticket.id, expired.reason) == ("c", Refusal.DEADLINE_UNREACHABLE)
    desk.check()


def test_the_line_itself_shows_how_fast_it_moves_where_no_output_has_ended_yet() -> None:
    desk = new_desk(ROOM, max_running_requests=1, request_timeout_s=900.0, queue_timeout_s=900.0)
    desk.arrive(new_ticket("0"), 0.0)
    for number in range(1, 8):
        desk.arrive(new_ticket(str(number)), 0.0)
    for number in range(4):
        at_s = 10.0 * (number + 1)
        desk.progress(str(number), 1, at_s - 5.0)
        desk.release(str(number), Outcome.CLIENT_CLOSED, at_s)
    told = [desk.position(str(number), 40.0) for number in (5, 6, 7)]
    assert [one.eta_s for one in told if one is not None] == [10.0, 20.0, 30.0]


def test_those_refused_for_their_deadline_are_sent_back_one_place_after_the_other() -> None:
    """All told the same time would come back together, and be refused together."""
    desk = taught_desk()
    for number in range(4):
        ticket = new_ticket(f"a{number}", prompt_tokens=100, arrived_s=50.0)
        assert isinstance(desk.arrive(ticket, 50.0), Granted)
    told = []
    for number in range(4):
        hasty = new_ticket(
            f"h{number}", prompt_tokens=100, arrived_s=50.0, first_token_deadline_s=53.0
        )
        verdict = desk.arrive(hasty, 50.0)
        assert isinstance(verdict, Refused)
        told.append(verdict.retry_after_s)
    assert told == sorted(set(told))
    for number in range(4):
        desk.progress(f"a{number}", 1, 51.0 + number)
        desk.release(f"a{number}", Outcome.COMPLETED, 51.0 + number)
        desk.arrive(new_ticket(f"b{number}", arrived_s=51.0 + number), 51.0 + number)
    assert desk.snapshot().tally.retry_after.num == 4, "each place is judged when it is free"


def test_quiet_hours_do_not_lengthen_what_a_refused_one_is_told() -> None:
    desk = new_desk(ROOM, max_running_requests=1, max_waiting_queue=0)
    for number, now in enumerate((0.0, 2.0, 10_000.0)):
        assert isinstance(desk.arrive(new_ticket(f"a{number}", arrived_s=now), now), Granted)
        refused = desk.arrive(new_ticket(f"b{number}", arrived_s=now), now)
        assert isinstance(refused, Refused)
        assert refused.retry_after_s < 10.0
        desk.release(f"a{number}", Outcome.COMPLETED, now + 2.0)
