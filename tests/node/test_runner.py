import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvota.core.errors import InvalidRequest, Outcome, OutputTooLong, Refused
from kvota.core.plan import StepPlan, StepResult
from kvota.core.request import Band
from kvota.desk.ticket import Stage
from kvota.engine.lateness import not_begun
from kvota.node.ports import Phase, RequestStream, RunnerState
from tests.support.kv_executor import HashingExecutor, reference_tokens
from tests.support.runner_node import (
    DRAIN_TIMEOUT_S,
    LOAD_S,
    PATIENCE_S,
    RunnerNode,
    StepwiseExecutor,
    ended,
    read,
    running,
    tokens,
    until,
)


class GatedExecutor(HashingExecutor):
    """Computes a step only while its gate is open, or when `crash` lets it fail for ever."""

    def __init__(self) -> None:
        super().__init__(num_blocks=256, block_size=4)
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, plan: StepPlan) -> StepResult:
        self.gate.wait(timeout=PATIENCE_S)
        return super().execute(plan)


async def test_many_requests_stream_at_once() -> None:
    async with running(GatedExecutor()) as node:
        submitted = [node.submit(f"r{i}", max_tokens=5 + i) for i in range(20)]
        answers = await asyncio.gather(*(read(stream) for _, stream in submitted))
        for (request, _), events in zip(submitted, answers, strict=True):
            assert tokens(events) == reference_tokens(request, 0)
            assert ended(events).outcome is Outcome.COMPLETED
        assert node.runner.num_open == 0


async def test_a_slow_reader_gets_everything_in_longer_lists() -> None:
    async with running(GatedExecutor()) as node:
        request, stream = node.submit("a", max_tokens=50)
        await until(lambda: node.runner.num_open == 0)
        lists = [events async for events in stream]
        assert len(lists) == 1
        assert tokens(lists[0]) == reference_tokens(request, 0)


async def test_a_cancelled_request_ends_and_frees_its_place() -> None:
    executor = GatedExecutor()
    async with running(executor) as node:
        _, stream = node.submit("a", max_tokens=200)
        stream.cancel()
        stream.cancel()
        assert ended(await read(stream)).outcome is Outcome.CLIENT_CLOSED
        assert node.runner.num_open == 0
        assert node.engine.gauges.num_blocks_used == 0


async def test_beyond_its_capacity_it_refuses_with_a_computed_wait() -> None:
    executor = GatedExecutor()
    executor.gate.clear()
    async with running(executor, max_waiting_queue=1) as node:
        _, first = node.submit("a", n=8)
        _, waiting = node.submit("waits")
        with pytest.raises(Refused) as caught:
            node.submit("b")
        assert caught.value.reason == "queue_full"
        assert 1 <= caught.value.retry_after_s <= 120
        executor.gate.set()
        await read(first)
        await read(waiting)
        _, second = node.submit("c")
        assert ended(await read(second)).outcome is Outcome.COMPLETED


async def test_more_choices_than_can_ever_run_are_the_clients_mistake() -> None:
    async with running(GatedExecutor()) as node:
        with pytest.raises(InvalidRequest, match="at most 8 choices"):
            node.submit("a", n=9)
        assert node.runner.num_open == 0


async def test_a_queued_request_knows_its_place_and_runs_when_room_is_made() -> None:
    executor = GatedExecutor()
    executor.gate.clear()
    async with running(executor) as node:
        _, first = node.submit("a", n=8)
        _, second = node.submit("b")
        _, third = node.submit("c")
        assert first.waits() is None
        place = third.waits()
        assert place is not None
        assert place.position == 2
        assert place.why == "all 8 places are taken"
        executor.gate.set()
        answers = [await read(stream) for stream in (first, second, third)]
        assert {ended(events).outcome for events in answers} == {Outcome.COMPLETED}
        node.desk.check()
        assert node.desk.snapshot().held_tokens == 0


async def test_a_request_that_leaves_the_line_never_reaches_the_engine() -> None:
    executor = GatedExecutor()
    executor.gate.clear()
    async with running(executor, max_waiting_queue=1) as node:
        _, first = node.submit("a", n=8)
        _, second = node.submit("b")
        second.cancel()
        assert ended(await read(second)).outcome is Outcome.CLIENT_CLOSED
        _, third = node.submit("c")
        executor.gate.set()
        assert ended(await read(first)).outcome is Outcome.COMPLETED
        assert ended(await read(third)).outcome is Outcome.COMPLETED
        assert executor.num_tokens == (3 + 8 * 4) + (3 - 0 + 4)


async def test_a_request_that_waits_too_long_is_refused_and_never_runs() -> None:
    executor = GatedExecutor()
    executor.gate.clear()
    async with running(executor) as node:
        _, first = node.submit("a", n=8, max_tokens=50)
        _, second = node.submit("b", queue_deadline_s=node.clock.now() + 1)
        node.clock.advance(1.5)
        events = await read(second)
        assert ended(events).outcome is Outcome.QUEUE_TIMEOUT
        error = ended(events).error
        assert isinstance(error, Refused)
        assert error.reason == "queue_timeout"
        assert error.message == not_begun(1.0, retry_after_s=1.0).message
        assert error.retry_after_s >= 1
        executor.gate.set()
        assert ended(await read(first)).outcome is Outcome.COMPLETED


async def test_the_view_tells_the_phase_of_everybody() -> None:
    executor = StepwiseExecutor()
    async with running(executor) as node:
        _, first = node.submit("a", n=8, max_tokens=60)
        _, second = node.submit("b", prompt=[9, 8, 7])
        looking = asyncio.create_task(node.runner.views())
        await asyncio.sleep(0)  # it has asked the engine, which answers between two steps
        executor.allow()
        views = {view.id: view for view in await looking}
        executor.allow(1000)
        assert views["b"].phase is Phase.QUEUED
        assert (views["b"].position, views["b"].kv_blocks) == (1, 0)
        assert views["a"].phase in (Phase.PREFILL, Phase.DECODE)
        assert views["a"].num_choices == 8
        await read(first)
        await read(second)
        assert await node.runner.views() == []


async def test_what_can_never_fit_is_the_clients_to_change() -> None:
    async with running(GatedExecutor()) as node:
        with pytest.raises(OutputTooLong, match="1024; ask for less") as caught:
            node.submit("a", n=8, max_tokens=400)
        assert caught.value.param == "n"
        node.desk.check()


async def test_draining_ends_who_waits_at_the_desk() -> None:
    executor = GatedExecutor()
    executor.gate.clear()
    async with running(executor) as node:
        _, first = node.submit("a", n=8)
        _, second = node.submit("b")
        await until(lambda: node.engine.has_work())
        node.runner.drain()
        told = ended(await read(second))
        assert told.outcome is Outcome.REFUSED
        assert isinstance(told.error, Refused)
        assert told.error.retry_after_s == DRAIN_TIMEOUT_S + LOAD_S
        executor.gate.set()
        assert ended(await read(first)).outcome in (Outcome.COMPLETED, Outcome.REFUSED)


async def test_draining_lets_running_requests_finish_and_refuses_new_ones() -> None:
    executor = GatedExecutor()
    async with running(executor) as node:
        request, stream = node.submit("a", max_tokens=30)
        await until(lambda: executor.num_steps > 0)
        node.runner.drain()
        node.clock.advance(DRAIN_TIMEOUT_S - 5.0)
        with pytest.raises(Refused, match="shutting down") as caught:
            node.submit("b")
        assert caught.value.retry_after_s == 5.0 + LOAD_S
        assert node.runner.state is RunnerState.DRAINING
        assert tokens(await read(stream)) == reference_tokens(request, 0)
        await asyncio.wait_for(node.runner.wait_drained(), PATIENCE_S)


async def test_stopping_ends_what_still_runs_with_an_error() -> None:
    async with running(GatedExecutor()) as node:
        _, stream = node.submit("a", max_tokens=1000)
        stopping = asyncio.create_task(node.runner.stop())
        outcome = ended(await read(stream)).outcome
        assert outcome in (Outcome.SHUTDOWN, Outcome.REFUSED, Outcome.COMPLETED)
        await asyncio.wait_for(stopping, PATIENCE_S)
        assert node.runner.state is RunnerState.DEAD


class BrokenExecutor(HashingExecutor):
    def execute(self, plan: StepPlan) -> StepResult:
        raise MemoryError("no memory at all")


async def test_when_the_engine_dies_every_stream_ends_and_the_process_is_told() -> None:
    async with running(BrokenExecutor(256, 4)) as node:
        streams = [node.submit(f"r{i}")[1] for i in range(6)]
        answers = await asyncio.gather(*(read(stream) for stream in streams))
        assert {ended(events).outcome for events in answers} == {Outcome.ENGINE_ERROR}
        for attempt in range(10):
            if node.runner.state is RunnerState.DEAD:
                break
            await read(node.submit(f"again {attempt}")[1])
        await asyncio.wait_for(node.runner.wait_ended(), PATIENCE_S)
        assert node.runner.has_crashed
        assert len(node.crashes) == 1
        with pytest.raises(Refused) as caught:
            node.submit("late")
        assert (caught.value.reason, caught.value.retry_after_s) == ("engine_restarting", LOAD_S)


@pytest.mark.parametrize("call", ["release", "progress", "tick"])
async def test_a_bug_in_the_desk_ends_every_stream_and_the_process_is_told(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **fields: Any) -> None:
        raise RuntimeError("a bug in the desk")

    executor = StepwiseExecutor()
    async with running(executor) as node:
        streams = [node.submit(f"r{i}", max_tokens=1)[1] for i in range(20)]
        monkeypatch.setattr(node.desk, call, fail)
        executor.allow()
        answers = await asyncio.gather(*(read(stream) for stream in streams))
        await asyncio.wait_for(node.runner.wait_ended(), PATIENCE_S)
        executor.allow(1000)
        assert ended(answers[-1]).outcome is Outcome.ENGINE_ERROR
        assert node.runner.state is RunnerState.DEAD
        assert [str(crash) for crash in node.crashes] == ["a bug in the desk"]
        with pytest.raises(Refused) as caught:
            node.submit("late")
        assert (caught.value.reason, caught.value.retry_after_s) == ("engine_restarting", LOAD_S)


async def test_it_is_stuck_only_when_work_waits_and_nothing_moves() -> None:
    executor = GatedExecutor()
    async with running(executor) as node:
        node.clock.advance(100)
        assert not node.runner.is_stuck(node.clock.now())
        executor.gate.clear()
        _, stream = node.submit("a")
        assert not node.runner.is_stuck(node.clock.now())
        node.clock.advance(6)
        assert node.runner.is_stuck(node.clock.now())
        executor.gate.set()
        await read(stream)
        assert not node.runner.is_stuck(node.clock.now())


@asynccontextmanager
async def one_paused_for_another(
    executor: StepwiseExecutor,
) -> AsyncIterator[tuple[RunnerNode, dict[str, RequestStream]]]:
    """Of eight places: `batch` is paused for `urgent`; `late` would fit, but waits behind it."""
    async with running(executor, preempt_after_s=0.0, preempt_min_run_s=0.0) as node:
        streams = {
            "batch": node.submit("batch", n=6, max_tokens=20, band=Band.BATCH)[1],
            "other": node.submit("other", n=2, max_tokens=20)[1],
        }
        await until(lambda: node.engine.has_work())
        node.clock.advance(1.0)
        streams["urgent"] = node.submit("urgent", n=4, max_tokens=20)[1]
        await until(lambda: node.desk.stage("batch") is Stage.PAUSING)
        streams["late"] = node.submit("late", n=2, max_tokens=20, band=Band.BATCH)[1]
        executor.allow()
        await until(lambda: node.desk.stage("urgent") is Stage.GRANTED)
        assert node.desk.stage("batch") is Stage.PAUSED
        try:
            yield node, streams
        finally:
            executor.allow(1000)


async def test_a_cancelled_paused_request_ends_once_and_holds_nobody_up() -> None:
    executor = StepwiseExecutor()
    async with one_paused_for_another(executor) as (node, streams):
        streams["batch"].cancel()
        streams["batch"].cancel()
        executor.allow(1000)
        assert ended(await read(streams["batch"])).outcome is Outcome.CLIENT_CLOSED
        for name in ("other", "urgent", "late"):
            assert ended(await read(streams[name])).outcome is Outcome.COMPLETED
        node.desk.check()
        assert node.runner.num_open == 0
        assert node.crashes == []
