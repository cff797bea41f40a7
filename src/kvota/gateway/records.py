"""What is kept of every request when it has ended: usage, metrics, one log line, the journal.

No prompt, no answer and no key is in any of them.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from kvota.core.errors import Outcome
from kvota.core.request import Band
from kvota.edge.trust import Course
from kvota.gateway.calls import Call, Work
from kvota.gateway.entrance import Entrance
from kvota.gateway.metrics import GatewayMetrics
from kvota.gateway.store.database import StoreUnusable
from kvota.gateway.usage import UsageBook, UsageLine, day_of
from kvota.telemetry.journal import VERSION, JournalLine, JournalWriter
from kvota.telemetry.log import Log
from kvota.telemetry.trace import RequestTimes, Tracing

BLOCK_SIZE: Final = 16  # tokens: the unit in which usage counts what was held
_BANDS: Final = {band: band.name.lower() for band in Band}
_REFUSED: Final = frozenset({Outcome.REFUSED, Outcome.QUEUE_TIMEOUT, Outcome.RATE_LIMITED})


class _Durations(NamedTuple):
    """What the journal and the log both tell, in tenths of a millisecond."""

    total_s: float
    queued_s: float | None
    first_token_s: float | None
    kv_block_s: float


class _Fields(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Of a log line, in its order."""

    request_id: str
    trace_id: str | None = None
    endpoint: str
    model: str
    key_id: str | None = None
    tenant: str | None = None
    outcome: str
    status: int
    code: str | None = None
    why: str | None = None
    streamed: bool
    backend: str | None = None
    version: str | None = None
    attempts: int | None = None
    task: str | None = None
    inputs: int | None = None
    fallback: str | None = None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queued_s: float | None = None
    first_token_s: float | None = None
    lane: str | None = None
    band: str | None = None
    time_per_output_token_s: float | None = None
    num_preemptions: int | None = None
    kv_block_s: float | None = None
    total_s: float


class Records:
    """Called once for each request. `usage`, `journal`, `tracing`: None where nobody wants it."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        entrance: Entrance,
        log: Log,
        unix_time: Callable[[], float],
        *,
        usage: UsageBook | None = None,
        journal: JournalWriter | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._metrics = metrics
        self._entrance = entrance
        self._log = log
        self._unix_time = unix_time
        self._usage = usage
        self._journal = journal
        self._tracing = tracing

    def __call__(self, call: Call) -> None:
        self._entrance.note_end(call)
        self._metrics.observe(call)
        durations = _durations(call)
        if self._journal is not None and call.work is not Work.LOOKUP:
            self._journal.write(self._journal_line(call, durations))
        fields = _fields(call, durations)
        if self._tracing is not None and call.trace is not None:
            self._tracing.record(self._times(call, fields), call.trace)
        self._log.info("request", **fields)

    def keep_usage(self, call: Call) -> None:
        """Once for each request, as soon as what it took is known."""
        usage = self._usage
        if usage is None or call.caller is None:
            return
        line = UsageLine(
            key_id=call.caller.key_id,
            tenant=call.caller.tenant,
            model=call.model,
            day=day_of(self._unix_time()),
            prompt_tokens=call.read_tokens,
            cached_tokens=call.cached_tokens,
            output_tokens=call.output_tokens,
            refusals=int(call.outcome in _REFUSED),
            kv_block_seconds=call.kv_block_seconds(BLOCK_SIZE),
        )
        try:
            usage.add(line)
        except StoreUnusable as error:
            self._log.error("usage not written", why=error.message)

    def _times(self, call: Call, fields: dict[str, Any]) -> RequestTimes:
        """The moments of a request, for a trace."""
        sent_s = _since(call.arrived_s, call.sent_s)
        granted_s = None
        if sent_s is not None and call.queued_s is not None:
            granted_s = sent_s + call.queued_s
        return RequestTimes(
            arrived_unix_s=self._unix_time() - call.total_s,
            queued_at_s=sent_s,
            granted_at_s=granted_s,
            first_token_at_s=call.ttft_s,
            last_token_at_s=_since(call.arrived_s, call.last_token_s),
            ended_at_s=call.total_s,
            is_failed=call.outcome is not Outcome.COMPLETED,
            attributes=fields,
        )

    def _journal_line(self, call: Call, durations: _Durations) -> JournalLine:
        caller = call.caller
        return JournalLine(
            v=VERSION,
            at=self._unix_time() - call.total_s,
            id=call.client_id,
            model=call.model,
            outcome=call.outcome,
            prompt_tokens=call.prompt_tokens,
            output_tokens=call.output_tokens,
            total_s=durations.total_s,
            endpoint=call.endpoint,
            backend=call.backend,
            tenant="" if caller is None else caller.tenant,
            band=_BANDS[call.band or Band.INTERACTIVE],
            streamed=call.is_stream,
            n=call.num_choices,
            max_tokens=call.max_tokens,
            cached_tokens=call.cached_tokens,
            queued_s=durations.queued_s,
            first_token_s=durations.first_token_s,
            kv_block_seconds=durations.kv_block_s,
            prefix=call.prefix,
        )


def _fields(call: Call, durations: _Durations) -> dict[str, Any]:
    """The log line of a request; what is absent is left out."""
    caller = call.caller
    fields = _Fields(
        request_id=call.client_id,
        trace_id=None if call.trace is None else call.trace.trace_id,
        endpoint=call.endpoint,
        model=call.model,
        key_id=None if caller is None else caller.key_id,
        tenant=None if caller is None else caller.tenant,
        outcome=call.outcome,
        status=call.status,
        code=call.code,
        why=call.why,
        streamed=call.is_stream,
        backend=call.backend,
        version=call.version if call.version != call.model else None,
        attempts=call.num_attempts if call.num_attempts > 1 else None,
        task=call.task,
        inputs=call.num_inputs,
        fallback=call.fallback,
        prompt_tokens=call.prompt_tokens,
        cached_tokens=call.cached_tokens,
        output_tokens=call.output_tokens,
        queued_s=durations.queued_s,
        first_token_s=durations.first_token_s,
        total_s=durations.total_s,
    )
    if call.course is None:
        fields.lane = call.lane
        fields.band = None if call.band is None else _BANDS[call.band]
        fields.time_per_output_token_s = _rounded(call.time_per_output_token_s)
        fields.kv_block_s = durations.kv_block_s or None
    else:
        _tell_course(fields, call.course)
    told: dict[str, Any] = msgspec.to_builtins(fields)
    return told


def _tell_course(fields: _Fields, course: Course) -> None:
    """How it went, by our own node's account. A stream's first token is as the client sees it."""
    fields.lane, fields.band = course.lane, course.band
    if not fields.streamed or course.first_token_s is None:
        fields.first_token_s = _rounded(course.first_token_s)
    fields.time_per_output_token_s = _rounded(course.time_per_output_token_s)
    fields.num_preemptions = course.num_preemptions
    fields.kv_block_s = _rounded(course.kv_block_s)


def _durations(call: Call) -> _Durations:
    return _Durations(
        _tenths_of_ms(call.total_s),
        _rounded(call.queued_s),
        _rounded(call.ttft_s),
        _tenths_of_ms(call.kv_block_seconds(BLOCK_SIZE)),
    )


def _since(begin_s: float, moment_s: float | None) -> float | None:
    return None if moment_s is None else moment_s - begin_s


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else _tenths_of_ms(seconds)


def _tenths_of_ms(seconds: float) -> float:
    """What `round(seconds, 4)` gives but for ties, at a tenth of its cost. Not below 0."""
    return int(seconds * 10_000 + 0.5) / 10_000
