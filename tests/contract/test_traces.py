"""One trace per request, through the gateway's process and the node's, at a collector of spans."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_client import CHAT, Reply
from tests.support.live_node import until
from tests.support.otlp_collector import Collector, Span, otlp_collector
from tests.support.serve_process import ServeProcess, serve_process

STAGES = ["door", "line", "prefill", "decode", "stream"]
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SOON_S = 60.0  # spans are sent in batches
CLOCKS_APART_S = 2.0  # of two processes that note their ends when a busy machine lets them


@dataclass(frozen=True, slots=True)
class Traced:
    """`kvota serve` with a node, a collector, and the journal that is written."""

    process: ServeProcess
    collector: Collector
    journal: Path

    def ask(self, name: str, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        body = self.process.chat_body(**{"max_tokens": 6, "ignore_eos": True, **fields})
        return self.process.post(CHAT, body, x_request_id=name, **(headers or {}))

    def line(self, name: str) -> dict[str, Any]:
        """The log's line of a request, which only the gateway writes."""
        until(lambda: len(self._lines(name)) == 1, "the line of the request")
        return self._lines(name)[0]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(one) for one in self.process.errors.splitlines() if one[:1] == "{"]
        return [one for one in lines if one.get("request_id") == name]

    def spans(self, trace_id: str, number: int) -> list[Span]:
        until(lambda: len(self.collector.trace(trace_id)) >= number, "the spans", SOON_S)
        return self.collector.trace(trace_id)


@pytest.fixture(scope="module")
def traced(long_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    file, journal = folder / "kvota.toml", folder / "journal.jsonl"
    with otlp_collector() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms; 5 s unless told otherwise
        file.write_text(
            f'[server]\ntrace_endpoint = "{collector.url}"\n[gateway]\njournal = "{journal}"\n'
        )
        flags = ("--kv-memory", "32MiB", "--config", str(file))
        with serve_process(long_model, *flags) as process:
            yield Traced(process, collector, journal)


def of(spans: list[Span], service: str) -> tuple[Span, dict[str, Span]]:
    """The span of the request in one process, and those in it by name."""
    [request] = [one for one in spans if one.service == service and one.name == "request"]
    inside = [one for one in spans if one.parent_id == request.span_id and one.service == service]
    return request, {one.name: one for one in inside}


def check_stages(request: Span, stages: dict[str, Span]) -> None:
    """One after the other, without gaps, from the beginning of the request to its end."""
    in_order = [stages[name] for name in STAGES]
    assert in_order[0].begin_s == pytest.approx(request.begin_s, abs=1e-6)
    for one, following in pairwise(in_order):
        assert one.begin_s <= one.end_s
        assert one.end_s == pytest.approx(following.begin_s, abs=1e-6)
    assert in_order[-1].end_s == pytest.approx(request.end_s, abs=1e-6)


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "body"])
def test_a_request_is_one_trace_through_gateway_and_node(traced: Traced, is_stream: bool) -> None:
    name = f"whole-{is_stream}"
    before_s = time.time()
    assert traced.ask(name, stream=is_stream).status == 200
    line = traced.line(name)
    spans = traced.spans(line["trace_id"], 2 + 2 * len(STAGES))
    gateway, gateway_stages = of(spans, "kvota-gateway")
    node, node_stages = of(spans, "kvota-node")
    assert len(spans) == 2 + len(gateway_stages) + len(node_stages)
    assert gateway.parent_id is None
    assert node.parent_id == gateway.span_id
    for request, stages in ((gateway, gateway_stages), (node, node_stages)):
        assert sorted(stages) == sorted(STAGES)
        check_stages(request, stages)
        assert request.attributes["request_id"] == name
        assert request.attributes["outcome"] == "completed"
        assert not request.is_failed
    assert before_s - CLOCKS_APART_S <= gateway.begin_s
    assert gateway.begin_s <= node.begin_s + CLOCKS_APART_S
    assert node.end_s <= gateway.end_s + CLOCKS_APART_S
    written = [json.loads(one) for one in traced.journal.read_text().splitlines()]
    [kept] = [one for one in written if one.get("id") == name]
    assert kept["at"] == pytest.approx(gateway.begin_s, abs=CLOCKS_APART_S)
    assert kept["output_tokens"] == gateway.attributes["output_tokens"] == 6


def test_the_clients_own_trace_goes_on(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
    assert traced.ask("theirs", headers).status == 200
    assert traced.line("theirs")["trace_id"] == TRACE_ID
    spans = traced.spans(TRACE_ID, 2 + 2 * len(STAGES))
    gateway, _ = of(spans, "kvota-gateway")
    node, _ = of(spans, "kvota-node")
    assert gateway.parent_id == SPAN_ID
    assert node.parent_id == gateway.span_id


def test_what_the_gateway_refuses_was_only_at_its_door(traced: Traced) -> None:
    assert traced.ask("wrong", max_tokens=-1).status == 400
    spans = traced.spans(traced.line("wrong")["trace_id"], 2)
    request, stages = of(spans, "kvota-gateway")
    assert (request.is_failed, request.attributes["status"]) == (True, 400)
    assert list(stages) == ["door"]


def test_what_the_node_refuses_was_at_both_doors(traced: Traced) -> None:
    assert traced.ask("long", max_tokens=10**6).status == 400
    spans = traced.spans(traced.line("long")["trace_id"], 5)
    gateway, gateway_stages = of(spans, "kvota-gateway")
    node, node_stages = of(spans, "kvota-node")
    assert sorted(gateway_stages) == ["door", "line"]
    assert list(node_stages) == ["door"]
    assert node.parent_id == gateway.span_id
    assert gateway.is_failed
    assert node.is_failed


def test_no_prompt_answer_or_key_is_in_any_span(traced: Traced) -> None:
    secret = "a prompt that nobody else may read"
    reply = traced.process.post(
        CHAT, {**traced.process.chat_body(secret), "max_tokens": 3}, x_request_id="secret"
    )
    assert reply.status == 200
    spans = traced.spans(traced.line("secret")["trace_id"], 2 + 2 * len(STAGES))
    told = json.dumps([span.attributes for span in spans])
    assert "nobody else" not in told
    assert "Bearer" not in told


def test_many_requests_are_many_traces_and_none_is_lost(traced: Traced) -> None:
    for number in range(20):
        assert traced.ask(f"many-{number}", max_tokens=2).status == 200

    def lines() -> list[str]:
        return [traced.line(f"many-{number}")["trace_id"] for number in range(20)]

    ids = set(lines())
    assert len(ids) == 20
    whole: Callable[[], bool] = lambda: all(  # noqa: E731
        len(traced.collector.trace(one)) == 2 + 2 * len(STAGES) for one in ids
    )
    until(whole, "all of them", SOON_S)
