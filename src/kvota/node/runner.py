"""From an HTTP request to the engine and back, past the desk.

    submit ─▶ desk ─┬─ Granted ─▶ engine ─▶ events ─▶ stream
                    ├─ Queued ──▶ (a release, or time, grants it) ─▶ engine …
                    └─ Refused    raised, with the time to come back

Everything here runs on the event loop. The desk decides, the engine computes, and this is where
the decisions of one become letters to the other:

    granted          Submit, or Resume for a request that was paused
    overdue          Cancel, with the outcome that its deadline means
    pause            Pause; the engine's Paused event is the desk's `paused`
    the engine's end release, which may grant others

A request ends exactly once: in line, here; in the engine, by its `Ended`. If the engine or the desk
dies of a bug, every open stream ends with an error and `wait_ended` tells the process to exit with
a failure.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from kvota.core.clock import Clock
from kvota.core.errors import (
    BackendFailed,
    ClientClosed,
    InvalidRequest,
    KvotaError,
    Outcome,
    OutputTooLong,
    Refusal,
    Refused,
)
from kvota.core.request import Delta, Ended, EngineEvent, Event, Paused, Request
from kvota.desk.desk import Desk
from kvota.desk.settings import DeskSettings
from kvota.desk.ticket import Expired, Granted, Lease, Overdue, Stage, Ticked, Ticket
from kvota.desk.ticket import Refused as DeskRefused
from kvota.desk.waiting import why_waiting
from kvota.engine.lateness import no_first_token, not_begun, not_complete
from kvota.engine.mailbox import (
    Cancel,
    Drain,
    Look,
    Mailbox,
    Pause,
    RequestState,
    Resume,
    Shutdown,
    Submit,
)
from kvota.node.comeback import Comeback
from kvota.node.engine_thread import EngineThread, Events, Steppable
from kvota.node.ports import RequestStream, RequestView, RunnerState, Waiting
from kvota.node.where import view_of

TICK_S = 0.05
LOOK_TIMEOUT_S = 2.0

Price = Callable[[Request], Ticket]


class EngineRunner:
    """Implements `ports.Runner` for one engine and the desk in front of it.

    `price` makes the ticket of a request. `num_running_max` is the desk's limit of choices.
    `comeback` says when to come back to a runner that takes no work.
    """

    def __init__(
        self,
        clock: Clock,
        mailbox: Mailbox,
        desk: Desk,
        price: Price,
        *,
        num_running_max: int,
        stuck_after_s: float,
        report_crash: Callable[[BaseException], None],
        comeback: Comeback,
        model: str = "",
    ) -> None:
        self._clock = clock
        self._desk = desk
        self._price = price
        self._num_running_max = num_running_max
        self._stuck_after_s = stuck_after_s
        self._report_crash = report_crash
        self._comeback = comeback
        self._model = model
        self._engine = EngineThread(clock, mailbox, deliver=self._deliver, on_death=self._die)
        self._state = RunnerState.STARTING
        self._streams: dict[str, _Stream] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._died = asyncio.Event()

    # --- life ---------------------------------------------------------------------------------

    @property
    def state(self) -> RunnerState:
        return self._state

    @property
    def has_crashed(self) -> bool:
        """True when the engine or the desk has died of a bug."""
        return self._died.is_set()

    @property
    def num_open(self) -> int:
        """Choices of requests that were accepted and have not ended."""
        return sum(stream.request.n for stream in self._streams.values())

    def start(self, engine: Steppable) -> None:
        """Begin to run the engine. Call once, on the event loop that will read the streams."""
        assert self._state is RunnerState.STARTING
        self._state = RunnerState.RUNNING
        self._engine.start(engine)
        self._ticking = asyncio.create_task(self._tick_for_ever())

    def publish(self, events: Events) -> None:
        """Take the events of one step from the engine. Called on the engine's thread."""
        self._engine.publish(events)

    def is_stuck(self, now: float) -> bool:
        """True when requests are open and no step has ended for `stuck_after_s`."""
        return bool(self._streams) and self._engine.stalled_s(now) > self._stuck_after_s

    def stalled_s(self, now: float) -> float:
        """Seconds since a step ended, or since there was anything to do."""
        return self._engine.stalled_s(now)

    def drain(self) -> None:
        """Refuse new requests and those that wait; let the running ones finish."""
        if self._state is not RunnerState.RUNNING:
            return
        self._state = RunnerState.DRAINING
        self._comeback.drain_begins()
        refusal = self._comeback.refusal(self._state)
        for stream in list(self._streams.values()):
            if not stream.is_submitted:
                self._end_in_line(stream, Outcome.REFUSED, refusal)
        self._engine.post(Drain(refusal))
        self._settle()

    async def wait_drained(self) -> None:
        """Return when no request is open any more after `drain`, or the engine is dead."""
        await self._drained.wait()

    async def wait_ended(self) -> None:
        """Return when the engine or the desk has died of a bug. Never returns otherwise."""
        await self._died.wait()

    async def stop(self) -> None:
        """End what still runs, with an error for its clients, then the thread."""
        if self._state in (RunnerState.STARTING, RunnerState.DEAD):
            return
        self.drain()
        self._engine.post(Shutdown())
        await self._drained.wait()
        if self._ticking is not None:
            self._ticking.cancel()
        await self._engine.join()
        self._state = RunnerState.DEAD

    # --- requests -----------------------------------------------------------------------------

    def submit(self, request: Request) -> RequestStream:
        if self._state is not RunnerState.RUNNING:
            raise self._comeback.refusal(self._state)
        if request.n > self._num_running_max:
            raise InvalidRequest(
                f"`n` is {request.n}; this server runs at most {self._num_running_max} choices "
                "at once.",
                param="n",
            )
        assert request.id not in self._streams
        verdict = self._desk.arrive(self._price(request), self._clock.now())
        if isinstance(verdict, DeskRefused):
            raise _refusal(verdict)
        if not self._streams:
            self._engine.note_progress()
        stream = self._streams[request.id] = _Stream(request, self)
        if isinstance(verdict, Granted):
            self._start(verdict.lease)
        return stream

    def reconfigure(self, settings: DeskSettings) -> None:
        """Let the desk go by other limits, and start whatever they let in. Raises ConfigError."""
        self._start_all(self._desk.reconfigure(settings, self._now))

    def cancel(self, request_id: str) -> bool:
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        gone = ClientClosed("The request was cancelled.")
        if stream.is_submitted:
            granted = self._desk.cancel(request_id, Outcome.CLIENT_CLOSED, self._now)
            stream.is_released = self._desk.stage(request_id) is Stage.CLOSED  # it was paused
            self._engine.post(Cancel(request_id))
            self._start_all(granted)
        else:
            self._end_in_line(stream, Outcome.CLIENT_CLOSED, gone)
        return True

    def waits(self, request_id: str) -> Waiting | None:
        """Where a request stands in line; None when it does not wait."""
        place = self._desk.position(request_id, self._clock.now())
        if place is None:
            return None
        return Waiting(
            place.position + 1,
            place.eta_s,
            why_waiting(self._desk, request_id, self._desk.snapshot()),
            place.basis.latest_by,
        )

    async def views(self) -> Sequence[RequestView]:
        loop = asyncio.get_running_loop()
        seen: asyncio.Future[Sequence[RequestState]] = loop.create_future()

        def tell(states: Sequence[RequestState]) -> None:
            self._engine.call_on_loop(lambda: None if seen.done() else seen.set_result(states))

        states: Sequence[RequestState] = ()
        if self._state in (RunnerState.RUNNING, RunnerState.DRAINING):
            self._engine.post(Look(tell))
            try:
                states = await asyncio.wait_for(seen, LOOK_TIMEOUT_S)
            except TimeoutError:
                states = ()  # a step that does not end: what the desk knows is shown alone
        by_id = {state.request_id: state for state in states}
        desk, counts, now = self._desk, self._desk.snapshot(), self._clock.now()
        return [
            view_of(desk, counts, stream.request, by_id.get(name), now, self._model)
            for name, stream in self._streams.items()
        ]

    # --- desk to engine -----------------------------------------------------------------------

    def _start(self, lease: Lease) -> None:
        stream = self._streams[lease.id]
        if stream.is_submitted:
            self._engine.post(Resume(lease.id))
        else:
            stream.is_submitted = True
            self._engine.post(Submit(stream.request))

    def _start_all(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._start(lease)

    async def _tick_for_ever(self) -> None:
        try:
            while True:
                await asyncio.sleep(TICK_S)
                if self._streams:
                    self._obey(self._desk.tick(self._now))
        except Exception as bug:  # the boundary: without ticks nobody waits in time any more
            self._die(bug)

    def _obey(self, ticked: Ticked) -> None:
        for expired in ticked.expired:
            self._expire(expired)
        for overdue in ticked.overdue:
            self._stop_overdue(overdue)
        for pause in ticked.pauses:
            self._engine.post(Pause(pause.lease.id))
        self._start_all(ticked.granted)
        self._settle()

    def _expire(self, expired: Expired) -> None:
        """Its time in line is over; the desk has closed it."""
        stream = self._streams[expired.ticket.id]
        error = _expiry(stream.request, expired, self._now)
        if stream.is_submitted:  # paused: the engine still keeps its tokens
            self._engine.post(Cancel(stream.request.id, expired.outcome, error))
            stream.is_released = True
        else:
            self._finish(stream, _ended_in_line(stream.request, expired.outcome, error, self._now))

    def _stop_overdue(self, overdue: Overdue) -> None:
        tell = not_complete if overdue.has_token else no_first_token
        self._engine.post(Cancel(overdue.lease.id, overdue.outcome, tell(overdue.limit_s)))

    def _end_in_line(self, stream: "_Stream", outcome: Outcome, error: KvotaError) -> None:
        self._start_all(self._desk.cancel(stream.request.id, outcome, self._now))
        self._finish(stream, _ended_in_line(stream.request, outcome, error, self._now))

    # --- engine to desk -----------------------------------------------------------------------

    def _deliver(self, events: Events) -> None:
        now = self._now
        try:
            for request_id, event in events:
                stream = self._streams.get(request_id)
                if stream is not None:
                    self._hear(stream, event, now)
            if self._streams:
                self._obey(self._desk.tick(now))  # room may have been left by one who is too late
        except Exception as bug:  # the boundary: the rest of these events would be lost in silence
            self._die(bug)
        self._settle()

    def _hear(self, stream: "_Stream", event: EngineEvent, now: float) -> None:
        request_id = stream.request.id
        if isinstance(event, Delta):
            choice = event.choice
            stream.produced[choice] += len(event.token_ids)
            self._desk.progress(
                request_id,
                stream.produced[choice],
                now,
                choice=choice,
                is_done=event.finish is not None,
            )
            stream.push(event)
        elif isinstance(event, Paused):
            self._start_all(self._desk.paused(request_id, now))
        elif isinstance(event, Ended):
            self._finish(stream, event)
            if not stream.is_released:
                self._start_all(self._desk.release(request_id, event.outcome, now))
        else:
            stream.push(event)

    def _finish(self, stream: "_Stream", event: Ended) -> None:
        del self._streams[stream.request.id]
        stream.push(event)

    def _die(self, crash: BaseException) -> None:
        """A bug, in the engine or on this side of it: everything ends with an error."""
        if self._state is RunnerState.DEAD:
            return
        self._state = RunnerState.DEAD
        self._engine.let_end()
        error = BackendFailed("The engine has failed and is being ended; the answer is lost.")
        for stream in list(self._streams.values()):
            self._finish(
                stream, _ended_in_line(stream.request, Outcome.ENGINE_ERROR, error, self._now)
            )
        if self._ticking is not None:
            self._ticking.cancel()
        self._report_crash(crash)
        self._drained.set()
        self._died.set()

    def _settle(self) -> None:
        if self._state is RunnerState.DRAINING and not self._streams:
            self._drained.set()

    @property
    def _now(self) -> float:
        return self._clock.now()


class _Stream:
    """The events of one request, waiting to be read on the event loop."""

    def __init__(self, request: Request, runner: EngineRunner) -> None:
        self.request = request
        self.produced = [0] * request.n  # tokens of each choice
        self.is_submitted = False  # the engine knows it
        self.is_released = False  # the desk has closed it, the engine has not yet
        self._runner = runner
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._is_complete = False

    def push(self, event: Event) -> None:
        self._events.append(event)
        self._is_complete = isinstance(event, Ended)
        self._arrived.set()

    def cancel(self) -> None:
        if not self._is_complete:
            self._runner.cancel(self.request.id)

    def waits(self) -> Waiting | None:
        return self._runner.waits(self.request.id)

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        while self._events or not self._is_complete:
            await self._arrived.wait()
            self._arrived.clear()
            events, self._events = self._events, []
            if events:
                yield events


def _refusal(verdict: DeskRefused) -> KvotaError:
    """What can never fit is the client's to change; for anything else it may come back."""
    if verdict.reason is Refusal.KV_BUDGET_EXHAUSTED:
        return OutputTooLong(verdict.message, param="n")
    return Refused(verdict.reason, verdict.message, retry_after_s=verdict.retry_after_s)


def _expiry(request: Request, expired: Expired, now: float) -> KvotaError:
    retry_after_s = expired.retry_after_s
    match expired.outcome:
        case Outcome.REQUEST_TIMEOUT:
            return not_complete(_limit_s(request, request.deadline_s, now))
        case Outcome.REFUSED:
            message = "In what is left of its time the request would not get its first token."
            return Refused(expired.reason, message, retry_after_s=retry_after_s)
        case _:
            limit_s = _limit_s(request, request.queue_deadline_s, now)
            return not_begun(limit_s, retry_after_s=retry_after_s)


def _limit_s(request: Request, deadline_s: float | None, now: float) -> float:
    """The time it was given; where the limit is the desk's own, the time it has had."""
    return (now if deadline_s is None else deadline_s) - request.arrived_s


def _ended_in_line(request: Request, outcome: Outcome, error: KvotaError, now: float) -> Ended:
    """The ending of a request that the engine never saw, or will say no more of."""
    age_s = now - request.arrived_s
    return Ended(
        outcome=outcome,
        error=error,
        prompt_tokens=len(request.prompt),
        cached_tokens=0,
        output_tokens=0,
        num_preemptions=0,
        queued_s=age_s,
        first_token_s=None,
        total_s=age_s,
    )
