"""One trace per request, for OpenTelemetry: where its time went, as spans (extra `tracing`).

    request ├─ door ─┼─ line ─┼─ prefill ─┼─ decode ─────┼─ stream ┤
            arrived  in line   granted     first token    last      last byte
                                                          token     passed on

Spans are made when the request has ended, from the moments that were noted anyway, so a request in
flight pays nothing. A stage that a request did not reach has no span. W3C `traceparent` from the
client, or from the gateway, makes ours a child of theirs; a malformed one is passed over.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvota.core.errors import ConfigError

Attribute = str | int | float | bool
_NS: Final = 1_000_000_000


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

    def record(self, times: RequestTimes, traceparent: str | None) -> None: ...

    def close(self) -> None:
        """Send what is still held back, for at most a few seconds."""


class NoTracing:
    """Tracing that nobody asked for."""

    def record(self, times: RequestTimes, traceparent: str | None) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """There is nothing to send."""


def new_tracing(endpoint: str | None, *, service: str = "kvota") -> Tracing:
    """Tracing to an OTLP/HTTP collector such as http://127.0.0.1:4318/v1/traces.

    Raises ConfigError when the extra is not installed.
    """
    if endpoint is None:
        return NoTracing()
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
    return OtelTracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), service=service)


def nanoseconds(times: RequestTimes, offset_s: float) -> int:
    """Absolute nanoseconds of a moment of the request, as OpenTelemetry counts."""
    return int((times.arrived_unix_s + offset_s) * _NS)
