from dataclasses import replace

import pytest

from kvota.core.errors import Outcome, Refusal
from kvota.core.plan import Capacity
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.door import OpenDoor
from kvota.sim.executor import StepCost
from kvota.sim.faults import FaultPlan, Jump, Storm
from kvota.sim.node import NodeSettings
from kvota.sim.random_world import draw_world
from kvota.sim.records import RequestRecord, Targets, WorldResult
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival

NODE = NodeSettings(
    capacity=Capacity(64, 16, 0),
    cost=StepCost(base=1.0),
    limits=SchedulerLimits(max_num_batched_tokens=64, max_running_requests=4),
)
SECOND_A_STEP = WorldSettings(node=NODE, queue_timeout_s=None, request_timeout_s=None)


def ask(at_s: float, output: int = 5, prompt: int = 32, **fields: object) -> Arrival:
    plain = {
        "at_s": at_s, "prompt_tokens": prompt, "output_tokens": output, "max_tokens": 100,
    }  # fmt: skip
    return Arrival(**(plain | fields))  # type: ignore[arg-type]


def run(arrivals: list[Arrival], settings: WorldSettings = SECOND_A_STEP) -> WorldResult:
    return World(arrivals, settings, seed=1).run()


def test_one_request_alone_takes_one_step_per_token() -> None:
    [record] = run([ask(2.5)]).records
    assert record.outcome is Outcome.COMPLETED
    assert record.token_at_s == [3.5, 4.5, 5.5, 6.5, 7.5]
    assert (record.queued_s, record.ttft_s, record.tpot_s) == (0.0, 1.0, 1.0)
    assert record.output_tokens == 5


def test_who_arrives_during_a_step_waits_for_its_end() -> None:
    first, second = run([ask(0.0), ask(0.25)]).records
    assert first.token_at_s[0] == 1.0
    assert second.queued_s == pytest.approx(0.75)
    assert second.ttft_s == pytest.approx(1.75)


def test_every_choice_is_as_long_as_the_trace_says() -> None:
    [record] = run([ask(0.0, output=7, n=3)]).records
    assert record.output_tokens == 21
    assert len(record.token_at_s) == 7


def test_a_shared_prefix_is_really_shared() -> None:
    prompt = {"prompt": 64, "prefix": (1, 2), "prefix_block": 32}
    records = run([ask(0.0, **prompt), ask(100.0, **prompt), ask(200.0, prompt=64)]).records  # type: ignore[arg-type]
    assert [record.cached_tokens for record in records] == [0, 48, 0]


def test_preemption_changes_when_but_not_what() -> None:
    small = replace(NODE, capacity=Capacity(8, 16, 0), prefix_cache=False)
    tight = replace(SECOND_A_STEP, node=small)
    records = run([ask(0.0, output=60, max_tokens=60) for _ in range(2)], tight).records
    assert [record.output_tokens for record in records] == [60, 60]
    assert sum(record.preemptions for record in records) > 0


def test_a_client_that_leaves_frees_its_memory_and_ends_once() -> None:
    gone = replace(SECOND_A_STEP, faults=FaultPlan(leave_rate=1.0, leave_after_s=2.0))
    [record] = run([ask(0.0, output=50)], gone).records
    assert record.outcome is Outcome.CLIENT_CLOSED
    assert record.output_tokens <= 3


def test_deadlines_end_requests_in_line_and_running() -> None:
    limits = SchedulerLimits(max_num_batched_tokens=64, max_running_requests=1)
    impatient = WorldSettings(
        node=replace(NODE, limits=limits), queue_timeout_s=3.0, request_timeout_s=10.0
    )
    running, waiting = run([ask(0.0, output=50), ask(0.1)], impatient).records
    assert running.outcome is Outcome.REQUEST_TIMEOUT
    assert running.ended_at_s == pytest.approx(10.0, abs=1.0)
    assert waiting.outcome is Outcome.QUEUE_TIMEOUT
    assert waiting.ended_at_s == pytest.approx(3.1, abs=2.0)  # a step runs to its end


def test_a_clock_jump_is_time_that_passed() -> None:
    asleep = replace(SECOND_A_STEP, faults=FaultPlan(jumps=(Jump(2.5, 1000.0),)))
    [record] = run([ask(0.0)], asleep).records
    assert record.outcome is Outcome.COMPLETED
    assert record.ended_at_s == pytest.approx(1005.0, abs=1.0)


def test_a_storm_takes_its_share_of_the_open_requests() -> None:
    stormy = replace(SECOND_A_STEP, faults=FaultPlan(storms=(Storm(2.5, 0.5),)))
    result = run([ask(0.0, output=9) for _ in range(4)], stormy)
    assert result.outcomes == {"client_closed": 2, "completed": 2}


def test_a_full_house_is_refused_at_the_door() -> None:
    arrivals = [ask(0.0), ask(0.0), ask(0.0), ask(50.0)]
    door = OpenDoor(num_open_max=2, retry_after_s=7.0)
    result = World(arrivals, SECOND_A_STEP, seed=1, door=lambda _: door).run()
    assert [record.refusal for record in result.records] == [None, None, Refusal.QUEUE_FULL, None]
    assert result.records[2].retry_after_s == 7.0


def test_goodput_counts_what_met_its_targets_per_second_of_arrivals() -> None:
    result = run([ask(0.0), ask(10.0), ask(20.0, output=1), ask(20.0, prompt=640)])
    assert result.goodput_rps(Targets(ttft_s=2.0, tpot_s=1.0).is_met) == pytest.approx(3 / 20)
    assert result.goodput_rps(Targets(ttft_s=2.0, tpot_s=0.5).is_met) == pytest.approx(1 / 20)


def test_used_memory_is_averaged_over_time() -> None:
    result = run([ask(0.0, output=16, prompt=16), ask(100.0, output=1)])
    used = result.kv_used_mean * 100
    assert used == pytest.approx(16 * 2 / 64, rel=0.2)  # two blocks of 64 for sixteen seconds


@pytest.mark.parametrize("seed", range(10))
def test_equal_seeds_are_equal_worlds_to_the_last_number(seed: int) -> None:
    assert draw_world(seed).run().key == draw_world(seed).run().key


def test_the_longest_tenth_of_gaps_shows_a_stall() -> None:
    record = RequestRecord(0, ask(0.0))
    record.token_at_s = [float(second) for second in range(10)] + [19.0]
    assert record.tpot_s == pytest.approx(1.9)
    assert record.slowest_gaps_s == 10.0


def test_a_refused_client_comes_back_and_its_wait_counts_from_the_first_time() -> None:
    settings = replace(SECOND_A_STEP, returns_max=2)
    asked = [ask(0.0, output=7), ask(0.5, output=7)]
    first, refused, returned = World(
        asked, settings, seed=1, door=lambda _: OpenDoor(1, retry_after_s=10.0)
    ).run().records  # fmt: skip
    assert refused.outcome is Outcome.REFUSED
    assert (returned.attempt, returned.arrival.at_s) == (1, 10.5)
    assert returned.outcome is first.outcome is Outcome.COMPLETED
    assert returned.ttft_s == pytest.approx(11.0)


def test_a_client_gives_up_after_so_many_returns() -> None:
    settings = replace(SECOND_A_STEP, returns_max=2)
    asked = [ask(0.0, output=90), ask(0.5)]
    result = World(asked, settings, seed=1, door=lambda _: OpenDoor(1, retry_after_s=10.0)).run()
    assert [record.attempt for record in result.records] == [0, 0, 1, 2]
    assert result.count(Outcome.REFUSED) == 3
