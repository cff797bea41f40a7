"""A few threads for work that would hold up the event loop: templates, long prompts, grammars.

Bounded twice: by the bodies of the requests whose jobs run or wait, in bytes, and in time for each.
A burst of a thousand chats is a megabyte, and passes on to the desk, which decides who waits. A job
that overruns keeps its thread until it ends by itself (Python cannot stop it), but its request is
answered and nobody else waits for it longer than for their own limit.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Final, TypeVar

from kvota.core.errors import InvalidRequest, Refusal, Refused

T = TypeVar("T")

BODY_BYTES_MIN: Final = 16 * 1024  # what a body counts at least: a request is more than its text


class Workbench:
    """`num_bytes_max`: of the bodies of running and waiting jobs. What is more is refused as
    `queue_full`, but a body alone never is."""

    def __init__(self, num_threads: int, num_bytes_max: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvota-prompt")
        self._num_bytes_max = num_bytes_max
        self._lock = Lock()  # a job ends on its own thread
        self._num_jobs = 0
        self._num_bytes = 0  # of the bodies of their requests

    def seat(self, num_bytes: int) -> "Seat":
        """The bench, for a request with a body of so many bytes."""
        return Seat(self, max(num_bytes, BODY_BYTES_MIN))

    async def run(
        self, job: Callable[[], T], num_bytes: int, *, limit_s: float, what: str, param: str
    ) -> T:
        """As `Seat.run`."""
        if self._num_jobs and self._num_bytes + num_bytes > self._num_bytes_max:
            raise self._full()
        self._count(1, num_bytes)
        future = self._threads.submit(job)
        future.add_done_callback(lambda _: self._count(-1, -num_bytes))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), limit_s)
        except TimeoutError:
            if future.cancel():  # it never began: the bench is at fault, not the job
                raise self._full() from None
            raise InvalidRequest(
                f"`{param}`: {what} took longer than the limit of {limit_s:g} s.", param=param
            ) from None

    def _count(self, num_jobs: int, num_bytes: int) -> None:
        with self._lock:
            self._num_jobs += num_jobs
            self._num_bytes += num_bytes

    def _full(self) -> Refused:
        return Refused(
            Refusal.QUEUE_FULL,
            f"{self._num_jobs} prompts are being prepared; the limit is "
            f"{self._num_bytes_max} bytes of their requests.",
            retry_after_s=1.0,
        )

    def close(self) -> None:
        """Take no more jobs; those that wait are dropped, those that run end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Seat:
    """The bench, as one request uses it."""

    _bench: Workbench
    _num_bytes: int

    async def run(self, job: Callable[[], T], *, limit_s: float, what: str, param: str) -> T:
        """The job's result or exception.

        Raises Refused when the bench is full, and InvalidRequest about `param` when `what`, for
        example "compiling the schema", has not ended within `limit_s`.
        """
        return await self._bench.run(job, self._num_bytes, limit_s=limit_s, what=what, param=param)
