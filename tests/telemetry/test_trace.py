"""One trace per request, with a span for each stage that it reached."""

import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvota.core.errors import ConfigError
from kvota.telemetry.otel import OtelTracing
from kvota.telemetry.trace import NoTracing, RequestTimes, Stage, new_tracing, stages

WHOLE = RequestTimes(
    arrived_unix_s=1000.0, queued_at_s=0.125, granted_at_s=0.5, first_token_at_s=1.0,
    last_token_at_s=3.0, ended_at_s=3.25, attributes={"kvota.model": "m", "kvota.lane": "short"},
)  # fmt: skip


def recorded(times: RequestTimes, traceparent: str | None = None) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    tracing.record(times, traceparent)
    tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_the_stages_fill_the_request_without_gaps() -> None:
    assert list(stages(WHOLE)) == [
        Stage("door", 0.0, 0.125),
        Stage("line", 0.125, 0.5),
        Stage("prefill", 0.5, 1.0),
        Stage("decode", 1.0, 3.0),
        Stage("stream", 3.0, 3.25),
    ]


def test_a_request_that_was_turned_away_was_only_at_the_door() -> None:
    assert list(stages(RequestTimes(arrived_unix_s=0.0, ended_at_s=0.01))) == [
        Stage("door", 0.0, 0.01)
    ]


def test_a_request_that_expired_in_line_was_never_read() -> None:
    times = RequestTimes(arrived_unix_s=0.0, queued_at_s=0.5, ended_at_s=30.0, is_failed=True)
    assert [stage.name for stage in stages(times)] == ["door", "line"]


def test_spans_hang_under_one_request_with_its_times() -> None:
    spans = recorded(WHOLE)
    request = spans.pop("request")
    assert set(spans) == {"door", "line", "prefill", "decode", "stream"}
    assert request.parent is None
    assert request.attributes == {"kvota.model": "m", "kvota.lane": "short"}
    for span in spans.values():
        assert span.parent is not None
        assert request.context is not None
        assert span.parent.span_id == request.context.span_id
        assert span.context is not None
        assert span.context.trace_id == request.context.trace_id
    assert (request.start_time, request.end_time) == (1000_000_000_000, 1003_250_000_000)
    assert (spans["prefill"].start_time, spans["prefill"].end_time) == (
        1000_500_000_000,
        1001_000_000_000,
    )


def test_the_clients_trace_is_gone_on_with() -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    request = recorded(WHOLE, f"00-{trace_id}-{span_id}-01")["request"]
    assert request.context is not None
    assert request.parent is not None
    assert f"{request.context.trace_id:032x}" == trace_id
    assert f"{request.parent.span_id:016x}" == span_id


@pytest.mark.parametrize("given", ["", "nonsense", "00-0-0-0", "ff-" + "a" * 32 + "-" + "b" * 16])
def test_a_malformed_traceparent_is_passed_over(given: str) -> None:
    assert recorded(WHOLE, given)["request"].parent is None


def test_a_failure_is_marked() -> None:
    times = RequestTimes(arrived_unix_s=0.0, ended_at_s=0.01, is_failed=True)
    assert recorded(times)["request"].status.is_ok is False


def test_nobody_asked_means_nothing_is_made() -> None:
    tracing = new_tracing(None)
    tracing.record(WHOLE, None)
    tracing.close()
    assert isinstance(tracing, NoTracing)


def test_without_the_extra_the_operator_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"kvota\[tracing\]"):
        new_tracing("http://127.0.0.1:1/v1/traces")
