"""Clients that vanish without a word, at a node and through a gateway: what they hold is freed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from kvota.edge.liveness import notice_vanished
from tests.support.gateway_node import GatewayNode, gateway_node
from tests.support.http_client import CHAT
from tests.support.live_node import LiveNode, live_node, until
from tests.support.raw_http import RawConnection, post_bytes
from tests.support.vanishing import GONE_AFTER_S, on_linux, vanish

pytestmark = on_linux


@pytest.fixture(params=[live_node, gateway_node], ids=["node", "gateway"])
def node(request: pytest.FixtureRequest) -> Iterator[LiveNode]:
    make: Callable[..., AbstractContextManager[LiveNode]] = request.param
    with make(heartbeat_s=0.1) as opened:
        taken = opened.gateway._taken if isinstance(opened, GatewayNode) else opened._taken
        notice_vanished(taken, GONE_AFTER_S)
        yield opened


@pytest.mark.parametrize("is_stream", [True, False], ids=["heartbeats", "silence"])
def test_a_client_that_vanishes_ends_its_request(node: LiveNode, is_stream: bool) -> None:
    body = node.chat_body("hi") | {"max_tokens": 900, "stream": is_stream}
    with RawConnection(node.port) as raw, node.stage.held() as gate:
        raw.send(post_bytes(CHAT, body))
        gate.wait_for_step()
        if is_stream:
            raw.read_until(b": heartbeat")
        vanish(raw.socket)
        until(lambda: raw.port not in node.client_ports, "the connection to be given up")
    until(lambda: '"outcome": "client_closed"' in node.log, "the line of its record")
    node.wait_idle()
    assert "Traceback" not in node.log
    assert node.chat("hi", max_tokens=2).status == 200


@pytest.mark.parametrize("length", [0, 12, 150])
def test_a_client_that_vanishes_in_the_middle_of_a_request_holds_nothing(
    node: LiveNode, length: int
) -> None:
    with RawConnection(node.port) as raw:
        raw.send(post_bytes(CHAT, node.chat_body("hi"))[:length])
        until(lambda: raw.port in node.client_ports, "the connection")
        vanish(raw.socket)
        until(lambda: raw.port not in node.client_ports, "it to be given up")
    node.wait_idle()
