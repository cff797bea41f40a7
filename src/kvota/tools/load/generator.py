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
from kvota.tools.load.asked import CONNECTION, UNFINISHED, Asked, Seen
from kvota.tools.load.cut import INTERRUPTED, Cut
from kvota.tools.load.lag import Lag, beat
from kvota.tools.load.sender import Send

IN_FLIGHT_MAX = 2048
HEAD_START_S = 0.1  # from ready to the first moment of the plan
GONE_AFTER_S = 30.0  # nobody was let in: there is nothing more to learn
RETRY_S_MAX = 5.0  # a closed loop that was refused asks again after at most so long


@dataclass(slots=True)
class Run:
    """What was seen, in the order of asking, and the generator's own lag."""

    seen: list[Seen] = field(default_factory=list)
    beats_s: list[float] = field(default_factory=list)
    interrupted_s: float | None = None  # after so long it was stopped
    is_gone: bool = False  # and not from outside: there was no server any more

    @property
    def cut(self) -> Cut | None:
        """Why it was stopped; None when it came to its end."""
        if self.interrupted_s is None:
            return None
        if not self.is_gone:
            return INTERRUPTED
        return Cut(f"nobody was let in for {GONE_AFTER_S:g} s, the server is gone", False)

    @property
    def lag(self) -> Lag:
        return Lag.of([one.sent_s for one in self.seen], self.beats_s)

    def require_end(self) -> None:
        """Raises CancelledError where the run was interrupted, for whoever kept what it saw."""
        if self.cut is INTERRUPTED:
            raise asyncio.CancelledError


class _Gone(Exception):
    """Nobody was let in for GONE_AFTER_S."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request on its way, or what became of one that was never sent."""

    asked: Asked
    lag_s: float
    outcome: "asyncio.Task[Seen] | Seen"


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
        self._unheard_since_s: float | None = None  # the first of only failures to connect

    async def offer(
        self, asked: Iterable[Asked], *, duration_s: float, drain_s: float, keeps: bool = False
    ) -> Run:
        """Send each when it is due, all within `duration_s`. Returns when all are over.

        `asked` is in order of time, and read one ahead, so that prompts need not all exist at once.
        With `keeps` a cancellation (Ctrl-C) ends the run instead: what was seen until then counts,
        and what is open is given up. So does a server that is gone.
        """
        run = Run()
        async with self._measured(run):
            origin_s = self._clock.now() + HEAD_START_S
            sent: list[_Sent] = []
            try:
                await self._send_all(
                    asked, origin_s, origin_s + duration_s + drain_s, sent, ends_gone=keeps
                )
                run.seen = [await _end_of(one) for one in sent]
            except _Gone:
                run.interrupted_s, run.is_gone = self._clock.now() - origin_s, True
                run.seen = await _cut(sent, run.interrupted_s)
            except asyncio.CancelledError:
                if not keeps:
                    raise
                run.interrupted_s = self._clock.now() - origin_s
                run.seen = await _cut(sent, run.interrupted_s)
        return run

    async def _send_all(
        self, asked: Iterable[Asked], origin_s: float, until_s: float, sent: list[_Sent], *,
        ends_gone: bool,
    ) -> None:  # fmt: skip
        """Raises _Gone, if it is to, once nobody was let in for long."""
        places = asyncio.Semaphore(self._in_flight_max)
        for one in asked:
            due_s = origin_s + one.scheduled_s
            await self._sleep_until(due_s)
            if ends_gone and self._unheard_s > GONE_AFTER_S:
                raise _Gone
            outcome: asyncio.Task[Seen] | Seen
            if await self._has_place(places, until_s):
                outcome = asyncio.create_task(self._follow(one, origin_s, until_s, places))
            else:
                outcome = _never_sent(one, until_s - origin_s)
            sent.append(_Sent(one, self._clock.now() - due_s, outcome))

    async def keep(
        self,
        asked: Iterator[Asked],
        num_open: int,
        *,
        seconds: float,
        num_max: int | None = None,
        keeps: bool = False,
    ) -> Run:
        """Keep `num_open` requests open for so long, or until `num_max` were sent.

        What is open after `seconds` is given up. `scheduled_s` is when each was sent. With `keeps`
        a cancellation ends the run instead, and only what has ended until then was seen.
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
            try:
                await asyncio.gather(*(one_after_another() for _ in range(num_open)))
            except asyncio.CancelledError:
                if not keeps:
                    raise
                run.interrupted_s = self._clock.now() - origin_s
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
        if seen.status is not None or seen.code != CONNECTION:
            self._unheard_since_s = None
        elif self._unheard_since_s is None:
            self._unheard_since_s = self._clock.now()
        self._on_ended(seen)
        return seen

    @property
    def _unheard_s(self) -> float:
        since_s = self._unheard_since_s
        return 0.0 if since_s is None else self._clock.now() - since_s

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


async def _end_of(one: _Sent) -> Seen:
    return one.outcome if isinstance(one.outcome, Seen) else await one.outcome


async def _cut(sent: Iterable[_Sent], over_s: float) -> list[Seen]:
    """What has ended, and the rest as unfinished, its connections closed."""
    sent = list(sent)
    tasks = [one.outcome for one in sent if isinstance(one.outcome, asyncio.Task)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [_seen_until(one, over_s) for one in sent]


def _seen_until(one: _Sent, over_s: float) -> Seen:
    if isinstance(one.outcome, Seen):
        return one.outcome
    if not one.outcome.cancelled() and one.outcome.exception() is None:
        return one.outcome.result()
    return Seen(
        scheduled_s=one.asked.scheduled_s,
        sent_s=one.lag_s,
        ended_s=max(over_s - one.asked.scheduled_s, one.lag_s),
        code=UNFINISHED,
        message="given up: the run was interrupted",
        max_tokens=one.asked.max_tokens,
        n=one.asked.n,
        lane=one.asked.lane,
    )


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
