"""What a node believes of a gateway, and what it tells one, over real sockets."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvota.edge.trust import USAGE_COMMENT, UsageReport, read_usage
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
        order: list[str] = []

        def ask(tenant: str, weight: str) -> None:
            headers: dict[str, Any] = {"x_kvota_tenant": tenant, "x_kvota_weight": weight}
            assert node.post(CHAT, node.chat_body(max_tokens=8), **headers).status == 200
            order.append(tenant)

        with ThreadPoolExecutor() as pool, node.stage.held():
            calls = []
            for tenant, weight in (("x", "1"), ("a", "1"), ("b", "10"), ("a", "1"), ("b", "10")):
                calls.append(pool.submit(ask, tenant, weight))
                until(lambda: node.num_open == len(calls), "it to be accepted")
            node.stage.gate.open()
            for call in calls:
                call.result()
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
