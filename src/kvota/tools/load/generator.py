"""Sends on time, whatever comes back (open loop), or as soon as the last answer is over (closed).

The generator bounds what it has under way: a request that finds no place waits for one, is sent
late, and its times count from when it was due. What is still open `drain_s` after the last
request was due is given up and counts as unfinished.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace

from kvota.core.clock import Clock, SystemClock
from kvota.tools.load.asked import UNFINISHED, Asked, Seen
from kvota.tools.load.lag import Lag, beat
from kvota.tools.load.sender import Send

IN_FLIGHT_MAX = 2048
HEAD_START_S = 0.1  # from ready to the first moment of the plan
RETRY_S_MAX = 5.0  # a closed loop that was refused asks again after at most so long


@dataclass(slots=True)
class Run:
    """What was seen, in the order of asking, and the generator's own lag."""

    seen: list[Seen] = field(default_factory=list)
    beats_s: list[float] = field(default_factory=list)

    @property
    def lag(self) -> Lag:
        return Lag.of([one.sent_s for one in self.seen], self.beats_s)


class Generator:
    """Load on one server. `on_ended` is called after each answer, for a progress bar."""

    def __init__(
        self,
        sender: Send,
        clock: Clock | None = None,
        *,
        in_flight_max: int = IN_FLIGHT_MAX,
        on_ended: Callable[[Seen], None] = lambda _: None,
    ) -> None:
        self._sender = sender
        self._clock = clock or SystemClock()
        self._in_flight_max = in_flight_max
        self._on_ended = on_ended

    async def offer(self, asked: Iterable[Asked], *, duration_s: float, drain_s: float) -> Run:
        """Send each when it is due, all within `duration_s`. Returns when all are over.

        `asked` is in order of time, and read one ahead, so that prompts need not all exist at once.
        """
        run = Run()
        async with self._measured(run):
            origin_s = self._clock.now() + HEAD_START_S
            until_s = origin_s + duration_s + drain_s
            places = asyncio.Semaphore(self._in_flight_max)
            outcomes: list[asyncio.Task[Seen] | Seen] = []
            for one in asked:
                await self._sleep_until(origin_s + one.scheduled_s)
                if await self._has_place(places, until_s):
                    task = self._follow(one, origin_s, until_s, places)
                    outcomes.append(asyncio.create_task(task))
                else:
                    outcomes.append(_never_sent(one, until_s - origin_s))
            run.seen = [one if isinstance(one, Seen) else await one for one in outcomes]
        return run

    async def keep(
        self,
        asked: Iterator[Asked],
        num_open: int,
        *,
        seconds: float,
        num_max: int | None = None,
    ) -> Run:
        """Keep `num_open` requests open for so long, or until `num_max` were sent.

        What is open after `seconds` is given up. `scheduled_s` is when each was sent.
        """
        run = Run()
        origin_s = self._clock.now()
        num_sent = 0

        async def one_after_another() -> None:
            nonlocal num_sent
            while self._clock.now() - origin_s < seconds and (
                num_max is None or num_sent < num_max
            ):
                num_sent += 1
                one = replace(next(asked), scheduled_s=self._clock.now() - origin_s)
                seen = await self._sender.send(one, origin_s, origin_s + seconds)
                run.seen.append(seen)
                self._on_ended(seen)
                if not seen.is_whole:
                    await asyncio.sleep(min(seen.retry_after_s or 0.1, RETRY_S_MAX))

        async with self._measured(run):
            await asyncio.gather(*(one_after_another() for _ in range(num_open)))
        return run

    @asynccontextmanager
    async def _measured(self, run: Run) -> AsyncIterator[None]:
        """The beat goes, and no collection of old objects delays what is due."""
        with _garbage_frozen():
            beating = asyncio.create_task(beat(self._clock, run.beats_s))
            try:
                yield
            finally:
                beating.cancel()
                with suppress(asyncio.CancelledError):
                    await beating

    async def _follow(
        self, one: Asked, origin_s: float, until_s: float, places: asyncio.Semaphore
    ) -> Seen:
        try:
            seen = await self._sender.send(one, origin_s, until_s)
        finally:
            places.release()
        self._on_ended(seen)
        return seen

    async def _has_place(self, places: asyncio.Semaphore, until_s: float) -> bool:
        """False when the run is over before there is one."""
        if not places.locked():
            return await places.acquire()
        with suppress(TimeoutError):
            async with asyncio.timeout(until_s - self._clock.now()):
                return await places.acquire()
        return False

    async def _sleep_until(self, moment_s: float) -> None:
        # A loop, because a timer may fire a little early.
        while (left_s := moment_s - self._clock.now()) > 0:  # noqa: ASYNC110 (time, no event)
            await asyncio.sleep(left_s)


def _never_sent(one: Asked, over_s: float) -> Seen:
    """It never found a place at the generator: all of the time it had was lag."""
    waited_s = over_s - one.scheduled_s
    return Seen(
        scheduled_s=one.scheduled_s,
        sent_s=waited_s,
        ended_s=waited_s,
        code=UNFINISHED,
        message="never sent: the generator had no place",
        max_tokens=one.max_tokens,
        n=one.n,
        lane=one.lane,
    )


@contextmanager
def _garbage_frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
