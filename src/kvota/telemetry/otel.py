"""Finished requests as OpenTelemetry spans. Needs the extra `tracing`; imported only with it."""

import threading

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from kvota.telemetry.trace import RequestTimes, TraceContext, nanoseconds, stages

CLOSE_TIMEOUT_S = 4.0


class OtelTracing:
    """Implements `kvota.telemetry.trace.Tracing`. Its provider is its own, never the global one.

    A span's id was given out when the request was sent on, before there is a span. For one thread.
    """

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        service: str = "kvota",
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self._close_timeout_s = close_timeout_s
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvota")

    def record(self, times: RequestTimes, context: TraceContext) -> None:
        parent = _parent_of(context)
        self._ids.give(context)
        request = self._tracer.start_span(
            "request",
            context=parent,
            kind=trace.SpanKind.SERVER,
            attributes=dict(times.attributes),
            start_time=nanoseconds(times, 0.0),
        )
        if times.is_failed:
            request.set_status(trace.Status(trace.StatusCode.ERROR))
        inside = trace.set_span_in_context(request, parent)
        for stage in stages(times):
            span = self._tracer.start_span(
                stage.name, context=inside, start_time=nanoseconds(times, stage.begin_s)
            )
            span.end(nanoseconds(times, stage.end_s))
        request.end(nanoseconds(times, max(0.0, times.ended_at_s)))

    def close(self) -> None:
        # What is held back is sent first, and that is not bounded: a collector may be gone.
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(self._close_timeout_s)


class _Ids(RandomIdGenerator):
    """Gives the next span the ids of a context, and random ones to the others."""

    def __init__(self) -> None:
        self._trace_id: int | None = None
        self._span_id: int | None = None

    def give(self, context: TraceContext) -> None:
        self._trace_id = int(context.trace_id, 16)
        self._span_id = int(context.span_id, 16)

    def generate_trace_id(self) -> int:
        given, self._trace_id = self._trace_id, None
        return given or super().generate_trace_id()

    def generate_span_id(self) -> int:
        given, self._span_id = self._span_id, None
        return given or super().generate_span_id()


def _parent_of(context: TraceContext) -> Context:
    """The context of who has sent the request; empty where the trace begins."""
    if context.parent_id is None:
        return Context()
    sender = trace.SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.parent_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(context.flags, 16)),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(sender), Context())
