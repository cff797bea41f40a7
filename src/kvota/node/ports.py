"""What the HTTP application needs of the parts it is plugged into: engine side and record keeping.

    HTTP ── Request ──▶ Runner.submit ──▶ RequestStream ── [Event, …] ──▶ HTTP
                                              └─ cancel() when the client is gone

Every submitted request ends with exactly one `Ended`, whatever happens: success, refusal, abort,
crash, shutdown. The application therefore always reads a stream to its end and needs no timers
of its own to clean up after a request.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvota.core.errors import Outcome
from kvota.core.request import Event, Request


class RunnerState(StrEnum):
    """Where the engine is in its life. Only RUNNING accepts work."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    DEAD = "dead"


class RequestStream(Protocol):
    """The events of one request, in order. Used on the event loop's thread only."""

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        """Yield, each time, all events since the last read; the last list ends with `Ended`.

        Events that nobody reads yet pile up, so a slow reader gets longer lists, never more lists.
        """

    def cancel(self) -> None:
        """Stop the work as soon as possible; `Ended` with CLIENT_CLOSED follows. Idempotent."""


class Runner(Protocol):
    """The engine behind its thread border."""

    @property
    def state(self) -> RunnerState: ...

    def is_stuck(self, now: float) -> bool:
        """True when work waits and no step has ended for too long."""

    def submit(self, request: Request) -> RequestStream:
        """Hand a request over.

        Raises `Refused` when draining, dead, or full at the door, and `InvalidRequest` for more
        choices than could ever run at once.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What is kept of one generating HTTP request, whether it got an answer or not.

    Exactly one per request. `model` is a served name or "unknown", so it may be a metric label;
    `request_id` comes from the client and may not.
    """

    request_id: str
    endpoint: str  # "chat.completions" or "completions"
    model: str
    lane: str
    outcome: Outcome
    status: int  # the HTTP status the client got, or 499
    code: str | None  # the error's code; None exactly when outcome is COMPLETED
    streamed: bool
    num_choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float | None = None  # None: never reached the engine
    first_token_s: float | None = None  # arrival to the first sampled token
    time_per_output_token_s: float | None = None  # after the first one; None below two tokens
    total_s: float  # arrival to the last byte handed to the socket


RecordRequest = Callable[[RequestRecord], None]
RenderMetrics = Callable[[], bytes]
