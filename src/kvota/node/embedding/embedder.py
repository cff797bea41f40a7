"""Texts in, vectors out, on the event loop; passes run one at a time on a thread of their own.

embed(texts) ─▶ BatchLine ─▶ batch ─▶ thread: one forward pass ─▶ futures ─▶ embed returns
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvota.core.clock import Clock
from kvota.core.errors import BackendFailed, Refusal, Refused, RequestTimeout
from kvota.desk.batching import BatchLine, Text, TextBatch

Vector = npt.NDArray[np.float32]
Embed = Callable[[Sequence[Sequence[int]]], npt.NDArray[np.float32]]


class PassObserver(Protocol):
    def observe_pass(
        self, *, num_texts: int, num_tokens: int, num_computed: int, s: float
    ) -> None: ...
    def observe_wait(self, seconds: float) -> None: ...
    def observe_failure(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    tokens: Sequence[int]
    text: Text
    vector: asyncio.Future[Vector]
    on_pass: Callable[[float], None]


class Embedder:
    """Used on one event loop. Every call of `embed` ends, whatever happens to its batch."""

    def __init__(self, embed: Embed, line: BatchLine, clock: Clock, observer: PassObserver) -> None:
        self._embed = embed
        self._line = line
        self._clock = clock
        self._observer = observer
        self._keys = count()
        self._waiting: dict[int, _Waiting] = {}
        self._num_open = 0  # calls of embed
        self._has_news = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._drain_s: float | None = None
        self._computing_since_s: float | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvota-embed")
        self._loop_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run())

    @property
    def is_draining(self) -> bool:
        return self._drain_s is not None

    def stalled_s(self) -> float:
        """Seconds that the pass of the moment has taken; 0 between passes."""
        since_s = self._computing_since_s
        return 0.0 if since_s is None else self._clock.now() - since_s

    async def embed(
        self,
        texts: Sequence[Sequence[int]],
        *,
        queue_deadline_s: float,
        deadline_s: float,
        on_pass: Callable[[float], None] = lambda _: None,
    ) -> list[Vector]:
        """One vector for each text of token ids. `on_pass` is told when a pass begins, for each.

        Raises Refused when the line is full, would take too long or has taken too long, and
        RequestTimeout when a pass outlasts `deadline_s`. Cancelled, it takes its texts out of line.
        """
        if self._drain_s is not None:
            message = "The server is shutting down."
            raise Refused(Refusal.DRAINING, message, retry_after_s=self._drain_s)
        waiting = self._enter(texts, queue_deadline_s, on_pass)
        self._num_open += 1
        self._is_idle.clear()
        self._has_news.set()
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock.now())):
                return [await one.vector for one in waiting]
        except TimeoutError:
            raise RequestTimeout("The request was not complete within its time.") from None
        finally:
            self._leave(waiting)

    async def drain(self, retry_after_s: float) -> None:
        """Take nothing new, and return when all that was taken has been answered."""
        self._drain_s = retry_after_s
        await self._is_idle.wait()

    async def stop(self) -> None:
        """End at once. What still waits fails as `draining`."""
        self._drain_s = self._drain_s or 1.0
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        message = "The server has shut down."
        for one in list(self._waiting.values()):
            self._fail(one, Refused(Refusal.DRAINING, message, retry_after_s=self._drain_s))
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- the line

    def _enter(
        self,
        texts: Sequence[Sequence[int]],
        deadline_s: float,
        on_pass: Callable[[float], None],
    ) -> list[_Waiting]:
        now, loop = self._clock.now(), asyncio.get_running_loop()
        waiting = [
            _Waiting(
                tokens,
                Text(next(self._keys), len(tokens), now, deadline_s),
                loop.create_future(),
                on_pass,
            )
            for tokens in texts
        ]
        refused = self._line.arrive([one.text for one in waiting], now)
        if refused is not None:
            raise Refused(refused.reason, refused.message, retry_after_s=refused.retry_after_s)
        self._waiting.update((one.text.key, one) for one in waiting)
        return waiting

    def _leave(self, waiting: Sequence[_Waiting]) -> None:
        """Whatever of these is still in line has nobody who waits for it."""
        for one in waiting:
            if self._waiting.pop(one.text.key, None) is not None:
                self._line.cancel(one.text)
            if one.vector.done() and not one.vector.cancelled():
                one.vector.exception()  # several of one request may fail; the first one is told
            else:
                one.vector.cancel()
        self._num_open -= 1
        if self._num_open == 0:
            self._is_idle.set()

    # --- the passes

    async def _run(self) -> None:
        while True:
            self._has_news.clear()
            now = self._clock.now()
            self._expire(now)
            batch = self._line.due(now)
            if batch is not None:
                await self._compute(batch)
            else:
                await self._wait(now)

    async def _wait(self, now: float) -> None:
        """Until something is due or something has come."""
        due_s = self._line.next_due_s()
        try:
            async with asyncio.timeout(None if due_s is None else max(0.0, due_s - now)):
                await self._has_news.wait()
        except TimeoutError:
            return

    def _expire(self, now: float) -> None:
        for text in self._line.expire(now):
            message = f"Waited {now - text.arrived_s:.1f} s in line, the most that is allowed."
            retry_after_s = self._line.retry_after_s()
            self._fail(
                self._waiting.pop(text.key),
                Refused(Refusal.QUEUE_TIMEOUT, message, retry_after_s=retry_after_s),
            )

    async def _compute(self, batch: TextBatch) -> None:
        taken = [self._waiting.pop(text.key) for text in batch.texts]
        began_s = self._computing_since_s = self._clock.now()
        for one in taken:
            self._observer.observe_wait(began_s - one.text.arrived_s)
            one.on_pass(began_s)
        loop = asyncio.get_running_loop()
        try:
            vectors = await loop.run_in_executor(
                self._thread, self._embed, [one.tokens for one in taken]
            )
        except Exception as error:  # the boundary: a pass that fails fails its texts, nobody else
            self._observer.observe_failure(error)
            for one in taken:
                self._fail(one, BackendFailed("The model failed on this batch. Try again."))
            return
        finally:
            self._computing_since_s = None
        seconds = self._clock.now() - began_s
        self._line.computed(batch, seconds)
        self._observer.observe_pass(
            num_texts=len(taken),
            num_tokens=sum(text.num_tokens for text in batch.texts),
            num_computed=batch.num_computed,
            s=seconds,
        )
        for one, vector in zip(taken, vectors, strict=True):
            if not one.vector.done():
                one.vector.set_result(vector)

    @staticmethod
    def _fail(one: _Waiting, error: Exception) -> None:
        if not one.vector.done():
            one.vector.set_exception(error)
