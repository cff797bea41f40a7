"""KV block-seconds, against a slow count of who holds what whenever time passes."""

from collections import defaultdict
from random import Random
from typing import Any

import pytest

from kvota.core.clock import ManualClock
from kvota.core.plan import StepPlan, StepResult
from kvota.core.request import Band, Ended
from kvota.engine.mailbox import Pause, Resume
from kvota.scheduler.scheduler import Scheduler
from tests.support.engine_world import EngineWorld
from tests.support.kv_executor import HashingExecutor, InjectedFailure


class TimedExecutor(HashingExecutor):
    """Each step takes time, and what every request holds in it is written down."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.block_s: defaultdict[str, float] = defaultdict(float)
        self._rng = Random(num_blocks)
        self.clock = ManualClock()
        self.scheduler: Scheduler | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        self.pass_time(self._rng.uniform(0.01, 0.5))
        return super().execute(plan)

    def pass_time(self, seconds: float) -> None:
        assert self.scheduler is not None
        held: dict[str, set[int]] = {}
        for sequence in self.scheduler.running():
            assert sequence.table is not None
            held.setdefault(sequence.group.request.id, set()).update(sequence.table.blocks)
        for request_id, blocks in held.items():
            self.block_s[request_id] += len(blocks) * seconds
        self.clock.advance(seconds)


def timed_world(num_blocks: int, **limits: Any) -> tuple[EngineWorld, TimedExecutor]:
    executor = TimedExecutor(num_blocks, 4)
    world = EngineWorld(executor, **limits)
    executor.clock, executor.scheduler = world.clock, world.scheduler
    return world, executor


def test_one_request_holds_what_its_tokens_need_for_as_long_as_it_runs() -> None:
    """Prompt 6, output 4, blocks of 4: two blocks for three steps, and a third in the last."""
    world, _ = timed_world(16)
    world.submit("a", prompt=range(6), max_tokens=4)
    seconds = []
    while not any(isinstance(event, Ended) for event in world.events["a"]):
        before = world.clock.now()
        world.engine.step()
        seconds.append(world.clock.now() - before)
    assert len(seconds) == 4
    expected = 2 * sum(seconds[:3]) + 3 * seconds[3]
    assert world.ended("a").kv_block_s == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(12))
def test_block_seconds_are_what_was_held_whatever_happens(seed: int) -> None:
    """n > 1, shared prefixes, preemptions, pauses, cancels, failing steps, idle time."""
    rng = Random(seed)
    world, executor = timed_world(14, max_num_batched_tokens=16, max_running_requests=6)
    names: list[str] = []
    paused: list[str] = []
    for turn in range(120):
        if turn < 80 and rng.random() < 0.4:
            names.append(f"r{turn}")
            n = rng.choice((1, 1, 2, 3))
            num_prompt = rng.randint(1, 14)
            world.submit(
                names[-1],
                prompt=range(num_prompt) if rng.random() < 0.5 else [seed + turn] * num_prompt,
                max_tokens=rng.randint(1, (56 - num_prompt) // n - 4),
                n=n,
                band=rng.choice(list(Band)),
            )
        if names and rng.random() < 0.1:
            world.cancel(rng.choice(names))
        if names and rng.random() < 0.1:
            paused.append(rng.choice(names))
            world.mailbox.post(Pause(paused[-1]))
        if paused and rng.random() < 0.3:
            world.mailbox.post(Resume(paused.pop()))
        executor.fail_next = rng.random() < 0.05
        world.engine.step()
        if rng.random() < 0.2:
            executor.pass_time(rng.uniform(0, 1))  # the thread slept
    for name in names:
        world.mailbox.post(Resume(name))
    while world.engine.step() or world.engine.has_work():
        world.scheduler.check()
    assert all(isinstance(error, InjectedFailure) for error in world.observer.failures)
    assert world.scheduler.snapshot().preemptions > 0
    for name in names:
        assert world.ended(name).kv_block_s == pytest.approx(executor.block_s[name]), name
