"""The engine may preempt by itself, and the desk need not know: its books stay true and safe.

A preempted request keeps its lease: it will need that memory again. So what the desk counts as
held is never less than what is held, nothing is charged twice, and each request ends once.
"""

from random import Random

import pytest

from kvota.core.errors import Outcome
from kvota.core.plan import Capacity
from kvota.desk.settings import Admission, DeskSettings
from kvota.kv.cache import KVCache
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.checkers import Checker
from kvota.sim.desk_door import DeskDoor, desk_door
from kvota.sim.executor import StepCost
from kvota.sim.node import NodeSettings
from kvota.sim.workloads import flood
from kvota.sim.world import World, WorldSettings

BLOCK_SIZE, NUM_BLOCKS = 16, 60


class DeskCountsAllThatIsHeld(Checker):
    """After every step: the pool uses no block that the desk does not know of."""

    def __init__(self) -> None:
        self.doors: list[DeskDoor] = []
        self.caches: list[KVCache] = []
        self.num_fuller_books = 0  # steps in which a preempted one holds less than its lease

    def door(self, settings: DeskSettings, cache: KVCache) -> DeskDoor:
        self.caches.append(cache)
        self.doors.append(desk_door(settings)(cache))
        return self.doors[-1]

    def stepped(self, now: float) -> None:
        [door], [cache] = self.doors, self.caches
        known, used = door.desk.snapshot().held_tokens, cache.snapshot().used * BLOCK_SIZE
        assert used <= known, f"at {now:.3f} s {used} tokens are held, {known} are known of"
        self.num_fuller_books += known > used


@pytest.mark.parametrize("seed", range(4))
def test_preemptions_of_the_engine_leave_the_desks_books_true(seed: int) -> None:
    arrivals = list(
        flood(
            Random(seed), tenant="ann", rate_rps=4.0, duration_s=20.0,
            prompt=(20, 200), output=(20, 200), max_tokens=300,
        )
    )  # fmt: skip
    node = NodeSettings(
        capacity=Capacity(NUM_BLOCKS, BLOCK_SIZE, bytes_per_block=0),
        cost=StepCost(base=0.01, per_prefill_token=0.0001),
        limits=SchedulerLimits(max_running_requests=16),
        prefix_cache=False,
    )
    books = DeskCountsAllThatIsHeld()
    desk = DeskSettings(
        admission=Admission.OPTIMISTIC,
        max_running_requests=16,
        preemptions_max=0,
        queue_timeout_s=900.0,
        request_timeout_s=900.0,
    )
    settings = WorldSettings(node=node, queue_timeout_s=None, request_timeout_s=None)
    world = World(
        arrivals, settings, seed=seed, door=lambda cache: books.door(desk, cache), checkers=[books]
    )
    result = world.run()
    assert result.preempted_share > 0.02, "the engine had to preempt"
    assert result.recomputed_tokens > 0
    assert books.num_fuller_books > 0
    assert result.outcomes == {Outcome.COMPLETED.value: len(arrivals)}
    [door] = books.doors
    door.check()
    seen = door.desk.snapshot()
    assert seen.held_tokens == seen.num_choices == 0
    assert seen.tally.pauses == 0
    service = sum(one.prompt_tokens + 2 * one.output_tokens for one in arrivals)
    assert door.desk.service("ann") == service, "what is computed again is not charged again"
