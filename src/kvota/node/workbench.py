"""A few threads for work that would hold up the event loop: templates, long prompts, grammars.

Bounded twice: so many jobs, and so long for each. A job that overruns keeps its thread until it
ends by itself (Python cannot stop it), but its request is answered and nobody else waits for it
longer than for their own limit.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kvota.core.errors import InvalidRequest, Refusal, Refused

T = TypeVar("T")


class Workbench:
    """`num_jobs_max` counts running and waiting jobs; one more is refused as `queue_full`."""

    def __init__(self, num_threads: int, num_jobs_max: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvota-prompt")
        self._num_jobs_max = num_jobs_max
        self._jobs: set[Future[Any]] = set()

    async def run(self, job: Callable[[], T], *, limit_s: float, what: str, param: str) -> T:
        """The job's result or exception.

        Raises Refused when the bench is full, and InvalidRequest about `param` when `what`, for
        example "compiling the schema", has not ended within `limit_s`.
        """
        if len(self._jobs) >= self._num_jobs_max:
            raise self._full()
        future = self._threads.submit(job)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), limit_s)
        except TimeoutError:
            if future.cancel():  # it never began: the bench is at fault, not the job
                raise self._full() from None
            raise InvalidRequest(
                f"`{param}`: {what} took longer than the limit of {limit_s:g} s.", param=param
            ) from None

    def _full(self) -> Refused:
        return Refused(
            Refusal.QUEUE_FULL,
            f"{len(self._jobs)} prompts are being prepared; the limit is {self._num_jobs_max}.",
            retry_after_s=1.0,
        )

    def close(self) -> None:
        """Take no more jobs; those that wait are dropped, those that run end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
