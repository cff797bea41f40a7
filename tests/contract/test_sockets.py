"""Connections that no client library makes. Whatever comes, the server answers the next one."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest

from kvota.edge import connection
from tests.support.http_client import CHAT, COMPLETIONS, Reply, checked_error
from tests.support.live_node import MODEL, LiveNode, live_node, until
from tests.support.raw_http import RawConnection, post_bytes

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
MEGABYTE = 10**6


@pytest.fixture
def raw(node: LiveNode) -> Iterator[RawConnection]:
    with RawConnection(node.port) as opened:
        yield opened


def status_and_error(answer: bytes) -> tuple[int, str | None]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), checked_error(msgspec.json.decode(body))["code"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # a TLS hello
        b"hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x00" * 1000,
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
    ],
)
def test_what_is_not_http_is_told_so_and_closed(raw: RawConnection, garbage: bytes) -> None:
    raw.send(garbage)
    assert status_and_error(raw.read_all()) == (400, "invalid_request")


def test_headers_without_end_are_431(raw: RawConnection) -> None:
    raw.send(b"GET /health HTTP/1.1\r\n")
    try:
        for i in range(2000):
            raw.send(b"x-%d: %s\r\n" % (i, b"y" * 100))
    except (BrokenPipeError, ConnectionResetError):
        return  # it has been refused while we were still sending
    assert status_and_error(raw.read_all()) == (431, "headers_too_large")


def test_one_giant_header_is_431(raw: RawConnection) -> None:
    raw.send(b"GET /health HTTP/1.1\r\nx-a: " + b"y" * 70_000 + b"\r\n\r\n")
    assert status_and_error(raw.read_all()) == (431, "headers_too_large")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"])
def test_dawdling_over_headers_ends_the_connection(
    node: LiveNode, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", 0.05)
    with RawConnection(node.port) as slow:
        slow.send(sent)
        assert b"200" not in slow.read_all()


def test_a_body_over_the_limit_is_413_before_it_has_all_come() -> None:
    with live_node(max_body_bytes=10_000) as node:
        with RawConnection(node.port) as raw:
            raw.send(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1000000000\r\n\r\n{")
            head = raw.read_until(b"}}")
            assert b" 413 " in head
        with RawConnection(node.port) as raw:
            raw.send(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(20):
                raw.send(b"3e8\r\n" + b" " * 1000 + b"\r\n")
            assert b" 413 " in raw.read_until(b"}}")
        assert node.complete("hi", max_tokens=1).status == 200


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_body_in_pieces_is_read_whole(raw: RawConnection, size: int) -> None:
    content = post_bytes(COMPLETIONS, BODY).partition(b"\r\n\r\n")[2]
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    raw.send(head + b"transfer-encoding: chunked\r\n\r\n")
    for at in range(0, len(content), size):
        piece = content[at : at + size]
        raw.send(b"%x\r\n%s\r\n" % (len(piece), piece))
    raw.send(b"0\r\n\r\n")
    assert b" 200 " in raw.read_until(b"}}")


def test_requests_sent_ahead_are_answered_in_order(raw: RawConnection) -> None:
    """Pipelining"""
    raw.send(post_bytes(COMPLETIONS, BODY) + post_bytes(COMPLETIONS, {**BODY, "prompt": []}))
    raw.send(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answers = raw.read_all()
    places = [answers.index(mark) for mark in (b"text_completion", b"`prompt`", b'"status":"ok"')]
    assert places == sorted(places)
    assert answers.count(b"HTTP/1.1 ") == 3


def test_a_client_that_shuts_its_sending_side_ends_its_request(node: LiveNode) -> None:
    """A half-closed connection counts as closed: nobody can tell it from one that is gone."""
    with RawConnection(node.port) as raw, node.stage.held() as gate:
        raw.send(post_bytes(COMPLETIONS, {**BODY, "max_tokens": 500}))
        gate.wait_for_step()
        raw.socket.shutdown(1)
        until(lambda: raw.port not in node.client_ports, "the close to be seen")
    node.wait_idle()


def test_a_body_that_never_comes_holds_nothing(node: LiveNode) -> None:
    num_tasks = node.num_tasks()
    with RawConnection(node.port) as raw:
        raw.send(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{")
        until(lambda: node.num_tasks() > num_tasks, "the request to be read")
    until(lambda: node.num_tasks() <= num_tasks, "its task to end")
    assert "Traceback" not in node.log


def test_a_thousand_connections_cut_at_any_moment_leave_nothing_behind() -> None:
    """C01, C02, D04"""
    chance = random.Random(11)
    with live_node(max_num_batched_tokens=64, max_waiting_queue=2000) as node:
        assert node.complete("hi", max_tokens=2).status == 200
        node.wait_idle()
        num_tasks, process = node.num_tasks(), psutil.Process()
        _cut_many(node, chance, 200)
        node.wait_idle()
        warm = process.memory_info().rss
        _cut_many(node, chance, 800)
        node.wait_idle()
        until(lambda: node.num_tasks() <= num_tasks, "every task to end")
        until(lambda: len(node.client_ports) <= 2, "every connection to be closed")
        assert process.memory_info().rss < warm + 30 * MEGABYTE
        assert node.metrics()["kvota_kv_blocks_held_after_abort"] == 0
        assert "Traceback" not in node.log
        assert node.chat(max_tokens=2).status == 200


def _cut_many(node: LiveNode, chance: random.Random, count: int) -> None:
    """Open `count` connections, eight at a time, and drop each at a moment of its own."""

    def cut(seed: int) -> None:
        own = random.Random(seed)
        path = own.choice([CHAT, COMPLETIONS])
        fields = {"max_tokens": own.choice([1, 20, 300]), "stream": own.random() < 0.7}
        body = {**BODY, **fields, "n": own.choice([1, 1, 2])}
        if path == CHAT:
            body = {**node.chat_body("x" * own.choice([1, 300])), **fields}
        request = post_bytes(path, body)
        with RawConnection(node.port) as raw:
            raw.send(request[: own.choice([len(request), own.randrange(1, len(request))])])
            raw.socket.settimeout(own.choice([0.001, 0.01, 0.05]))
            try:
                for _ in range(own.randrange(4)):
                    raw.socket.recv(own.choice([10, 1000]))
            except TimeoutError:
                pass
            raw.close(reset=own.random() < 0.5)

    seeds = [chance.getrandbits(32) for _ in range(count)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cut, seeds))


def test_too_many_connections_are_refused_politely(
    node: LiveNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECTIONS_MAX", len(node.client_ports) + 1)
    with RawConnection(node.port) as first, RawConnection(node.port) as second:
        answer = second.read_all()
        assert status_and_error(answer) == (503, "too_many_connections")
        assert b"retry-after: 1" in answer
        first.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in first.read_until(b"ok")


def test_a_reply_names_its_request(node: LiveNode) -> None:
    reply: Reply = node.post(COMPLETIONS, BODY, x_request_id="mine-1")
    assert reply.headers["x-kvota-request-id"] == "mine-1"
    until(lambda: '"request_id": "mine-1"' in node.log, "the line of its record")
