"""The real desk, runner and engine with its thread, without HTTP and without a model."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvota.core.clock import ManualClock
from kvota.core.plan import Executor, StepPlan, StepResult
from kvota.core.request import Delta, Ended, Event, Request, SamplingParams
from kvota.desk.desk import Desk
from kvota.desk.forecast import Forecast
from kvota.desk.settings import DeskSettings
from kvota.engine.engine import Engine
from kvota.engine.mailbox import Mailbox
from kvota.kv.cache import KVCache
from kvota.node.comeback import Comeback
from kvota.node.ports import RequestStream
from kvota.node.pricing import ticket_of
from kvota.node.runner import EngineRunner
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Scheduler
from tests.support.engine_world import HASHING_VOCABULARY, NullObserver
from tests.support.kv_executor import HashingExecutor

LOAD_S, DRAIN_TIMEOUT_S = 7.0, 20.0
PATIENCE_S = 60.0  # for what should be immediate, on a machine that is busy


class StepwiseExecutor(HashingExecutor):
    """Computes one step for every `allow`, and waits with the next one."""

    def __init__(self) -> None:
        super().__init__(num_blocks=256, block_size=4)
        self._allowed = threading.Semaphore(0)
        self._num_begun = 0

    @property
    def is_waiting(self) -> bool:
        """True while a step stands before its computation."""
        return self._num_begun > self.num_steps

    def allow(self, num_steps: int = 1) -> None:
        self._allowed.release(num_steps)

    async def do_steps(self, num_steps: int) -> None:
        """Let so many steps pass, and return when the next one stands."""
        last = self._num_begun + num_steps if self.is_waiting else num_steps + self.num_steps + 1
        self.allow(num_steps)
        await until(lambda: self._num_begun >= last)

    def execute(self, plan: StepPlan) -> StepResult:
        self._num_begun += 1
        assert self._allowed.acquire(timeout=PATIENCE_S)
        return super().execute(plan)


class RunnerNode:
    """256 blocks of 4 tokens and eight places, on a clock that only the test moves."""

    def __init__(
        self, executor: Executor, *, max_num_batched_tokens: int = 512, **desk: Any
    ) -> None:
        self.clock = ManualClock(10.0)
        self.crashes: list[BaseException] = []
        mailbox, cache = Mailbox(), KVCache(256, 4)
        limits = SchedulerLimits(
            max_running_requests=8, max_num_batched_tokens=max_num_batched_tokens
        )
        self.scheduler = Scheduler(cache, limits)
        self.desk = Desk(
            256 * 4,
            DeskSettings(max_running_requests=8, **desk),
            Forecast(),
            block_size=4,
        )
        self.runner = EngineRunner(
            self.clock,
            mailbox,
            self.desk,
            lambda request: ticket_of(request, cache),
            num_running_max=8,
            stuck_after_s=5.0,
            report_crash=self.crashes.append,
            comeback=Comeback(self.clock, load_s=LOAD_S, drain_timeout_s=DRAIN_TIMEOUT_S),
        )
        self.engine = Engine(
            executor,
            self.scheduler,
            vocabulary=HASHING_VOCABULARY,
            clock=self.clock,
            mailbox=mailbox,
            publish=self.runner.publish,
            observer=NullObserver(),
        )

    def submit(
        self, name: str, prompt: Sequence[int] = (1, 2, 3), **fields: Any
    ) -> tuple[Request, RequestStream]:
        fields = {"max_tokens": 5, "sampling": SamplingParams(seed=3), **fields}
        request = Request(id=name, prompt=list(prompt), arrived_s=self.clock.now(), **fields)
        return request, self.runner.submit(request)


@asynccontextmanager
async def running(executor: Executor, **settings: Any) -> AsyncIterator[RunnerNode]:
    """A node whose engine thread runs; it is stopped at the end."""
    node = RunnerNode(executor, **settings)
    node.runner.start(node.engine)
    try:
        yield node
    finally:
        await asyncio.wait_for(node.runner.stop(), PATIENCE_S)


async def read(stream: RequestStream) -> list[Event]:
    async with asyncio.timeout(PATIENCE_S):
        return [event async for events in stream for event in events]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the condition is another thread's
            await asyncio.sleep(0.001)


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def ended(events: list[Event]) -> Ended:
    last = events[-1]
    assert isinstance(last, Ended)
    return last
