import pytest

from bench.desk_knowing import KnowingDoors, telling
from kvota.core.errors import Outcome
from kvota.core.plan import Capacity
from kvota.desk.settings import DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.executor import StepCost
from kvota.sim.node import NodeSettings
from kvota.sim.records import WorldResult
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival

# Prompts are read in one step; the longer output is alone when it is at its longest, so the most
# that both hold is 10 + 10 of prompt and 10 of output each.
TOGETHER = [
    Arrival(at_s=0.0, prompt_tokens=10, output_tokens=num, max_tokens=200) for num in (10, 20)
]
PEAK = 40


def served(num_blocks: int) -> WorldResult:
    node = NodeSettings(
        capacity=Capacity(num_blocks, 1, bytes_per_block=0),
        cost=StepCost(base=1.0),
        limits=SchedulerLimits(watermark=0.0),
        prefix_cache=False,
    )
    door = KnowingDoors(DeskSettings())
    return World(telling(TOGETHER), WorldSettings(node=node), seed=1, door=door).run()


@pytest.mark.parametrize(("num_blocks", "num_at_once"), [(PEAK, 2), (PEAK - 1, 1)])
def test_who_knows_lengths_lets_in_exactly_what_fits(num_blocks: int, num_at_once: int) -> None:
    records = served(num_blocks).records
    assert sum(one.granted_at_s == 0.0 for one in records) == num_at_once
    assert all(one.outcome is Outcome.COMPLETED and not one.preemptions for one in records)


def test_outputs_stay_as_long_as_they_are() -> None:
    assert [one.output_tokens for one in served(100).records] == [10, 20]
