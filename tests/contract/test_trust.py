"""What a node believes of a gateway, and what it tells one, over real sockets."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvota.core.clock import ManualClock
from kvota.edge.trust import USAGE_COMMENT, UsageReport, read_usage
from tests.support.gateway_node import gateway_node
from tests.support.http_client import CHAT, Reply
from tests.support.live_node import LiveNode, live_node, until
from tests.support.stage import says

Tenants = Mapping[str, str]  # request id to tenant


@pytest.fixture
def trusting() -> Iterator[LiveNode]:
    with live_node(trust_gateway=True) as node:
        yield node


@contextmanager
def running(node: LiveNode, tenants: Tenants) -> Iterator[None]:
    """Requests that run as long as the block does."""
    node.stage.step_s = 0.02
    body = node.chat_body(max_tokens=900, ignore_eos=True)
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(node.post, CHAT, body, x_request_id=id_, x_kvota_tenant=tenant)
            for id_, tenant in tenants.items()
        ]
        until(lambda: node.num_open == len(tenants), "all to be accepted")
        yield
        for id_ in tenants:
            node.http.delete(f"/admin/requests/{id_}")
        for call in calls:
            assert call.result().status == 410


def seen(reply: Reply) -> set[str]:
    return {request["client_id"] for request in reply.json["data"]}


def test_tenants_see_and_cancel_only_their_own_requests(trusting: LiveNode) -> None:
    with running(trusting, {"one": "a", "two": "b"}):
        assert seen(trusting.get("/v1/requests", x_kvota_tenant="a")) == {"one"}
        everybody = trusting.get("/admin/requests").json["data"]
        assert {one["client_id"]: one["tenant"] for one in everybody} == {"one": "a", "two": "b"}
        strangers = trusting.http.delete("/v1/requests/two", headers={"x-kvota-tenant": "a"})
        assert strangers.status_code == 404
        own = trusting.http.delete("/v1/requests/two", headers={"x-kvota-tenant": "b"})
        assert own.status_code == 200


def test_a_port_for_clients_believes_nobody() -> None:
    with live_node() as node, running(node, {"one": "a", "two": "b"}):
        assert seen(node.get("/v1/requests", x_kvota_tenant="a")) == {"one", "two"}
        everybody = node.get("/admin/requests").json["data"]
        assert {one["tenant"] for one in everybody} == {"anonymous"}


def test_weights_decide_who_is_served_next() -> None:
    """The heavier tenant's second request goes before the lighter one's."""
    with live_node(trust_gateway=True, max_running_requests=1) as node:

        def ask(tenant: str, weight: str) -> None:
            headers: dict[str, Any] = {"x_kvota_tenant": tenant, "x_kvota_weight": weight}
            assert node.post(CHAT, node.chat_body(max_tokens=8), **headers).status == 200

        with ThreadPoolExecutor() as pool, node.stage.held():
            calls = []
            for tenant, weight in (("x", "1"), ("a", "1"), ("b", "10"), ("a", "1"), ("b", "10")):
                calls.append(pool.submit(ask, tenant, weight))
                until(lambda: node.num_open == len(calls), "it to be accepted")
            node.stage.gate.open()
            for call in calls:
                call.result()
        order = [line["tenant"] for line in lines_of(node, len(calls))]
        assert order.index("b") < len(order) - 1 - order[::-1].index("a")
        assert order[-1] == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_the_gateway_is_told_what_a_request_took(trusting: LiveNode, stream: bool) -> None:
    trusting.stage.play = says("hello")
    reply = trusting.chat(stream=stream)
    given = reply.headers.get("x-kvota-usage", "").encode()
    if stream:
        head, _, given = reply.content.rpartition(USAGE_COMMENT)
        assert head.endswith(b"data: [DONE]\n\n")
    report = read_usage(given)
    assert report is not None
    assert report.output_tokens == 6
    assert report.prompt_tokens > 0
    course = report.course
    assert course is not None
    assert (course.lane, course.band, course.num_preemptions) == ("short", "interactive", 0)
    assert course.kv_block_s > 0
    assert course.queued_s is not None
    assert course.first_token_s is not None
    assert course.time_per_output_token_s is not None


LINE = {
    "tenant", "model", "lane", "band", "outcome", "prompt_tokens", "cached_tokens",
    "output_tokens", "queued_s", "first_token_s", "time_per_output_token_s", "num_preemptions",
    "kv_block_s", "total_s", "backend",
}  # fmt: skip


def lines_of(node: LiveNode, num: int) -> list[dict[str, Any]]:
    """The log lines of the requests so far; waits until there are `num`."""

    def read() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in node.log.splitlines() if '"request"' in line]
        return [line for line in lines if line.get("endpoint") == "chat.completions"]

    until(lambda: len(read()) >= num, "the log lines")
    return read()


def test_the_one_line_of_a_gateway_tells_how_each_request_went() -> None:
    clock = ManualClock(50.0)
    with gateway_node(clock=clock, max_running_requests=1, request_timeout_s=5.0) as node:
        assert node.chat(max_tokens=3).status == 200
        assert node.chat(max_tokens=3, stream=True).status == 200
        with ThreadPoolExecutor() as pool, node.stage.held() as gate:
            late = pool.submit(node.chat, max_tokens=50)
            gate.allow(3)
            gate.wait_for_step()
            clock.advance(6.0)
            gate.allow(2)
            assert late.result().error["code"] == "request_timeout"
        whole, streamed, failed = lines_of(node, 3)
    assert set(whole) >= LINE, LINE - set(whole)
    assert set(streamed) >= LINE, LINE - set(streamed)
    assert whole["output_tokens"] == streamed["output_tokens"] == 3
    assert (failed["outcome"], failed["lane"]) == ("request_timeout", "short")
    assert failed["output_tokens"] >= 2
    assert failed["kv_block_s"] > 0


def test_an_error_is_no_first_token() -> None:
    clock = ManualClock(50.0)
    limits: dict[str, Any] = {"request_timeout_s": 5.0, "max_num_batched_tokens": 64}
    with gateway_node(clock=clock, heartbeat_s=0.01, **limits) as node:
        body = node.chat_body("x" * 500, max_tokens=50)
        with node.stage.held() as gate, node.stream(CHAT, body) as late:  # a heartbeat opened it
            gate.wait_for_step()
            clock.advance(6.0)
            gate.allow(2)
            assert late.next_chunk()["error"]["code"] == "request_timeout"
        [line] = lines_of(node, 1)
    assert "first_token_s" not in line
    assert line["lane"] == "short"


def test_the_gateway_is_told_of_streams_that_fail(trusting: LiveNode) -> None:
    poison = 299
    trusting.stage.play = says("ab", poison, end=False)
    trusting.stage.poison = frozenset({poison})
    reply = trusting.chat(stream=True)
    last = reply.content.rstrip().splitlines()[-1]
    assert isinstance(read_usage(last.removeprefix(USAGE_COMMENT)), UsageReport)


@pytest.mark.parametrize("stream", [False, True])
def test_clients_of_a_port_are_told_nothing_of_it(node: LiveNode, stream: bool) -> None:
    reply = node.chat(max_tokens=3, stream=stream)
    assert "x-kvota-usage" not in reply.headers
    assert USAGE_COMMENT not in reply.content
