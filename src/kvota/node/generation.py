"""The engine requests of one HTTP request, read as one sequence of events.

A completions call with several prompts is several engine requests. They are accepted together or
not at all, and when one fails the others are cancelled: the client gets one answer or one error.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvota.core.errors import BackendFailed, KvotaError, Outcome
from kvota.core.request import Delta, Ended, Event, PromptRead, Request
from kvota.node.ports import RequestStream, Runner, Waiting

Prompted = tuple[int, list[PromptRead | Delta]]  # index of the prompt, what happened to it


@dataclass(slots=True)
class Tally:
    """What the engine says about requests that ended, summed; times are the worst or the first."""

    prompt_tokens: int = 0
    read_tokens: int = 0  # of those, what belongs to prompts that were read to their end
    cached_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    kv_block_s: float = 0.0
    queued_s: float | None = None
    first_token_s: float | None = None
    total_s: float = 0.0
    time_per_output_token_s: float | None = None  # mean gap after a prompt's first token

    def add(self, ended: Ended, longest: int, *, is_read: bool) -> None:
        """`longest` is the number of tokens of its longest choice."""
        self.prompt_tokens += ended.prompt_tokens
        self.read_tokens += ended.prompt_tokens if is_read else 0
        self.cached_tokens += ended.cached_tokens
        self.output_tokens += ended.output_tokens
        self.num_preemptions += ended.num_preemptions
        self.kv_block_s += ended.kv_block_s
        self.queued_s = max(self.queued_s or 0.0, ended.queued_s)
        if ended.first_token_s is not None:
            self.first_token_s = min(self.first_token_s or ended.first_token_s, ended.first_token_s)
            if longest > 1:
                gap_s = (ended.total_s - ended.first_token_s) / (longest - 1)
                self.time_per_output_token_s = max(self.time_per_output_token_s or 0.0, gap_s)
        self.total_s = max(self.total_s, ended.total_s)

    @property
    def decode_s(self) -> float | None:
        """From the first token of all to the last one; None without a token."""
        return None if self.first_token_s is None else self.total_s - self.first_token_s


class Generation:
    """Read `events()` to its end: it raises the failure, if there was one, after all have ended."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams
        self._num_tokens: list[Counter[int]] = [Counter() for _ in streams]  # by choice
        self._are_read = [False] * len(streams)
        self.tally = Tally()
        self.outcome: Outcome | None = None

    @classmethod
    def submit(cls, runner: Runner, requests: Sequence[Request]) -> "Generation":
        """Hand over all requests. Raises Refused when one is refused; then none of them runs."""
        streams: list[RequestStream] = []
        try:
            for request in requests:
                streams.append(runner.submit(request))
        except KvotaError:
            for stream in streams:
                stream.cancel()
            raise
        return cls(streams)

    def cancel(self) -> None:
        """Stop all of it. Idempotent; `events()` still has to be read."""
        for stream in self._streams:
            stream.cancel()

    def waits(self) -> Waiting | None:
        """The place in line of the prompt that is served first; None as soon as one is served."""
        places = [stream.waits() for stream in self._streams]
        waiting = [place for place in places if place is not None]
        if len(waiting) < len(places):
            return None
        return min(waiting, key=lambda place: place.position)

    async def events(self) -> AsyncIterator[Prompted]:
        """What happened, as it happens. Raises the first failure once everything has ended."""
        failure: KvotaError | None = None
        try:
            async for index, batch in _merged(self._streams):
                failed = self._absorb(index, batch)
                if failure is None:
                    yield index, [event for event in batch if not isinstance(event, Ended)]
                if failed is not None and failure is None:
                    failure = failed
                    self.cancel()
        finally:
            self.cancel()  # whoever stops reading early wants no more of it
        if failure is not None:
            raise failure
        self.outcome = Outcome.COMPLETED

    def _absorb(self, index: int, batch: Sequence[Event]) -> KvotaError | None:
        for event in batch:
            if isinstance(event, Delta):
                self._num_tokens[index][event.choice] += len(event.token_ids)
            elif isinstance(event, PromptRead):
                self._are_read[index] = True
            else:
                longest = max(self._num_tokens[index].values(), default=0)
                self.tally.add(event, longest, is_read=self._are_read[index])
                if event.outcome is not Outcome.COMPLETED:
                    self.outcome = self.outcome or event.outcome
                    return event.error or BackendFailed("The engine ended without an answer.")
        return None


async def _merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, list[Event]]]:
    """Batches of all streams, each with its stream's index, as they come."""
    if len(streams) == 1:  # the usual case, without a task per batch
        async for batch in streams[0]:
            yield 0, batch
        return
    iterators = [aiter(stream) for stream in streams]
    waiting = {_next(iterator): index for index, iterator in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: waiting[task]):
                index = waiting.pop(task)
                if (events := task.result()) is not None:
                    waiting[_next(iterators[index])] = index
                    yield index, events
    finally:
        for task in waiting:  # left only when the reader has stopped early
            task.cancel()


def _next(iterator: AsyncIterator[list[Event]]) -> "asyncio.Task[list[Event] | None]":
    """A task for the next batch; None at the end (StopAsyncIteration cannot cross a task)."""

    async def step() -> list[Event] | None:
        return await anext(iterator, None)

    return asyncio.create_task(step())
