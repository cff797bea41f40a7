"""Nodes behind the router: what a fleet does that a world alone does not."""

from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import active_children
from random import Random

import pytest

from kvota.core.plan import Capacity
from kvota.desk.settings import DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.crew import Crew, WorkerLost
from kvota.sim.desk_door import desk_door
from kvota.sim.executor import StepCost
from kvota.sim.fleet import Fleet, FleetResult
from kvota.sim.node import NodeSettings
from kvota.sim.records import Targets, quantile
from kvota.sim.shard import NodesPlan
from kvota.sim.workloads import flood
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival

LIMITS = SchedulerLimits(max_running_requests=8, max_num_batched_tokens=512)
DESK = DeskSettings(max_running_requests=8, max_waiting_queue=16)
SETTINGS = WorldSettings(
    node=NodeSettings(
        capacity=Capacity(400, 16, 0), cost=StepCost(base=0.05, per_prefill_token=1e-4),
        limits=LIMITS,
    ),
    proof_every=50,
)  # fmt: skip
TARGETS = Targets(ttft_s=1.0, tpot_s=0.2)


def load(rate_rps: float, duration_s: float = 8.0, output: int = 8) -> list[Arrival]:
    stream = flood(
        Random(7), tenant="a", rate_rps=rate_rps, duration_s=duration_s, prompt=(20, 60),
        output=(output, output), max_tokens=output,
    )  # fmt: skip
    return list(stream)


def served(
    num: int, arrivals: list[Arrival], bad_max: int | None = None, desk: DeskSettings = DESK,
    crew: Crew | None = None,
) -> FleetResult:  # fmt: skip
    plan = NodesPlan(settings=SETTINGS, door=desk_door(desk), seed=1, targets=TARGETS)
    return Fleet(num, plan, crew=crew).run(arrivals, bad_max)


def test_a_fleet_of_one_is_a_world() -> None:
    """But for routing, which waits for nobody: the same node serves the same requests."""
    arrivals = load(8.0)
    world = World(arrivals, SETTINGS, seed=1, door=desk_door(DESK)).run()
    fleet = served(1, arrivals)
    assert fleet.num_good == sum(map(TARGETS.is_met, world.records))
    first = [one.ttft_s for one in world.records if one.ttft_s is not None]
    assert fleet.ttft_p50_s == pytest.approx(quantile(first, 0.5), abs=0.06)
    assert fleet.ttft_p99_s == pytest.approx(quantile(first, 0.99), abs=0.1)


def test_more_replicas_serve_what_one_cannot() -> None:
    arrivals = load(40.0)
    shares = [served(num, arrivals).attainment for num in (1, 2, 3)]
    assert shares[0] < 0.6
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] > 0.9


def test_every_request_ends_once_also_when_nodes_refuse() -> None:
    tight = replace_queue(2)
    result = served(2, load(60.0), desk=tight)
    assert result.num_refused > 20
    assert result.num_good + result.num_refused <= result.num_requests
    again = served(2, load(60.0), desk=tight)
    assert result == again


def replace_queue(num: int) -> DeskSettings:
    return DeskSettings(max_running_requests=8, max_waiting_queue=num)


def test_a_refused_request_finds_another_node() -> None:
    """One place in each line: a burst that no node takes alone is served by trying the next."""
    burst = [replace(one, at_s=0.01 * at) for at, one in enumerate(load(5.0)[:24])]
    result = served(4, burst, desk=replace_queue(1))
    assert result.num_refused == 0


def test_it_stops_when_the_goal_is_out_of_reach() -> None:
    result = served(1, load(60.0), bad_max=5)
    assert result.is_cut
    assert result.num_good < result.num_requests


def test_equal_prefixes_go_where_they_are_cached() -> None:
    """Eight long prompts asked in turn: affinity makes most of each free on its second visit."""
    arrivals = [
        Arrival(at_s=0.6 * at, prompt_tokens=330, output_tokens=2, max_tokens=2,
                prefix=tuple(range(100 * (at % 8), 100 * (at % 8) + 20)), prefix_block=16)
        for at in range(64)
    ]  # fmt: skip
    alone = [replace(one, prefix=()) for one in arrivals]
    assert served(4, arrivals).busy_share < 0.85 * served(4, alone).busy_share


def test_a_backlog_that_only_grows_shows_at_the_end() -> None:
    result = served(1, load(26.0, duration_s=15.0), desk=replace_queue(500))
    assert result.late_attainment < result.attainment


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as found:
        yield found


@pytest.mark.parametrize("num", [1, 3])
def test_where_nodes_live_changes_nothing(crew: Crew, num: int) -> None:
    """Refusals are tried elsewhere, so what happens at one node matters to the others."""
    arrivals, desk = load(45.0), replace_queue(2)
    here, there = served(num, arrivals, desk=desk), served(num, arrivals, desk=desk, crew=crew)
    assert here == there
    assert here.num_refused > 0
    assert served(num, arrivals, bad_max=3, crew=crew).is_cut


def test_what_breaks_in_another_process_is_told_here(crew: Crew) -> None:
    too_large = [replace(one, prompt_tokens=100_000) for one in load(5.0)]
    plan = NodesPlan(settings=SETTINGS, door=None, seed=1, targets=TARGETS)
    with pytest.raises(AssertionError, match="can never fit"):
        Fleet(2, plan, crew=crew).run(too_large)


def test_a_worker_that_dies_ends_the_run() -> None:
    others = active_children()
    with Crew(2) as crew:
        plan = NodesPlan(settings=SETTINGS, door=None, seed=1, targets=TARGETS)
        fleet = Fleet(2, plan, crew=crew)
        for process in active_children():
            if process not in others:
                process.kill()
        with pytest.raises(WorkerLost, match="ended with -9"):
            fleet.run(load(5.0))
