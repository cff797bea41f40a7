"""Ends of a connection: the client's, the application's, the server's."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from kvota.core.errors import ClientClosed
from kvota.edge import connection
from kvota.edge.connection import BoundedConnection
from kvota.edge.exchange import Exchange
from kvota.edge.settings import EdgeSettings
from tests.edge.test_attacks import (
    GET,
    LENGTH,
    PATIENCE_S,
    POST,
    App,
    echo,
    plain_echo,
    say,
    seen,
    serving,
    statuses,
)


@contextlib.asynccontextmanager
async def open_server(app: App, **options: str) -> AsyncIterator[tuple[int, ServerState]]:
    """As `serving`, and what the server knows of its connections."""
    config = Config(app, http=BoundedConnection, lifespan="off", **options)  # type: ignore[arg-type]
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: BoundedConnection(config, state, {}), "127.0.0.1", 0
    )
    yield server.sockets[0].getsockname()[1], state
    server.close()
    async with asyncio.timeout(PATIENCE_S):
        while state.connections or state.tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("app", [echo, plain_echo])
@pytest.mark.parametrize("sent", [LENGTH[:-1], LENGTH[:30], b"", LENGTH])
async def test_who_sends_no_more_is_gone_whatever_was_sent(app: App, sent: bytes) -> None:
    """Even a whole request may stay without an answer; it never gets half of one."""
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
    assert seen(answer) in ([], [b"POST /a abc"])
    assert answer == b"" or answer.endswith((b"abc>\r\n0\r\n\r\n", b"abc>"))


async def test_more_than_the_declared_body_is_the_next_request_and_no_body() -> None:
    async with serving(echo) as port:
        answer = await say(port, LENGTH + b"SMUGGLED" + GET)
    assert seen(answer) == [b"POST /a abc"]


@pytest.mark.parametrize("is_begun", [False, True])
async def test_an_application_that_breaks_ends_the_connection(is_begun: bool) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        if is_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("broken")

    async with serving(broken) as port:
        answer = await say(port, LENGTH + GET)
    assert statuses(answer) == ([200] if is_begun else [500])
    assert not answer.endswith(b"0\r\n\r\n")  # its client must not take it for whole


async def test_an_application_that_never_answers_is_told_that_its_client_left() -> None:
    here, told = asyncio.Event(), asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        here.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()

    async with serving(wait) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(LENGTH)
        await asyncio.wait_for(here.wait(), PATIENCE_S)
        writer.close()
        await asyncio.wait_for(told.wait(), PATIENCE_S)


async def test_a_shutdown_ends_idle_connections_and_answers_whatever_has_come() -> None:
    here, may_end = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, EdgeSettings())
        body = await exchange.body()
        here.set()
        await may_end.wait()
        await exchange.send_whole(200, b"<%b>" % body)

    async with open_server(slow) as (port, state):
        idle = asyncio.create_task(say(port))
        half = asyncio.create_task(say(port, GET[:10]))
        ahead = asyncio.create_task(say(port, LENGTH + LENGTH))
        await asyncio.wait_for(here.wait(), PATIENCE_S)
        while len(state.connections) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for one in list(state.connections):
            one.shutdown()
        assert await idle == await half == b""
        may_end.set()
        answer = await ahead
    assert seen(answer) == [b"abc", b"abc"]
    assert answer.count(b"connection: close") == 1


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (LENGTH[:-1], [503]),
        (POST + b"transfer-encoding: chunked\r\n\r\n3\r\nab", [503]),
        (LENGTH + LENGTH[:-1], [200]),
    ],
)
async def test_a_shutdown_does_not_wait_for_the_rest_of_a_body(
    sent: bytes, answered: list[int]
) -> None:
    """Nor does its client hear of a mistake of ours."""
    may_end, left = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, EdgeSettings())
        with contextlib.suppress(ClientClosed):
            body = await exchange.body()
            await may_end.wait()
            await exchange.send_whole(200, b"<%b>" % body)
        left.set()

    async with open_server(slow) as (port, state):
        half = asyncio.create_task(say(port, sent))
        while not state.tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for one in list(state.connections):
            one.shutdown()
        may_end.set()
        answer = await half
        await asyncio.wait_for(left.wait(), PATIENCE_S)
    assert statuses(answer) == answered
    assert (b'"code":"draining"' in answer) == (answered == [503])


@pytest.mark.parametrize(("trusted", "wanted"), [("127.0.0.1", b"9.9.9.9"), ("", b"127.0.0.1")])
async def test_a_forwarded_address_counts_only_from_whom_is_trusted(
    trusted: str, wanted: bytes
) -> None:
    async def who(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, EdgeSettings())
        await exchange.send_whole(200, b"<%b>" % scope["client"][0].encode())

    forwarded = b"x-forwarded-for: 9.9.9.9\r\n"
    async with open_server(who, forwarded_allow_ips=trusted) as (port, _):
        answer = await say(port, GET.replace(b"host", forwarded + b"host"))
        trailer = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
        hidden = await say(port, trailer + forwarded + b"\r\n")
    assert (seen(answer), seen(hidden)) == ([wanted], [b"127.0.0.1"])


async def test_connections_beyond_the_limit_are_refused_and_the_others_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "CONNECTIONS_MAX", 1)
    async with open_server(echo) as (port, state):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        while not state.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert statuses(await say(port)) == [503]
        writer.close()
        while state.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert statuses(await say(port, GET)) == [200]


async def test_a_body_that_trickles_in_behind_its_answer_does_not_keep_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.2)

    async def hasty(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<no>"})

    async with serving(hasty) as port:
        head = POST + b"content-length: 1000000\r\n\r\n"
        answer = await say(port, head, *[b"x"] * 5)
    assert seen(answer) == [b"no"]
