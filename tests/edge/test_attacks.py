"""Bytes that try to make one connection say two things: cut anywhere, smuggled, or no HTTP at all.

The application answers each request with what it has read of it, so that every answer shows what
the server took for a request.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from kvota.edge import connection
from kvota.edge.connection import BoundedConnection
from kvota.edge.exchange import Exchange
from kvota.edge.settings import EdgeSettings

PATIENCE_S = 60.0
POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
GET = b"GET /next HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """By way of an Exchange."""
    exchange = Exchange(scope, receive, send, EdgeSettings())
    body = await exchange.body()
    async with exchange.watched():
        await asyncio.sleep(0)
        await exchange.send_whole(200, _seen(scope, body))


async def plain_echo(scope: Scope, receive: Receive, send: Send) -> None:
    """By ASGI's messages alone."""
    body, more = b"", True
    while more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": _seen(scope, body)})


def _seen(scope: Scope, body: bytes) -> bytes:
    return b"<%b %b %b>" % (scope["method"].encode(), scope["raw_path"], body)


@contextlib.asynccontextmanager
async def serving(app: App, keep_alive_s: int = 75) -> AsyncIterator[int]:
    """The connections of a server, without the rest of it. At the end nothing of them is left."""
    config = Config(app, http=BoundedConnection, lifespan="off", timeout_keep_alive=keep_alive_s)
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: BoundedConnection(config, state, {}), "127.0.0.1", 0, backlog=200
    )
    yield server.sockets[0].getsockname()[1]
    server.close()
    async with asyncio.timeout(PATIENCE_S):
        while state.connections or state.tasks:  # noqa: ASYNC110  # they tell nobody
            await asyncio.sleep(0.01)


@pytest.fixture(params=[echo, plain_echo], ids=["exchange", "asgi"])
async def port(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    async with serving(request.param) as number:
        yield number


class Ear(asyncio.Protocol):
    """Keeps what has come, also when the connection is then closed with a reset."""

    def __init__(self) -> None:
        self.heard = b""
        self.is_over = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over.set()


async def say(port: int, *pieces: bytes) -> bytes:
    """All that comes back until the server closes, maybe while something was still on its way."""
    loop = asyncio.get_running_loop()
    transport, ear = await loop.create_connection(Ear, "127.0.0.1", port)
    for piece in pieces:
        if transport.is_closing():
            break
        transport.write(piece)
        await asyncio.sleep(0.001)
    async with asyncio.timeout(PATIENCE_S):
        await ear.is_over.wait()
    return ear.heard


def seen(answer: bytes) -> list[bytes]:
    """What the application took for requests."""
    return [part.partition(b">")[0] for part in answer.split(b"<")[1:]]


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


LENGTH = POST + b"content-length: 3\r\n\r\nabc"
CHUNKS = (
    POST + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\ntrailer: z\r\n\r\n"
)


@pytest.mark.parametrize("request_", [LENGTH, CHUNKS])
async def test_a_request_is_the_same_wherever_it_is_cut(port: int, request_: bytes) -> None:
    sent = request_ + GET
    cuts = [*range(1, len(sent), 7), len(request_) - 1, len(request_)]
    answers = await asyncio.gather(*(say(port, sent[:cut], sent[cut:]) for cut in cuts))
    assert {tuple(seen(one)) for one in answers} == {(b"POST /a abc", b"GET /next ")}


async def test_requests_sent_ahead_are_answered_in_order_and_each_once(port: int) -> None:
    sent = b"".join(
        b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n%d" % (number, number % 10)
        for number in range(50)
    )
    answer = await say(port, sent + GET)
    wanted = [b"POST /%d %d" % (number, number % 10) for number in range(50)]
    assert seen(answer) == [*wanted, b"GET /next "]


SMUGGLING = {
    "both lengths": b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both, the other way": b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "a length with a sign": b"content-length: +3\r\n\r\nabc",
    "a length list": b"content-length: 3, 3\r\n\r\nabc",
    "no known coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked but not last": b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "space before a colon": b"content-length : 3\r\n\r\nabc",
    "a folded line": b"x: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    "bare line feeds": b"x: a\ncontent-length: 0\n\n",
    "a bare carriage return": b"x: a\rcontent-length: 0\r\n\r\n",
    "a control character": b"x: a\x01\r\ncontent-length: 0\r\n\r\n",
    "a chunk without its size": b"transfer-encoding: chunked\r\n\r\n\r\nabc\r\n0\r\n\r\n",
    "a chunk of huge size": b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "a chunk with a bare line feed": b"transfer-encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("rest", SMUGGLING.values(), ids=SMUGGLING.keys())
async def test_what_two_servers_might_read_differently_is_refused_and_closes(
    port: int, rest: bytes
) -> None:
    answer = await say(port, POST + rest + GET)
    assert statuses(answer) == [400]
    assert b'"code":"invalid_request"' in answer
    assert seen(answer) == []


async def test_garbage_behind_a_request_does_not_break_into_its_answer(port: int) -> None:
    answer = await say(port, LENGTH + b"\x00\x01\x02 garbage\r\n\r\n" + GET)
    assert statuses(answer) == [200]
    assert seen(answer) == [b"POST /a abc"]


async def test_a_broken_request_behind_others_takes_none_of_them_with_it(port: int) -> None:
    broken = POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n"
    answer = await say(port, LENGTH + LENGTH + broken + GET)
    assert seen(answer) == [b"POST /a abc"] * 2


async def test_a_connection_that_asks_to_become_another_stays_http_and_closes(port: int) -> None:
    upgrade = b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    answer = await say(port, upgrade + GET)
    assert seen(answer) == [b"GET /a "]
    assert b"connection: close" in answer


@pytest.mark.parametrize("size", [70_000, 800_000])
async def test_a_head_that_is_too_long_is_refused_however_it_comes(port: int, size: int) -> None:
    """The answer to what was not read may be lost, with all that was read."""
    head = b"GET / HTTP/1.1\r\nx: " + b"y" * size + b"\r\n\r\n"
    assert statuses(await say(port, head)) in ([], [431])
    pieces = [head[at : at + 20_000] for at in range(0, len(head), 20_000)]
    assert statuses(await say(port, *pieces)) in ([], [431])


async def test_a_head_behind_a_large_body_is_not_taken_for_a_long_one(port: int) -> None:
    body = b"b" * 200_000
    request = POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    answer = await say(port, request + GET[:10], GET[10:])
    assert seen(answer) == [b"POST /a " + body, b"GET /next "]


async def test_who_waits_for_100_continue_is_told_to_go_on(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(POST + b"expect: 100-continue\r\ncontent-length: 3\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc" + GET)
        assert seen(await reader.read()) == [b"POST /a abc", b"GET /next "]
    writer.close()


async def test_who_is_answered_instead_of_told_to_go_on_is_not_listened_to_any_more() -> None:
    """It may send the body or not, so what follows could be read as either."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(scope, receive, send, EdgeSettings()).send_whole(413, b"<too large>")

    async with serving(refuse) as port:
        answer = await say(port, POST + b"expect: 100-continue\r\ncontent-length: 999\r\n\r\n")
    assert statuses(answer) == [413]
    assert b"connection: close" in answer


async def test_a_client_of_http_1_0_gets_an_answer_that_ends_with_its_connection(
    port: int,
) -> None:
    answer = await say(port, b"GET /old HTTP/1.0\r\n\r\n")
    assert seen(answer) == [b"GET /old "]
    assert b"chunked" not in answer
    assert b"connection: close" in answer


async def test_a_head_request_is_answered_without_content(port: int) -> None:
    answer = await say(port, b"HEAD /h HTTP/1.1\r\nhost: x\r\n\r\n" + GET)
    assert statuses(answer) == [200, 200]
    assert seen(answer) == [b"GET /next "]


async def test_clients_that_leave_at_any_byte_leave_nothing_behind(port: int) -> None:
    """`serving` looks for what is left."""

    async def leave(at: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((CHUNKS + LENGTH)[:at])
        await asyncio.sleep(0)
        if at % 2:
            writer.transport.abort()
        else:
            writer.close()

    await asyncio.gather(*(leave(at) for at in range(1, len(CHUNKS + LENGTH), 3)))
    assert seen(await say(port, GET)) == [b"GET /next "]


@pytest.mark.parametrize("before", [b"", b"\r\n" * 5])
async def test_empty_lines_before_a_request_do_not_wind_up_its_clock(
    port: int, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen(await say(port, before + GET)) == [b"GET /next "]
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", 0.2)
    assert await say(port, *([before] * 3 if before else [b"G", b"E", b"T"])) == b""


async def test_a_connection_that_is_idle_for_too_long_is_closed() -> None:
    async with serving(echo, keep_alive_s=1) as port:
        assert seen(await say(port, LENGTH)) == [b"POST /a abc"]


async def test_a_header_of_ours_with_a_line_break_goes_nowhere() -> None:
    async def careless(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"x-name", b"a\r\nset-cookie: b")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async with serving(careless) as port:
        answer = await say(port, GET)
    assert statuses(answer) == [500]
    assert b"cookie" not in answer


async def test_who_stands_between_sees_all_that_is_said() -> None:
    async def between(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-between", b"1")]}
            await send(message)

        async def receive_less() -> Message:
            message = await receive()
            return {**message, "body": message["body"][:2]}

        await echo(scope, receive_less, send_more)

    async with serving(between) as port:
        answer = await say(port, LENGTH + GET)
    assert seen(answer) == [b"POST /a ab", b"GET /next "]
    assert answer.count(b"x-between: 1\r\n") == 2


@pytest.mark.parametrize("content", [b"too long", b"s"])
async def test_an_answer_that_is_not_as_long_as_it_says_ends_its_connection(content: bytes) -> None:
    async def wrong(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"3")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async with serving(wrong) as port:
        assert statuses(await say(port, LENGTH + GET)) == [500]


async def test_who_takes_no_more_keeps_nobody_else_waiting_and_is_cut_off() -> None:
    stalled = asyncio.Event()

    async def talk(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, EdgeSettings(send_timeout_s=0.2))
        await exchange.body()
        async with exchange.watched():
            exchange.on_gone = stalled.set
            with contextlib.suppress(Exception):
                while not exchange.is_gone:
                    await exchange.write(b"x" * 10**6)
        assert exchange.is_stalled

    async with serving(talk) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(LENGTH)
        await asyncio.wait_for(stalled.wait(), PATIENCE_S)
        writer.transport.abort()
