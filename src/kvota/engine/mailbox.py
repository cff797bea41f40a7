"""How other threads talk to the engine: they leave letters, the loop reads them between steps.

The engine never locks. A letter is a small frozen value; the box is the only object that two
threads touch.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from kvota.core.errors import KvotaError, Outcome, Refused
from kvota.core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """How far the engine is with one request. Counts are over all of its choices."""

    request_id: str
    is_running: bool
    is_prompt_read: bool
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_s: float | None  # clock time
    num_blocks: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Run this request. Its events end with exactly one Ended."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """End this request. Unknown or ended ids are ignored. By default, nobody wants it any more."""

    request_id: str
    outcome: Outcome = Outcome.CLIENT_CLOSED
    error: KvotaError | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Give up this request's KV and keep its tokens. Answered by a Paused event."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Let a paused request go on. Unknown, ended or running ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Look:
    """Call `tell`, on the engine's thread and at once, with every request's state."""

    tell: Callable[[Sequence[RequestState]], None]


@dataclass(frozen=True, slots=True)
class Drain:
    """Shutdown has begun: what never ran ends with this refusal, what runs may finish."""

    refusal: Refused


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Time is up: everything ends now."""


Letter = Submit | Cancel | Pause | Resume | Look | Drain | Shutdown


class Mailbox:
    """An unbounded, ordered box: any thread posts, one thread waits and drains.

    Whoever posts `Submit` bounds the line itself.
    """

    def __init__(self) -> None:
        self._letters: SimpleQueue[Letter] = SimpleQueue()
        self._seen: list[Letter] = []  # taken out by wait(), not drained yet; the reader's own

    def post(self, letter: Letter) -> None:
        self._letters.put(letter)

    def drain(self) -> list[Letter]:
        """All letters that are there now, oldest first, without waiting."""
        letters, self._seen = self._seen, []
        try:
            while True:
                letters.append(self._letters.get_nowait())
        except Empty:
            return letters

    def wait(self, timeout_s: float) -> None:
        """Return when a letter can be drained, or after `timeout_s`."""
        if self._seen:
            return
        with contextlib.suppress(Empty):
            self._seen.append(self._letters.get(timeout=timeout_s))
