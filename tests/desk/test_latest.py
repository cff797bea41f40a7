from random import Random
from typing import Any

import pytest

from kvota.core.errors import Outcome, Refusal
from kvota.core.request import Band
from kvota.desk.ticket import EtaBasis, Queued, Refused, Ticket
from tests.desk.desk_world import DeskWorld, new_desk, new_ticket

READ_S = 0.1  # from a grant to the first token


def fresh_world(capacity_tokens: int = 100, **settings: Any) -> DeskWorld:
    """Nothing has ended yet. One token of every lease takes 0.1 s."""
    return DeskWorld(new_desk(capacity_tokens, **{"queue_timeout_s": 900.0, **settings}))


def large(ticket_id: str, **fields: Any) -> Ticket:
    """It does not fit beside a ticket of 90 tokens of output."""
    return new_ticket(ticket_id, prompt_tokens=60, max_tokens=30, **fields)


def test_the_very_first_to_wait_is_told_the_deadlines_of_those_before_it() -> None:
    world = fresh_world(request_timeout_s=60.0)
    world.arrive(new_ticket("filler", max_tokens=90), 40)
    assert world.arrive(large("a"), 5) == Queued(0, 60.0, EtaBasis.DEADLINES)


def test_once_a_speed_is_known_everybody_counts_as_long_as_max_tokens() -> None:
    world = fresh_world()
    world.arrive(new_ticket("filler", max_tokens=90), 40)
    world.run(11)  # tokens, 0.1 s each
    told = world.arrive(large("a", arrived_s=world.now), 5)
    assert isinstance(told, Queued)
    assert told.basis is EtaBasis.MAX_TOKENS
    assert told.eta_s == pytest.approx(0.1 * (90 - 11))
    later = world.desk.position("a", world.now + 2.0)
    assert later is not None
    assert later.eta_s == pytest.approx(told.eta_s, abs=0.01), "no token came in those 2 s"


def test_places_that_come_back_are_for_those_before() -> None:
    world = fresh_world(1_000, max_running_requests=2)
    for name, max_tokens in (("p", 20), ("q", 50)):
        world.arrive(new_ticket(name, max_tokens=max_tokens), max_tokens)
    world.run(10)
    told = [world.arrive(new_ticket(name, max_tokens=30), 5) for name in "abc"]
    assert all(isinstance(one, Queued) for one in told)
    etas = [one.eta_s for one in told if isinstance(one, Queued)]
    assert etas[:2] == pytest.approx([1.0, 4.0])
    assert etas[2] == pytest.approx(4.0 + 3.0 + READ_S), "after those in line have had a life each"


def test_memory_that_comes_back_must_be_enough() -> None:
    world = fresh_world(100)
    for name, max_tokens in (("p", 20), ("q", 40)):  # 30 and 50 tokens
        world.arrive(new_ticket(name, max_tokens=max_tokens), max_tokens)
    world.run(10)
    told = world.arrive(new_ticket("large", prompt_tokens=50, max_tokens=10), 5)
    assert isinstance(told, Queued)
    assert told.eta_s == pytest.approx(3.0), "20 + 30 tokens are not enough for 60"


def test_the_long_lane_waits_for_long_ones() -> None:
    world = fresh_world(1_000, long_request_threshold=50, long_request_concurrency=1)
    world.arrive(new_ticket("long", prompt_tokens=60, max_tokens=80), 80)
    world.arrive(new_ticket("short", max_tokens=20), 20)
    world.run(10)
    told = world.arrive(new_ticket("x", prompt_tokens=60), 5)
    assert isinstance(told, Queued)
    assert told.eta_s == pytest.approx(7.0)


def test_a_bound_refuses_nobody_and_is_not_judged() -> None:
    world = fresh_world()
    world.arrive(new_ticket("filler", max_tokens=90), 12)
    world.run(10)
    hasty = large("hasty", arrived_s=world.now, deadline_s=world.now + 2.0)
    told = world.arrive(hasty, 5)
    assert isinstance(told, Queued)
    assert told.eta_s > 2.0
    world.drain()
    assert world.outcomes["hasty"] is Outcome.COMPLETED
    assert world.desk.snapshot().tally.wait.num == 0


def test_a_refused_one_is_told_the_latest_too_and_what_it_rests_on() -> None:
    world = fresh_world(max_waiting_queue=1)
    world.arrive(new_ticket("filler", max_tokens=90), 40)
    world.arrive(large("a"), 5)
    blind = world.arrive(large("b"), 5)
    assert isinstance(blind, Refused)
    assert (blind.reason, blind.retry_after_s) == (Refusal.QUEUE_FULL, 5.0)
    assert "a guess" in blind.message
    world.run(10)
    told = world.arrive(large("c", arrived_s=world.now), 5)
    assert isinstance(told, Refused)
    assert told.retry_after_s == pytest.approx(8.0 + 3.0 + READ_S), "b comes back before it"
    assert "the latest" in told.message
    assert "`max_tokens`" in told.message


def test_as_soon_as_outputs_have_ended_the_forecast_speaks() -> None:
    world = DeskWorld(new_desk(history=[10] * 100, queue_timeout_s=900.0))
    for number in range(12):
        world.arrive(new_ticket(f"f{number}", max_tokens=40), 40)
    world.run(3)
    told = world.desk.position("f11", world.now)
    assert told is not None
    assert told.basis is EtaBasis.FORECAST


@pytest.mark.parametrize("seed", range(40))
def test_nobody_waits_longer_than_the_latest_that_was_told(seed: int) -> None:
    rng = Random(seed)
    world = fresh_world(
        rng.randint(120, 400), max_running_requests=rng.randint(1, 8), preemptions_max=0
    )
    told: dict[str, float] = {}
    for number in range(30):
        name, max_tokens = str(number), rng.randint(5, 60)
        ticket = new_ticket(
            name, prompt_tokens=rng.randint(1, 40), max_tokens=max_tokens, arrived_s=world.now
        )
        verdict = world.arrive(ticket, rng.randint(1, max_tokens))
        if isinstance(verdict, Queued) and verdict.basis.is_bound:
            told[name] = world.now + verdict.eta_s
        world.run(rng.choice((0, 0, 0, 1, 3)))
    world.drain()
    assert told, "nobody was told a bound"
    for name, latest_s in told.items():
        assert world.granted_s[name] <= latest_s + world.step_s + 1e-9


def test_more_urgent_ones_in_line_are_counted() -> None:
    world = fresh_world(1_000, max_running_requests=1)
    world.arrive(new_ticket("p", max_tokens=20), 20)
    world.run(10)
    world.arrive(new_ticket("urgent", max_tokens=30), 5)
    told = world.arrive(new_ticket("batch", max_tokens=30, band=Band.BATCH), 5)
    assert isinstance(told, Queued)
    assert told.eta_s == pytest.approx(1.0 + 3.0 + READ_S)
