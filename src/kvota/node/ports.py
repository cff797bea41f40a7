"""What the HTTP application needs of the parts it is plugged into: engine side and record keeping.

    HTTP ── Request ──▶ Runner.submit ──▶ RequestStream ── [Event, …] ──▶ HTTP
                                              └─ cancel() when the client is gone

Every submitted request ends with exactly one `Ended`, whatever happens: success, refusal, abort,
crash, shutdown. The application therefore always reads a stream to its end and needs no timers
of its own to clean up after a request.
"""

from collections.abc import AsyncIterator, Callable, Sequence
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

    def waits(self) -> "Waiting | None":
        """Where the request stands in line now; None when it does not wait (any more)."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A place in line. `position` 1 is next; `eta_s` None where nothing is known yet."""

    position: int
    eta_s: float | None
    why: str  # what it waits for, in a few plain words
    latest_by: str | None = None  # what `eta_s` rests on where it is the latest, no prediction


class Phase(StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"  # its KV was given up for others; it goes on later
    CLOSING = "closing"  # ended, and the engine has not confirmed yet that its blocks are back


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One request that has not ended, as `GET /v1/requests` shows it."""

    id: str
    client_id: str  # the client's own request id, or ours
    tenant: str
    model: str
    lane: str
    band: str
    phase: Phase
    age_s: float
    position: int | None  # in line; None when it does not wait
    eta_s: float | None  # to its first chunk
    eta_basis: str | None  # what that rests on
    why: str | None  # what it waits for
    prompt_tokens: int
    computed_tokens: int  # of prompt and output, in KV
    cached_tokens: int
    output_tokens: int  # over all choices
    max_tokens: int
    num_choices: int
    tokens_per_s: float | None  # since the first token; None before the second
    kv_blocks: int
    num_preemptions: int


class Runner(Protocol):
    """The engine behind its thread border."""

    @property
    def state(self) -> RunnerState: ...

    def is_stuck(self, now: float) -> bool:
        """True when work waits and no step has ended for too long."""

    def stalled_s(self, now: float) -> float:
        """Seconds since a step ended, or since work came to an idle engine."""

    def submit(self, request: Request) -> RequestStream:
        """Hand a request over.

        Raises `Refused` when draining, dead, or full at the door, and `InvalidRequest` for more
        choices than could ever run at once.
        """

    async def views(self) -> Sequence[RequestView]:
        """Every request that has not ended, as of the end of the current step."""

    def cancel(self, request_id: str) -> bool:
        """End a request for its client, with CLIENT_CLOSED. False when there is none of that id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What is kept of one generating HTTP request, whether it got an answer or not.

    Exactly one per request. `model` is a served name or "unknown", so it may be a metric label;
    `request_id` comes from the client and may not.
    """

    request_id: str
    endpoint: str  # "chat.completions" or "completions"
    model: str
    tenant: str  # "unknown" where the request's headers could not be understood
    lane: str
    band: str
    outcome: Outcome
    status: int  # the HTTP status the client got, or 499
    code: str | None  # the error's code; None exactly when outcome is COMPLETED
    streamed: bool
    num_choices: int = 0
    prompt_tokens: int = 0
    read_tokens: int = 0  # of those, what belongs to prompts that were read to their end
    cached_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    kv_block_s: float = 0.0  # KV blocks held, each for so many seconds
    door_s: float | None = None  # arrival to the desk: read, checked, tokenized
    queued_s: float | None = None  # None: never reached the engine
    first_token_s: float | None = None  # arrival to the first sampled token
    decode_s: float | None = None  # from there to the last one
    time_per_output_token_s: float | None = None  # after the first one; None below two tokens
    total_s: float  # arrival to the last byte handed to the socket
    traceparent: str | None = None  # of whoever sent it


RecordRequest = Callable[[RequestRecord], None]
RenderMetrics = Callable[[], bytes]
