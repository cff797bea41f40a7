"""A client that stops reading, over real sockets: it loses its KV, its record says why."""

import socket
from collections.abc import Iterator

import pytest

from tests.support.http_client import CHAT
from tests.support.live_node import LiveNode, live_node, until
from tests.support.raw_http import RawConnection, post_bytes
from tests.support.stage import Stage

RECEIVE_BYTES = 4096
# Megabytes, far more than the kernel takes in where it was told to take little.
LONG = {"n": 2, "max_tokens": 900, "logprobs": True, "top_logprobs": 20}


@pytest.fixture
def node() -> Iterator[LiveNode]:
    with live_node(Stage(num_blocks=1024), send_timeout_s=0.2) as opened:
        yield opened


@pytest.fixture
def raw(node: LiveNode) -> Iterator[RawConnection]:
    node.take_little()
    with RawConnection(node.port, receive_bytes=RECEIVE_BYTES) as opened:
        yield opened


def wait_for_record(node: LiveNode) -> None:
    until(lambda: '"outcome": "slow_reader"' in node.log, "the line of its record")


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_reader_that_stalls_gives_its_blocks_back(
    node: LiveNode, raw: RawConnection, is_stream: bool
) -> None:
    raw.send(post_bytes(CHAT, node.chat_body("hi") | LONG | {"stream": is_stream}))
    until(lambda: node.num_running > 0, "the request to run")
    wait_for_record(node)
    node.wait_idle()
    until(lambda: raw.port not in node.client_ports, "its connection to be cut")
    assert node.metrics()["kvota_requests_total{model=tiny,outcome=slow_reader}"] == 1
    assert "ERROR" not in node.log
    assert node.chat("hi", max_tokens=2).status == 200


def test_a_reader_that_is_cut_off_sees_a_broken_answer_not_a_short_one(
    node: LiveNode, raw: RawConnection
) -> None:
    raw.send(post_bytes(CHAT, node.chat_body("hi") | LONG | {"stream": True}))
    wait_for_record(node)
    answer = raw.read_all()
    assert b"[DONE]" not in answer
    assert not answer.endswith(b"0\r\n\r\n")


def test_a_reader_that_takes_a_break_gets_everything(node: LiveNode) -> None:
    """However slow it is, what counts is that it takes something in time."""
    with socket.create_connection(("127.0.0.1", node.port), timeout=60) as slow:
        slow.sendall(post_bytes(CHAT, node.chat_body("hi") | {"max_tokens": 900, "stream": True}))
        until(lambda: node.num_open == 0, "the answer to be complete")
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            part = slow.recv(65536)
            assert part
            seen += part
    assert b"[DONE]" in seen
