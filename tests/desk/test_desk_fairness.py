"""Floods: what the quiet tenant, the batch band and the other lane still get."""

from typing import Any

import pytest

from kvota.core.errors import Outcome
from kvota.core.request import Band
from tests.desk.desk_world import DeskWorld, new_desk, new_ticket

CAPACITY = 400
PROMPT, OUTPUT = 20, 20
VTC_BOUND = 2 * max(1 * PROMPT, 2 * CAPACITY)


def new_world(**settings: Any) -> DeskWorld:
    defaults: dict[str, Any] = {
        "queue_timeout_s": 10_000.0,
        "request_timeout_s": 10_000.0,
        "max_waiting_queue": 10_000,
    }
    return DeskWorld(new_desk(CAPACITY, **(defaults | settings)), checks_arrivals=False)


def flood(world: DeskWorld, name: str, count: int, **fields: Any) -> None:
    for number in range(count):
        ticket = new_ticket(
            f"{name} {number} {world.now:.1f}",
            prompt_tokens=PROMPT,
            max_tokens=OUTPUT,
            arrived_s=world.now,
            **fields,
        )
        world.arrive(ticket, OUTPUT)


@pytest.mark.parametrize("admission", ["forecast", "reserve", "optimistic"])
def test_a_tenant_flooding_ten_times_as_much_gets_no_more_service(admission: str) -> None:
    world = new_world(admission=admission)
    for step in range(300):
        if step % 2 == 0:
            flood(world, "loud", 10, tenant="loud")
            flood(world, "quiet", 1, tenant="quiet")
        world.step()
        gap = world.served["loud"] - world.served["quiet"]
        if world.now > 1.0:  # both have been waiting since the memory was full
            assert abs(gap) <= VTC_BOUND
    assert world.served["quiet"] > 2 * VTC_BOUND, "the bound would hold for two that get nothing"


def test_service_follows_the_weights() -> None:
    world = new_world(tenant_weights={"heavy": 3.0})
    for _ in range(300):
        flood(world, "heavy", 3, tenant="heavy")
        flood(world, "light", 3, tenant="light")
        world.step()
    assert world.served["heavy"] / world.served["light"] == pytest.approx(3.0, rel=0.15)


def test_idling_earns_no_credit() -> None:
    world = new_world()
    for _ in range(100):
        flood(world, "always", 3, tenant="always")
        world.step()
    before = dict(world.served)
    for _ in range(100):
        flood(world, "always", 3, tenant="always")
        flood(world, "back", 3, tenant="back")
        world.step()
    gap = world.served["back"] - (world.served["always"] - before["always"])
    assert abs(gap) <= VTC_BOUND


def test_batch_gets_its_floor_under_an_interactive_flood_and_no_more() -> None:
    world = new_world(batch_floor=0.2, preempt_after_s=10_000.0)
    for _ in range(400):
        flood(world, "chat", 1, tenant="chat")
        flood(world, "batch", 1, tenant="batch", band=Band.BATCH)
        world.step()
    share = world.served["batch"] / sum(world.served.values())
    assert share == pytest.approx(0.2, abs=0.03)


def test_the_floor_counts_what_is_used_and_not_what_was_allowed() -> None:
    """Batch clients leave max_tokens at a large default, and no output has ended by itself yet."""
    world = new_world(batch_floor=0.2, preempt_after_s=10_000.0, admission="optimistic")
    for number in range(300):
        flood(world, "chat", 1, tenant="chat")
        ticket = new_ticket(
            f"batch {number}", prompt_tokens=PROMPT, max_tokens=CAPACITY - PROMPT,
            arrived_s=world.now, tenant="batch", band=Band.BATCH,
        )  # fmt: skip
        world.arrive(ticket, OUTPUT)
        world.step()
    share = world.served["batch"] / sum(world.served.values())
    assert share == pytest.approx(0.2, abs=0.03)


def test_without_batch_waiting_interactive_gets_everything_and_the_reverse() -> None:
    world = new_world(batch_floor=0.2)
    for _ in range(50):
        flood(world, "batch", 2, tenant="batch", band=Band.BATCH)
        world.step()
    assert world.desk.snapshot().held_tokens > 0.7 * CAPACITY


def test_long_tickets_end_under_a_flood_of_short_ones_and_short_ones_keep_their_share() -> None:
    world = new_world(long_request_threshold=100, long_kv_share=0.5)
    for number in range(12):
        ticket = new_ticket(f"long {number}", prompt_tokens=120, max_tokens=40)
        world.arrive(ticket, 40)
    for _ in range(900):
        flood(world, "short", 1, tenant="bob")
        world.step()
    long_ended = [world.outcomes.get(f"long {number}") for number in range(12)]
    assert long_ended == [Outcome.COMPLETED] * 12
    assert world.served["bob"] > 0.4 * sum(world.served.values())
