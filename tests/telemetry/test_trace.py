"""One trace per request, with a span for each stage that it reached."""

import sys
import threading
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvota.core.errors import ConfigError
from kvota.telemetry.otel import OtelTracing
from kvota.telemetry.trace import RequestTimes, Stage, TraceContext, new_tracing, stages

WHOLE = RequestTimes(
    arrived_unix_s=1000.0, queued_at_s=0.125, granted_at_s=0.5, first_token_at_s=1.0,
    last_token_at_s=3.0, ended_at_s=3.25, attributes={"kvota.model": "m", "kvota.lane": "short"},
)  # fmt: skip


def recorded(times: RequestTimes, traceparent: str | None = None) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    tracing.record(times, TraceContext.begin(traceparent, Random(1)))
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


TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("header", [f"00-{TRACE_ID}-{SPAN_ID}-01", f"42-{TRACE_ID}-{SPAN_ID}-01-x"])
def test_the_clients_trace_is_gone_on_with(header: str) -> None:
    request = recorded(WHOLE, header)["request"]
    assert request.context is not None
    assert request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert f"{request.parent.span_id:016x}" == SPAN_ID


def test_who_a_request_is_sent_on_to_is_told_the_span_that_is_recorded_later() -> None:
    context = TraceContext.begin(None, Random(1))
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    next_hop = TraceContext.begin(context.traceparent, Random(2))
    tracing.record(WHOLE, next_hop)
    tracing.record(WHOLE, context)
    tracing.close()
    inner, outer = [span for span in exporter.get_finished_spans() if span.name == "request"]
    assert inner.context is not None
    assert outer.context is not None
    assert inner.parent is not None
    assert inner.context.trace_id == outer.context.trace_id
    assert inner.parent.span_id == outer.context.span_id != inner.context.span_id
    assert outer.parent is None


def test_what_the_client_does_not_want_sampled_is_not_and_others_hear_of_it() -> None:
    context = TraceContext.begin(f"00-{TRACE_ID}-{SPAN_ID}-00", Random(1))
    assert context.traceparent.startswith(f"00-{TRACE_ID}-")
    assert context.traceparent.endswith("-00")
    assert recorded(WHOLE, f"00-{TRACE_ID}-{SPAN_ID}-00") == {}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        "00-0-0-0",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-x",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
    ],
)
def test_a_malformed_traceparent_begins_a_trace_anew(header: str) -> None:
    request = recorded(WHOLE, header)["request"]
    assert request.parent is None
    assert request.context is not None
    assert f"{request.context.trace_id:032x}" != TRACE_ID


@given(st.text(max_size=80), st.integers())
def test_any_header_gives_a_context_that_can_be_sent_on(header: str, seed: int) -> None:
    context = TraceContext.begin(header, Random(seed))
    again = TraceContext.begin(context.traceparent, Random(seed + 1))
    assert (again.trace_id, again.parent_id) == (context.trace_id, context.span_id)


def test_a_failure_is_marked() -> None:
    times = RequestTimes(arrived_unix_s=0.0, ended_at_s=0.01, is_failed=True)
    assert recorded(times)["request"].status.is_ok is False


def test_a_collector_that_is_gone_does_not_keep_a_process() -> None:
    is_over = threading.Event()

    class Stuck(SpanProcessor):
        def shutdown(self) -> None:
            is_over.wait()

    OtelTracing(Stuck(), close_timeout_s=0.01).close()
    assert not is_over.is_set()
    is_over.set()


def test_nobody_asked_means_nothing_is_made() -> None:
    assert new_tracing(None, service="x") is None


def test_without_the_extra_the_operator_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"kvota\[tracing\]"):
        new_tracing("http://127.0.0.1:1/v1/traces", service="x")
