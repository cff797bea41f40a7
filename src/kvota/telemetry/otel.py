"""Finished requests as OpenTelemetry spans. Needs the extra `tracing`; imported only with it."""

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvota.telemetry.trace import RequestTimes, nanoseconds, stages

FLUSH_TIMEOUT_MS = 3_000


class OtelTracing:
    """Implements `kvota.telemetry.trace.Tracing`. Its provider is its own, never the global one."""

    def __init__(self, processor: SpanProcessor, *, service: str = "kvota") -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvota")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, times: RequestTimes, traceparent: str | None) -> None:
        parent = self._propagator.extract({"traceparent": traceparent} if traceparent else {})
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
        self._provider.force_flush(FLUSH_TIMEOUT_MS)
        self._provider.shutdown()
