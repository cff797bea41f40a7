"""The desk in front of the engine: what it says, and what then happens."""

from dataclasses import replace
from random import Random

import pytest

from kvota.core.errors import Outcome, Refusal
from kvota.core.plan import Capacity
from kvota.core.request import Band
from kvota.desk.settings import Admission, DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.desk_door import desk_door
from kvota.sim.executor import StepCost
from kvota.sim.fairness import Fairness
from kvota.sim.node import NodeSettings
from kvota.sim.records import WorldResult
from kvota.sim.workloads import flood, merged
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival

NODE = NodeSettings(
    capacity=Capacity(64, 16, 0),
    cost=StepCost(base=0.01),
    limits=SchedulerLimits(max_num_batched_tokens=256, max_running_requests=16),
)
DESK = DeskSettings(
    max_running_requests=16, max_waiting_queue=8, preemptions_max=0, admission=Admission.RESERVE
)


def ask(at_s: float, **fields: object) -> Arrival:
    plain = {"at_s": at_s, "prompt_tokens": 200, "output_tokens": 100, "max_tokens": 300}
    return Arrival(**(plain | fields))  # type: ignore[arg-type]


def run(arrivals: list[Arrival], desk: DeskSettings = DESK, **fields: object) -> WorldResult:
    settings = WorldSettings(node=NODE, **fields)  # type: ignore[arg-type]
    return World(arrivals, settings, seed=1, door=desk_door(desk)).run()


def test_reserve_lets_no_more_run_than_their_max_tokens_fit() -> None:
    first, second, third = run([ask(0.0), ask(0.0), ask(0.0)]).records
    assert first.queued_s == second.queued_s == 0.0
    assert third.eta_s is None, "nothing is known to expect"
    assert third.latest_s == DESK.request_timeout_s
    assert third.granted_at_s == pytest.approx(first.ended_at_s or 0.0, abs=0.05)
    assert third.outcome is Outcome.COMPLETED


@pytest.mark.parametrize("admission", [Admission.RESERVE, Admission.FORECAST])
def test_on_a_fresh_node_nobody_begins_later_than_it_was_told(admission: Admission) -> None:
    rng = Random(f"fresh {admission}")
    arrivals = [
        ask(0.15 * at, prompt_tokens=rng.randint(20, 200), output_tokens=rng.randint(1, 300))
        for at in range(60)
    ]
    patient = replace(DESK, admission=admission, max_waiting_queue=60, queue_timeout_s=110.0)
    records = run(arrivals, patient, queue_timeout_s=None).records
    told = [one for one in records if one.latest_s is not None and one.granted_at_s is not None]
    assert len(told) > 5
    for one in told:
        assert one.granted_at_s is not None
        assert one.latest_s is not None
        assert one.granted_at_s - one.arrival.at_s <= one.latest_s + 0.05
    later = [one for one in records if one.eta_s is not None]
    assert len(later) > 10, "and then predictions are told"


def test_optimistic_lets_all_run_and_preempts() -> None:
    careless = replace(DESK, admission=Admission.OPTIMISTIC)
    result = run([ask(0.0, output_tokens=290) for _ in range(4)], careless)
    assert all(record.granted_at_s == 0.0 for record in result.records)
    assert result.preempted_share > 0
    assert result.count(Outcome.COMPLETED) == 4


def test_history_lets_the_forecast_run_more_than_reserve() -> None:
    settings = replace(DESK, admission=Admission.FORECAST)
    history = [ask(0.0, output_tokens=20)] * 500
    world = WorldSettings(node=NODE)
    arrivals = [ask(0.0, output_tokens=20) for _ in range(4)]
    informed = World(arrivals, world, seed=1, door=desk_door(settings, history)).run()
    ignorant = World(arrivals, world, seed=1, door=desk_door(settings)).run()
    assert sum(record.granted_at_s == 0.0 for record in informed.records) == 4
    assert sum(record.granted_at_s == 0.0 for record in ignorant.records) == 2


def test_what_can_never_fit_is_refused_before_any_work() -> None:
    [record] = run([ask(0.0, max_tokens=900)]).records
    assert record.refusal is Refusal.KV_BUDGET_EXHAUSTED
    assert record.queued_s is None


def test_a_full_line_says_when_to_come_back() -> None:
    result = run([ask(0.01 * number) for number in range(20)])
    refused = [record for record in result.records if record.outcome is Outcome.REFUSED]
    assert {record.refusal for record in refused} == {Refusal.QUEUE_FULL}
    assert all(1 <= (record.retry_after_s or 0) <= 120 for record in refused)


def test_a_cached_prefix_is_found_when_the_ticket_is_priced() -> None:
    shared = {"prefix": (1, 2, 3), "prefix_block": 64}
    result = run(
        [ask(0.0, **shared), ask(50.0, **shared), ask(50.0, **shared), ask(50.0, **shared)]
    )
    assert [record.cached_tokens for record in result.records] == [0, 192, 192, 192]
    together = [record.granted_at_s for record in result.records[1:]]
    assert together[:2] == [50.0, 50.0]


def test_a_long_request_is_paused_for_a_short_one_and_still_says_everything() -> None:
    desk = replace(
        DESK, long_request_threshold=300, long_request_concurrency=1, long_kv_share=1.0,
        preemptions_max=1, preempt_after_s=0.5, preempt_min_run_s=0.0, max_waiting_queue=8,
    )  # fmt: skip
    long = ask(0.0, prompt_tokens=600, output_tokens=350, max_tokens=400)
    short = ask(1.0, output_tokens=50)
    first, second = run([long, short], desk).records
    assert (first.pauses, first.preemptions) == (1, 1)
    assert first.outcome is second.outcome is Outcome.COMPLETED
    assert first.output_tokens == len(first.token_at_s) == 350
    assert second.granted_at_s is not None
    assert second.granted_at_s < (first.ended_at_s or 0.0)


def two_tenants(loud_rps: float, quiet_rps: float, **fields: object) -> list[Arrival]:
    shape = {"duration_s": 10.0, "prompt": (20, 60), "output": (20, 60), "max_tokens": 64}
    return merged(
        flood(Random(1), tenant="loud", rate_rps=loud_rps, **shape),  # type: ignore[arg-type]
        flood(Random(2), tenant="quiet", rate_rps=quiet_rps, **(shape | fields)),  # type: ignore[arg-type]
    )


def test_a_flood_of_one_tenant_does_not_take_the_others_share() -> None:
    desk = replace(DESK, max_waiting_queue=10_000, queue_timeout_s=100, request_timeout_s=200)
    fairness = Fairness(capacity_tokens=1024, prompt_tokens_max=60)
    settings = WorldSettings(node=NODE, queue_timeout_s=100, request_timeout_s=200, proof_every=500)
    World(
        two_tenants(200.0, 30.0), settings, seed=1, door=desk_door(desk), checkers=[fairness]
    ).run()
    assert 0 < fairness.worst <= fairness.bound


def test_batch_gets_its_floor_under_an_interactive_flood() -> None:
    desk = replace(
        DESK, max_waiting_queue=10_000, batch_floor=0.2, queue_timeout_s=100, request_timeout_s=200
    )
    settings = WorldSettings(node=NODE, queue_timeout_s=100, request_timeout_s=200, proof_every=500)
    arrivals = two_tenants(100.0, 100.0, band=Band.BATCH)
    world = World(arrivals, settings, seed=1, door=desk_door(desk, history=arrivals))
    records = world.run().records
    served = {
        band: sum(
            record.output_tokens
            for record in records
            if record.arrival.band is band and (record.granted_at_s or 1e9) < 10
        )
        for band in Band
    }
    share = served[Band.BATCH] / sum(served.values())
    assert 0.17 < share < 0.25
