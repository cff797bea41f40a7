"""Each checker must be able to fail."""

from collections.abc import Callable

import pytest

from kvota.core.clock import ManualClock
from kvota.core.errors import Outcome
from kvota.core.plan import Capacity, Chunk, StepPlan
from kvota.core.request import Request, SamplingParams
from kvota.kv.cache import KVCache
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Scheduler
from kvota.sim.checkers import BudgetedExecutor, Conservation, NoStarvation, OneEnding
from kvota.sim.door import OpenDoor
from kvota.sim.executor import StepCost, StepCostExecutor
from kvota.sim.fairness import Fairness
from kvota.sim.random_world import WorldBroken, draw_world, run_random_world
from kvota.sim.records import RequestRecord
from kvota.traffic.arrival import Arrival


def record(number: int, tenant: str = "a", at_s: float = 0.0) -> RequestRecord:
    return RequestRecord(
        number,
        Arrival(at_s=at_s, prompt_tokens=10, output_tokens=5, max_tokens=5, tenant=tenant),
    )


@pytest.mark.parametrize(
    ("story", "complaint"),
    [
        (("arrived", "arrived"), "arrived twice"),
        (("arrived", "ended", "ended"), "ended twice"),
        (("arrived", "ended", "granted"), "granted .* after its end"),
        (("arrived", "ended", "produced"), "produced .* after its end"),
        (("arrived", "finished"), "never ended"),
    ],
)
def test_every_way_to_end_wrongly_is_seen(story: tuple[str, ...], complaint: str) -> None:
    checker, one = OneEnding(), record(0)
    one.outcome = Outcome.COMPLETED
    tell: dict[str, Callable[[], None]] = {
        "arrived": lambda: checker.arrived(one, 1.0),
        "granted": lambda: checker.granted(one, 2.0),
        "produced": lambda: checker.produced(one, 1, 3.0),
        "ended": lambda: checker.ended(one, 4.0),
        "finished": lambda: checker.finished(5.0),
    }
    for event in story[:-1]:
        tell[event]()
    with pytest.raises(AssertionError, match=complaint):
        tell[story[-1]]()


def test_a_leaked_block_is_seen_at_once() -> None:
    cache = KVCache(8, 4)
    checker = Conservation(Scheduler(cache, SchedulerLimits()), OpenDoor(4), proof_every=1)
    checker.stepped(0.0)
    cache.reserve(4, None)
    with pytest.raises(AssertionError, match="orphaned"):
        checker.stepped(1.0)


def test_a_sequence_left_over_is_seen_at_the_end() -> None:
    scheduler = Scheduler(KVCache(8, 4), SchedulerLimits())
    scheduler.add(
        Request(id="a", prompt=[1], max_tokens=2, sampling=SamplingParams(), arrived_s=0.0)
    )
    with pytest.raises(AssertionError, match="left in the scheduler"):
        Conservation(scheduler, OpenDoor(4), proof_every=1).finished(1.0)


def test_nobody_may_stay_in_line_or_open_past_the_limit() -> None:
    checker = NoStarvation(queue_timeout_s=5.0, request_timeout_s=20.0)
    one = record(0)
    checker.arrived(one, 0.0)
    for second in range(1, 8):
        checker.stepped(float(second))
    with pytest.raises(AssertionError, match="in line"):
        checker.stepped(8.0)
    checker.granted(one, 8.0)
    for second in range(8, 23):
        checker.stepped(float(second))
    with pytest.raises(AssertionError, match="is open for 23"):
        checker.stepped(23.0)


def test_one_waiting_tenant_may_not_run_away_from_another() -> None:
    checker = Fairness(capacity_tokens=100, prompt_tokens_max=50)
    assert checker.bound == 400
    for number, tenant in enumerate("aabb"):
        checker.arrived(record(number, tenant), 0.0)
    checker.granted(record(0, "a"), 0.0)
    checker.produced(record(0, "a"), 195, 0.0)
    checker.stepped(0.0)
    assert checker.worst == 400
    checker.produced(record(0, "a"), 1, 0.0)
    with pytest.raises(AssertionError, match="402 weighted tokens apart"):
        checker.stepped(0.0)


def test_what_one_tenant_got_alone_is_not_held_against_it() -> None:
    checker = Fairness(capacity_tokens=100, prompt_tokens_max=50)
    checker.arrived(record(0, "a"), 0.0)
    checker.arrived(record(1, "a"), 0.0)
    checker.granted(record(0, "a"), 0.0)
    checker.produced(record(0, "a"), 10_000, 0.0)
    checker.arrived(record(2, "b"), 1.0)
    checker.stepped(1.0)
    assert checker.worst == 0


@pytest.mark.parametrize(
    ("chunks", "complaint"),
    [
        ([Chunk(1, tuple(range(9)), 0, (0, 1, 2))], "a step of 9 tokens"),
        ([Chunk(n, (1,), 0, (n,)) for n in range(3)], "more sequences"),
        ([Chunk(1, (1,), 8, (0, 1))], "a chunk without blocks"),
    ],
)
def test_a_step_over_its_budget_is_not_executed(chunks: list[Chunk], complaint: str) -> None:
    clock = ManualClock()
    limits = SchedulerLimits(max_num_batched_tokens=8, max_running_requests=2)
    executor = BudgetedExecutor(
        StepCostExecutor(Capacity(8, 4, 0), StepCost(base=1.0), clock), limits
    )
    with pytest.raises(AssertionError, match=complaint):
        executor.execute(StepPlan(chunks))
    assert clock.now() == 0


def test_a_broken_world_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(checker: Conservation, now: float) -> None:
        raise AssertionError(f"broken at {now}")

    monkeypatch.setattr(Conservation, "stepped", broken)
    with pytest.raises(WorldBroken, match=r"python -m kvota\.sim\.random_world 17"):
        run_random_world(17)
    monkeypatch.undo()
    assert draw_world(17).run().seed == 17
