"""A collector of OpenTelemetry spans over HTTP: what was sent to it can be looked at."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Ids are hex digits; times are seconds of the Unix clock."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    begin_s: float
    end_s: float
    is_failed: bool
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector:
    """`url` is where to send to."""

    port: int
    spans: list[Span] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            collector.spans.extend(_read(ExportTraceServiceRequest.FromString(content)))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Nobody wants to read it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _read(request: Any) -> Iterator[Span]:
    for resource in request.resource_spans:
        service = _plain(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    service=service,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex() or None,
                    begin_s=span.start_time_unix_nano / 1e9,
                    end_s=span.end_time_unix_nano / 1e9,
                    is_failed=span.status.code == 2,
                    attributes=_plain(span.attributes),
                )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
