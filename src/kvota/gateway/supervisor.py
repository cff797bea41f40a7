"""Keeps one engine process running: starts it, looks at it, ends it, starts it again.

    life.order(now) ──▶ start · terminate · kill        what to do is decided in node_life.py
    readiness, exit, probe, weight ──▶ life              what is seen is told there

The process is a child in a session of its own, so that a Ctrl-C reaches the gateway alone and
things end in order. It is on a leash (`edge/leash.py`), so that neither it nor what it has started
outlives a gateway that was killed; our node also reads the same pipe (`edge/supervision.py`).
"""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import psutil

from kvota.core.clock import Clock
from kvota.core.errors import Refusal, Refused
from kvota.edge.leash import leashed
from kvota.edge.supervision import NodeReady, read_ready
from kvota.gateway.node_life import Bounds, NodeLife, Order, Probe, Reason, State
from kvota.telemetry.log import Log

PROBE_EVERY_S: Final = 1.0
TICK_S: Final = 0.25
KILLED_POLL_S: Final = 0.01
STDERR: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What to start, and how to look at it.

    `announces`: it says on standard output when it serves (our node does). Otherwise it serves as
    soon as a probe is fine, and what it writes there (vLLM: its log) goes to our standard error.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    probe: Callable[[], Awaitable[Probe]]
    announces: bool = True


class NeverServed(Exception):
    """The first start has failed. `status` as subprocess gives it: negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the engine process ended with status {status} before it served")
        self.status = status


class Supervisor:
    """One per engine process. `start`, then run `watch` beside everything else, then `stop`.

    `growth_bytes_max`: how much more memory than its bill the process may take; None: any.
    `on_down` hears of every end of a process, once one has served.
    """

    def __init__(
        self,
        child: Child,
        bounds: Bounds,
        clock: Clock,
        log: Log,
        *,
        growth_bytes_max: int | None = None,
        on_down: Callable[[Reason], None] = lambda _: None,
    ) -> None:
        self._child = child
        self._clock = clock
        self._log = log
        self._growth_bytes_max = growth_bytes_max
        self._on_down = on_down
        self._life = NodeLife(bounds, clock.now())
        self._process: Process | None = None
        self._status = 0  # of the latest process that has ended
        self._beside: list[asyncio.Task[None]] = []  # reading from and waiting for the process
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._probe_due_s = 0.0
        self.ready: NodeReady | None = None  # what the process said of itself, last time

    @property
    def state(self) -> State:
        return self._life.state

    @property
    def num_starts(self) -> int:
        return self._life.num_starts

    @property
    def load_s(self) -> float | None:
        return self._life.load_s

    @property
    def resident_bytes(self) -> int:
        return self._life.resident_bytes

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_up(self) -> bool:
        return self._life.is_up

    def refusal(self) -> Refused:
        """What clients are told while it does not serve, with when it is expected to."""
        return Refused(
            Refusal.ENGINE_RESTARTING,
            "The engine is being restarted.",
            retry_after_s=self._life.retry_after_s(self._clock.now()),
        )

    async def start(self) -> None:
        """Start it and wait until it serves. Raises NeverServed when it ends before."""
        await self._spawn()
        while not self._life.is_up:
            await self._see()
            if self._life.state is State.DOWN:
                raise NeverServed(self._status)

    async def watch(self) -> None:
        """Keep it running until cancelled."""
        while self._life.state is not State.STOPPED:
            await self._step()

    async def stop(self) -> None:
        """Let it drain, and return when it is gone. Cancel `watch` before."""
        order = self._life.stop(self._clock.now())
        if order is not None:
            await self._obey(order)
        while self._life.state is not State.STOPPED:
            await self._step()
        tasks = [*self._beside, *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """End it on the spot, for a gateway that cannot wait."""
        self._signal(signal.SIGKILL)

    # --- one look, one decision

    async def _step(self) -> None:
        await self._see()
        order = self._life.order(self._clock.now())
        if order is not None:
            await self._obey(order)

    async def _see(self) -> None:
        """Wait until something has changed, or it is time to look."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):  # wait_for could lose a cancellation here
                await self._changed.wait()
        self._changed.clear()
        self._notice_exit()
        self._look()

    async def _obey(self, order: Order) -> None:
        life, now = self._life, self._clock.now()
        if order is Order.START:
            await self._spawn()
            return
        say = self._log.info if life.why is Reason.STOPPED else self._log.warning
        say("engine is ended", how=order.value, why=life.why.value, pid=self.pid)
        if order is Order.TERMINATE:
            life.terminated(now)
            self._signal(signal.SIGTERM)
        else:
            self._signal(signal.SIGKILL)
            # Not `wait`: it waits for all that hold the pipes too, such as workers left behind.
            while self._process is not None and self._process.returncode is None:  # noqa: ASYNC110
                await asyncio.sleep(KILLED_POLL_S)
            self._notice_exit()

    async def _spawn(self) -> None:
        try:
            self._process = await self._started()
        except OSError as error:  # no memory, or too many files or processes: it may pass
            self._log.error("engine cannot be started", why=error.strerror)
            self._status = 1
            self._life.started(self._clock.now())
            self._life.exited(self._clock.now())
            return
        self._life.started(self._clock.now())
        self._probe_due_s = self._clock.now() + PROBE_EVERY_S
        self._beside = [
            asyncio.create_task(self._hear(self._process)),
            asyncio.create_task(self._wait(self._process)),
        ]

    async def _started(self) -> Process:
        child = self._child
        return await asyncio.create_subprocess_exec(
            *leashed(child.command),
            stdin=PIPE,
            stdout=PIPE if child.announces else STDERR,
            env=dict(child.environment),
            start_new_session=True,
        )

    async def _hear(self, process: Process) -> None:
        """Wait until it says that it serves, and empty the pipe for ever after."""
        if process.stdout is None:
            return
        while line := await _next_line(process.stdout):
            ready = read_ready(line)
            if ready is not None and process is self._process:
                self.ready = ready
                self._is_serving()

    async def _wait(self, process: Process) -> None:
        await process.wait()
        self._changed.set()

    def _is_serving(self) -> None:
        life = self._life
        if life.state is not State.STARTING:
            return
        life.ready(self._clock.now())
        if self.ready is not None and self._growth_bytes_max is not None:
            limit = self.ready.planned_bytes + self._growth_bytes_max
            life.bounds = replace(life.bounds, resident_bytes_max=limit)
        self._log.info("engine serves", pid=self.pid, load_s=round(life.load_s or 0.0, 2))
        self._changed.set()

    def _notice_exit(self) -> None:
        process = self._process
        if process is None or process.returncode is None:
            return
        _end_group(process.pid)
        life, self._process, self._status = self._life, None, process.returncode
        has_served, was_ordered = self.load_s is not None, life.state is State.ENDING
        life.exited(self._clock.now())
        if has_served:  # else whoever started it says what there is to say
            say = self._log.info if was_ordered else self._log.error
            say("engine has ended", status=self._status, pid=process.pid, why=life.why.value)
            self._on_down(life.why)

    def _look(self) -> None:
        """Begin to probe and weigh it, when that is due and the last look is over."""
        life, now = self._life, self._clock.now()
        is_watched = life.is_up or (life.state is State.STARTING and not self._child.announces)
        is_looking = self._looking is not None and not self._looking.done()
        if is_watched and not is_looking and now >= self._probe_due_s and self._process:
            self._probe_due_s = now + PROBE_EVERY_S
            self._looking = asyncio.create_task(self._look_at(self._process))

    async def _look_at(self, process: Process) -> None:
        seen = await self._child.probe()
        life = self._life
        if process is not self._process:
            return  # a look at one that is gone
        if life.state is State.STARTING and seen is Probe.FINE:
            self._is_serving()
        life.probed(seen, self._clock.now())
        with contextlib.suppress(psutil.Error):
            life.weighed(int(psutil.Process(process.pid).memory_info().rss))

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


async def _next_line(output: asyncio.StreamReader) -> bytes:
    """Empty at the end. What is too long for the reader's buffer is passed over."""
    while True:
        with contextlib.suppress(ValueError):
            return await output.readline()


def _end_group(pid: int) -> None:
    """End what the process has started and left behind: vLLM's workers hold the GPU's memory."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
