"""The border between the event loop and the engine's thread.

    event loop                              engine thread
    submit ── Submit ──▶ mailbox ─────────▶ step(): drain, expire, plan, execute, apply
    RequestStream ◀── call_soon_threadsafe ◀── publish(all events of the step)

The engine belongs to its thread; everything else here belongs to the event loop. A hand-over is
one call per step, however many requests it feeds. If the engine dies of a bug, every open stream
ends with an error and `wait_ended` tells the process to exit with a failure.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from kvota.core.clock import Clock
from kvota.core.errors import BackendFailed, InvalidRequest, Outcome, Refusal, Refused
from kvota.core.request import Ended, Event, Request
from kvota.engine.mailbox import Cancel, Drain, Mailbox, Shutdown, Submit
from kvota.node.ports import RequestStream, RunnerState

RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 120.0
_IDLE_WAIT_S = 0.5
_BLOCKED_WAIT_S = 0.005


class Steppable(Protocol):
    """The engine as its thread sees it."""

    def step(self) -> bool:
        """One turn of the loop. False when there was nothing to compute."""

    def has_work(self) -> bool: ...


class EngineRunner:
    """Runs one engine on a thread of its own and streams events to the event loop.

    `capacity` is how many choices may be open at once, running and waiting together; the request
    that would exceed it is refused at the door.
    """

    def __init__(
        self, clock: Clock, mailbox: Mailbox, *, num_running_max: int, capacity: int,
        stuck_after_s: float, report_crash: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self._clock = clock
        self._mailbox = mailbox
        self._num_running_max = num_running_max
        self._capacity = capacity
        self._stuck_after_s = stuck_after_s
        self._report_crash = report_crash
        self._state = RunnerState.STARTING
        self._streams: dict[str, _Stream] = {}
        self._num_open = 0
        self._mean_total_s = 1.0
        self._progress_s = clock.now()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._drained = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def state(self) -> RunnerState:
        return self._state

    @property
    def has_crashed(self) -> bool:
        """True when the engine's thread has died of a bug."""
        return self._ended.is_set()

    @property
    def num_open(self) -> int:
        """Choices accepted and not ended."""
        return self._num_open

    def start(self, engine: Steppable) -> None:
        """Begin to run the engine. Call once, on the event loop that will read the streams."""
        assert self._state is RunnerState.STARTING
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._run, args=(engine,), name="kvota-engine", daemon=True
        )
        self._state = RunnerState.RUNNING
        self._progress_s = self._clock.now()
        self._thread.start()

    def is_stuck(self, now: float) -> bool:
        """True when requests are open and no step has ended for `stuck_after_s`."""
        return bool(self._streams) and now - self._progress_s > self._stuck_after_s

    def submit(self, request: Request) -> RequestStream:
        if self._state is not RunnerState.RUNNING:
            raise self._unavailable()
        if request.n > self._num_running_max:
            raise InvalidRequest(
                f"`n` is {request.n}; this server runs at most {self._num_running_max} choices "
                "at once.",
                param="n",
            )
        if self._num_open + request.n > self._capacity:
            raise Refused(
                Refusal.QUEUE_FULL,
                f"The line is full: {self._num_open} choices are running or waiting and at most "
                f"{self._capacity} may be.",
                retry_after_s=self._retry_after_s(),
            )
        if not self._streams:
            self._progress_s = self._clock.now()
        stream = _Stream(request, self._mailbox)
        assert request.id not in self._streams
        self._streams[request.id] = stream
        self._num_open += request.n
        self._mailbox.post(Submit(request))
        return stream

    def drain(self) -> None:
        """Refuse new requests and those that never ran; let the running ones finish."""
        if self._state is RunnerState.RUNNING:
            self._state = RunnerState.DRAINING
            self._mailbox.post(Drain())
            self._settle()

    async def wait_drained(self) -> None:
        """Return when no request is open any more after `drain`, or the engine is dead."""
        await self._drained.wait()

    async def wait_ended(self) -> None:
        """Return when the engine's thread has died of a bug. Never returns otherwise."""
        await self._ended.wait()

    async def stop(self) -> None:
        """End what still runs, with an error for its clients, then the thread."""
        if self._thread is None or self._state is RunnerState.DEAD:
            return
        self._state = RunnerState.DRAINING
        self._mailbox.post(Shutdown())
        self._settle()
        await self._drained.wait()
        self._stopping = True
        self._mailbox.post(Shutdown())
        await asyncio.to_thread(self._thread.join)
        self._state = RunnerState.DEAD

    def publish(self, events: Sequence[tuple[str, Event]]) -> None:
        """Take the events of one step from the engine. Called on the engine's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, events)

    def _run(self, engine: Steppable) -> None:
        """The engine's thread."""
        try:
            while not self._stopping:
                if engine.step():
                    self._progress_s = self._clock.now()
                else:
                    self._mailbox.wait(_BLOCKED_WAIT_S if engine.has_work() else _IDLE_WAIT_S)
        except BaseException as crash:  # the boundary: a bug ends the process, loudly, below
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._die, crash)

    def _deliver(self, events: Sequence[tuple[str, Event]]) -> None:
        for request_id, event in events:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            stream.push(event)
            if isinstance(event, Ended):
                self._forget(stream, event)
        self._settle()

    def _forget(self, stream: "_Stream", event: Ended) -> None:
        del self._streams[stream.request.id]
        self._num_open -= stream.request.n
        if event.outcome is Outcome.COMPLETED:
            self._mean_total_s += 0.1 * (event.total_s - event.queued_s - self._mean_total_s)

    def _die(self, crash: BaseException) -> None:
        self._state = RunnerState.DEAD
        error = BackendFailed("The engine has failed and is being ended; the answer is lost.")
        for stream in list(self._streams.values()):
            stream.push(_ended_by_crash(stream.request, error, self._clock.now()))
        self._streams.clear()
        self._num_open = 0
        self._report_crash(crash)
        self._drained.set()
        self._ended.set()

    def _settle(self) -> None:
        if self._state is RunnerState.DRAINING and not self._streams:
            self._drained.set()

    def _unavailable(self) -> Refused:
        if self._state is RunnerState.DRAINING:
            return Refused(
                Refusal.DRAINING,
                "The server is shutting down and takes no new requests.",
                retry_after_s=self._retry_after_s(),
            )
        return Refused(Refusal.ENGINE_RESTARTING, "The engine is not running.", retry_after_s=5.0)

    def _retry_after_s(self) -> float:
        """When the line should have moved: open choices, in rounds of what runs at once."""
        rounds = self._num_open / self._num_running_max
        return min(max(rounds * self._mean_total_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)


class _Stream:
    """The events of one request, waiting to be read on the event loop."""

    def __init__(self, request: Request, mailbox: Mailbox) -> None:
        self.request = request
        self._mailbox = mailbox
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._is_complete = False
        self._is_cancelled = False

    def push(self, event: Event) -> None:
        self._events.append(event)
        self._is_complete = isinstance(event, Ended)
        self._arrived.set()

    def cancel(self) -> None:
        if not self._is_cancelled and not self._is_complete:
            self._is_cancelled = True
            self._mailbox.post(Cancel(self.request.id))

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        while self._events or not self._is_complete:
            await self._arrived.wait()
            self._arrived.clear()
            events, self._events = self._events, []
            if events:
                yield events


def _ended_by_crash(request: Request, error: BackendFailed, now: float) -> Ended:
    return Ended(
        outcome=Outcome.ENGINE_ERROR,
        error=error,
        prompt_tokens=len(request.prompt),
        cached_tokens=0,
        output_tokens=0,
        num_preemptions=0,
        queued_s=now - request.arrived_s,
        first_token_s=None,
        total_s=now - request.arrived_s,
    )
