"""One trace per request, for OpenTelemetry: where its time went, as spans (extra `tracing`).

    request ├─ door ─┼─ line ─┼─ prefill ─┼─ decode ─────┼─ stream ┤
            arrived  in line   granted     first token    last      last byte
                                                          token     passed on

Spans are made when the request has ended, from the moments that were noted anyway, so a request in
flight pays nothing but its ids. A stage that a request did not reach has no span.

Who sends a request on says so in the header `traceparent` (W3C Trace Context), so all that happens
to it is one trace: the client's span, if it has one, the gateway's `request` in it, the node's
`request` in that. A malformed header is passed over, and begins a trace anew.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

from kvota.core.errors import ConfigError

Attribute = str | int | float | bool
_NS: Final = 1_000_000_000
# Version 00 ends after the flags; of a later one we know how it begins. ff is none.
_TRACEPARENT: Final = re.compile(
    r"(?!ff)(?:00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})"
    r"|(?!00)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?)"
)
_SAMPLED: Final = "01"
EXPORT_TIMEOUT_S: Final = (
    2.0  # for one batch, with all its tries: the end of a process waits for it
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The place of one request in its trace. Ids are lower-case hex digits, never all zero."""

    trace_id: str  # 32 digits
    span_id: str  # 16: the request's own span
    parent_id: str | None = None  # the span of who sent it; None: the trace begins here
    flags: str = _SAMPLED  # as they came

    @classmethod
    def begin(cls, traceparent: str | None, chance: Random) -> "TraceContext":
        """A new span: in the trace that the header names, or in one of its own."""
        span_id = _new_id(chance, 16)
        parent = _parsed(traceparent or "")
        if parent is None:
            return cls(trace_id=_new_id(chance, 32), span_id=span_id)
        trace_id, parent_id, flags = parent
        return cls(trace_id=trace_id, span_id=span_id, parent_id=parent_id, flags=flags)

    @property
    def traceparent(self) -> str:
        """The header for whoever the request is sent on to."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def _parsed(traceparent: str) -> tuple[str, str, str] | None:
    """Trace id, span id and flags; None for what is no traceparent."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    trace_id, span_id, flags = (one for one in found.groups() if one is not None)
    return (trace_id, span_id, flags) if int(trace_id, 16) and int(span_id, 16) else None


def _new_id(chance: Random, num_digits: int) -> str:
    return f"{chance.getrandbits(4 * num_digits) or 1:0{num_digits}x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """The moments of one request: `arrived_unix_s` absolute, the rest seconds after it.

    None: it never got so far. `attributes` hold no prompt, answer or key.
    """

    arrived_unix_s: float
    queued_at_s: float | None = None  # it took its place in line, or was granted at once
    granted_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    ended_at_s: float
    is_failed: bool = False
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    begin_s: float
    end_s: float


def stages(times: RequestTimes) -> Iterator[Stage]:
    """The stages a request went through, back to back, from arrival to its end."""
    moments = (
        ("door", 0.0),
        ("line", times.queued_at_s),
        ("prefill", times.granted_at_s),
        ("decode", times.first_token_at_s),
        ("stream", times.last_token_at_s),
    )
    reached = [(name, moment) for name, moment in moments if moment is not None]
    ends = [*(moment for _, moment in reached[1:]), times.ended_at_s]
    for (name, begin_s), end_s in zip(reached, ends, strict=True):
        yield Stage(name, begin_s, max(begin_s, end_s))


class Tracing(Protocol):
    """Where finished requests are told."""

    def record(self, times: RequestTimes, context: TraceContext) -> None: ...

    def close(self) -> None:
        """Send what is still held back, for at most a few seconds."""


def new_tracing(endpoint: str | None, *, service: str) -> Tracing | None:
    """Tracing to an OTLP/HTTP collector such as http://127.0.0.1:4318/v1/traces; None: nobody
    wants it. Raises ConfigError when the extra is not installed.
    """
    if endpoint is None:
        return None
    try:
        # Imported here: an extra that most installations do without.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from kvota.telemetry.otel import OtelTracing
    except ImportError as error:
        raise ConfigError(
            f"trace_endpoint needs OpenTelemetry ({error}); install it with "
            "`pip install 'kvota[tracing]'`, or leave trace_endpoint out."
        ) from error
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    return OtelTracing(BatchSpanProcessor(exporter), service=service)


def nanoseconds(times: RequestTimes, offset_s: float) -> int:
    """Absolute nanoseconds of a moment of the request, as OpenTelemetry counts."""
    return int((times.arrived_unix_s + offset_s) * _NS)
