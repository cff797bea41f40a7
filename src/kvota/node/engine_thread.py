"""The border between the event loop and the engine's thread.

    event loop ── letters ──▶ mailbox ──▶ engine.step() on its own thread
    event loop ◀── call_soon_threadsafe ── all events of one step

The engine belongs to its thread, everything else to the event loop.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvota.core.clock import Clock
from kvota.core.request import EngineEvent, PromptRead
from kvota.engine.mailbox import Letter, Mailbox, Shutdown
from kvota.node.priority import give_way

HEAD_START_S = 0.005  # at most; it is over as soon as the tokens are written
_IDLE_WAIT_S = 0.5
_BLOCKED_WAIT_S = 0.005

Events = Sequence[tuple[str, EngineEvent]]


class Steppable(Protocol):
    """The engine as its thread sees it."""

    def step(self) -> bool:
        """One turn of the loop. False when there was nothing to compute."""

    def has_work(self) -> bool: ...


class EngineThread:
    """Runs one engine. `deliver` and `on_death` are called on the event loop."""

    def __init__(
        self,
        clock: Clock,
        mailbox: Mailbox,
        *,
        deliver: Callable[[Events], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._clock = clock
        self._mailbox = mailbox
        self._deliver = deliver
        self._on_death = on_death
        self._progress_s = clock.now()
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, engine: Steppable) -> None:
        """Begin. Call once, on the event loop that will hear of it."""
        assert self._thread is None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._run, args=(engine,), name="kvota-engine", daemon=True
        )
        self.note_progress()
        self._thread.start()

    def post(self, letter: Letter) -> None:
        self._mailbox.post(letter)

    def publish(self, events: Events) -> None:
        """Take the events of one step. Called on the engine's thread."""
        self.call_on_loop(lambda: self._deliver(events))
        if any(type(event) is PromptRead for _, event in events):
            self._give_head_start()

    def _give_head_start(self) -> None:
        """Let first tokens reach their sockets before the next step takes every core."""
        loop = self._loop
        assert loop is not None
        written = threading.Event()
        # Two turns of the loop: streams wake in the first and write in the second.

        def first_turn() -> None:
            loop.call_soon(written.set)

        self.call_on_loop(lambda: _soon(loop, first_turn))
        written.wait(HEAD_START_S)

    def call_on_loop(self, work: Callable[[], None]) -> None:
        """From the engine's thread: do this on the event loop, soon.

        Nobody listens any more when a step has outlasted the end of the loop.
        """
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)

    def note_progress(self) -> None:
        """Count the time without progress from now on."""
        self._progress_s = self._clock.now()

    def stalled_s(self, now: float) -> float:
        """Seconds since a step ended."""
        return now - self._progress_s

    def let_end(self) -> None:
        """Let the thread end after its present step."""
        self._is_stopping = True
        self._mailbox.post(Shutdown())

    async def join(self) -> None:
        """Let the thread end after its present step, and wait for that."""
        self.let_end()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, engine: Steppable) -> None:
        """The thread."""
        give_way()
        try:
            while not self._is_stopping:
                if engine.step():
                    self.note_progress()
                else:
                    self._mailbox.wait(_BLOCKED_WAIT_S if engine.has_work() else _IDLE_WAIT_S)
        except BaseException as crash:  # the boundary: a bug ends the process, loudly
            fatal = crash
            self.call_on_loop(lambda: self._on_death(fatal))


def _soon(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    loop.call_soon(work)
