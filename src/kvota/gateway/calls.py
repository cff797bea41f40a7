"""One request on its way through the gateway, and the record that is left of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final

import msgspec

from kvota.core.errors import KvotaError, Outcome, Refusal, RequestTimeout
from kvota.core.request import Band
from kvota.edge.trust import Course
from kvota.gateway.caller import Caller
from kvota.telemetry.trace import TraceContext

UNKNOWN: Final = "unknown"  # the model of a request that named none that is here
CLIENT_CLOSED_STATUS: Final = 499


class Work(Enum):
    """What a backend does for a request, and so what of it counts."""

    GENERATION = "generation"  # reads a prompt, writes tokens one by one
    EMBEDDING = "embedding"  # reads texts; the whole answer comes at the end
    LOOKUP = "lookup"  # computes nothing: the tokenizer by itself


class Call(msgspec.Struct):
    """What is known of a request so far, filled in by whoever learns it. Times: clock seconds."""

    id: str  # ours
    client_id: str  # the client's, or ours: echoed and logged
    endpoint: str
    arrived_s: float
    address: str | None
    work: Work = Work.GENERATION
    caller: Caller | None = None
    band: Band | None = None  # as it was let in
    lane: str | None = None  # at a desk of the gateway's own
    model: str = UNKNOWN  # the public name that answered, or was meant to
    task: str | None = None
    is_stream: bool = False
    num_choices: int = 1
    max_tokens: int | None = None
    num_inputs: int | None = None  # texts to embed
    backend: str | None = None  # of the last attempt
    version: str | None = None
    fallback: str | None = None  # from → to and why
    num_attempts: int = 0
    status: int = 200
    code: str | None = None
    outcome: Outcome = Outcome.COMPLETED
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    course: Course | None = None  # how it went, where a node of ours has told
    sent_s: float | None = None  # when the last attempt began
    queued_s: float | None = None
    first_token_s: float | None = None  # when it came; of an embedding: when its answer did
    has_begun: bool = False  # a backend has, and has not failed
    ended_s: float = 0.0
    why: str | None = None  # for the log alone: why the door stayed shut, which rule was found
    last_token_s: float | None = None  # when the answer was complete, for a trace
    trace: TraceContext | None = None  # None: nobody wants traces
    prefix: tuple[int, ...] = ()  # for the journal
    keep: Callable[["Call"], None] | None = None  # its usage; None once that is done

    def answered(self, now: float) -> None:
        """The end of its answer is about to go out: what it took is kept before the client has it
        all, so that no answer was given for which a killed gateway has no line.
        """
        self.ended_s = now
        self.keep_usage()

    def keep_usage(self) -> None:
        """Idempotent."""
        keep, self.keep = self.keep, None
        if keep is not None:
            keep(self)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A backend is at it: whoever leaves now, or runs out of time, has used it. A backend that
        fails has not begun.
        """
        self.has_begun = True
        try:
            yield
        except KvotaError as error:
            self.has_begun = isinstance(error, RequestTimeout)
            raise

    @property
    def total_s(self) -> float:
        return self.ended_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        """Arrival to the first token; None where no token was to come."""
        if self.first_token_s is None or self.work is not Work.GENERATION:
            return None
        return self.first_token_s - self.arrived_s

    @property
    def is_owed(self) -> bool:
        """Work was done for it, so it counts against its key's limits."""
        return self.output_tokens > 0 or self.first_token_s is not None or self.has_begun

    @property
    def read_tokens(self) -> int:
        """Of the prompt, as usage counts them: none where nothing came of it."""
        if self.output_tokens:
            return self.prompt_tokens
        # An answer may be all about what was read: an embedding, or a prompt that was only scored.
        # A stream may also begin with an error.
        is_whole = self.work is Work.EMBEDDING or self.outcome is Outcome.COMPLETED
        return self.prompt_tokens if is_whole and self.first_token_s is not None else 0

    @property
    def time_per_output_token_s(self) -> float | None:
        """The mean gap after the first token; None below two."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.ended_s - self.first_token_s) / (self.output_tokens - 1)

    def kv_block_seconds(self, block_size: int) -> float:
        """Blocks held, times how long: what a request really takes. From outside, an estimate.

        The prompt is held all the time, the output grows from nothing to all of it.
        """
        if self.work is not Work.GENERATION or not self.read_tokens:
            return 0.0
        held_s = max(self.total_s - (self.queued_s or 0.0), 0.0)
        return (self.prompt_tokens + self.output_tokens / 2) / block_size * held_s


def outcome_of_code(status: int, code: str | None) -> Outcome:
    """How a request ended that a node answered with an error."""
    if code == Refusal.QUEUE_TIMEOUT.value:
        return Outcome.QUEUE_TIMEOUT
    if code in {reason.value for reason in Refusal}:
        return Outcome.REFUSED
    if status == 504 or code == "request_timeout":
        return Outcome.REQUEST_TIMEOUT
    if status == 410 or code == "request_cancelled":
        return Outcome.CLIENT_CLOSED
    return Outcome.INVALID if 400 <= status < 500 else Outcome.ENGINE_ERROR
