from dataclasses import replace
from random import Random

import pytest

from kvota.core.clock import ManualClock
from kvota.core.plan import Capacity, Chunk, StepPlan
from kvota.sim.executor import StepCost, StepCostExecutor
from kvota.sim.faults import (
    FaultPlan,
    FaultyExecutor,
    InjectedError,
    SlowStep,
    StepError,
    draw_faults,
)

PLAN = StepPlan([Chunk(1, (1,), 0, (0,)), Chunk(2, (1,), 0, (1,))])


def faulty(plan: FaultPlan) -> FaultyExecutor:
    clock = ManualClock()
    executor = StepCostExecutor(Capacity(8, 4, 0), StepCost(base=1.0), clock)
    return FaultyExecutor(executor, clock, plan, Random(1))


def test_a_world_without_faults_has_none() -> None:
    executor = faulty(FaultPlan())
    for _ in range(100):
        executor.execute(PLAN)
    assert executor.num_faults == 0
    assert executor.clock.now() == 100.0


def test_a_failed_step_can_be_repeated_in_parts_and_the_next_one_succeeds() -> None:
    executor = faulty(FaultPlan(error_rate=1.0))
    with pytest.raises(InjectedError, match="the whole step"):
        executor.execute(PLAN)
    for chunk in PLAN.chunks:
        executor.execute(StepPlan([chunk]))
    executor.execute(PLAN)
    with pytest.raises(InjectedError):
        executor.execute(PLAN)


def test_a_part_may_fail_again() -> None:
    executor = faulty(FaultPlan(error_rate=1.0, chunk_error_rate=1.0))
    with pytest.raises(InjectedError):
        executor.execute(PLAN)
    for chunk in PLAN.chunks:
        with pytest.raises(InjectedError, match="one request"):
            executor.execute(StepPlan([chunk]))
    executor.execute(PLAN)
    assert executor.num_faults == 3


def test_a_slow_step_takes_many_times_as_long() -> None:
    executor = faulty(FaultPlan(slow_rate=1.0, slow_factor=10.0))
    executor.execute(PLAN)
    assert executor.clock.now() == pytest.approx(10.0)


def test_plans_come_from_the_seed_and_differ_between_seeds() -> None:
    plans = [draw_faults(Random(seed), 10.0) for seed in range(20)]
    assert plans == [draw_faults(Random(seed), 10.0) for seed in range(20)]
    assert len({replace(plan, leave_after_s=0.0) for plan in plans}) > 10


def test_an_error_of_a_moment_strikes_the_next_step_that_can_fail() -> None:
    executor = faulty(FaultPlan())
    first, second = StepError(1.0), StepError(2.0, share=1.0)
    executor.strike_next(first)
    executor.strike_next(second)
    with pytest.raises(InjectedError, match="the whole step"):
        executor.execute(PLAN)
    for chunk in PLAN.chunks:
        executor.execute(StepPlan([chunk]))
    executor.execute(PLAN)  # no engine is made to give up
    with pytest.raises(InjectedError, match="the whole step"):
        executor.execute(PLAN)
    for chunk in PLAN.chunks:
        with pytest.raises(InjectedError, match="one request"):
            executor.execute(StepPlan([chunk]))
    assert [one.fault for one in executor.struck] == [first, second]
    assert executor.struck[0].effect == "a step of 2 sequences failed"


def test_a_slow_step_of_a_moment_takes_so_much_longer_once() -> None:
    executor = faulty(FaultPlan())
    executor.strike_next(SlowStep(0.5, seconds=2.0))
    executor.execute(PLAN)
    assert executor.clock.now() == 3.0
    executor.execute(PLAN)
    assert executor.clock.now() == 4.0
    assert [(one.at_s, one.effect) for one in executor.struck] == [(3.0, "a step took 2 s longer")]
