"""What a request can ask of its connection, on a real socket."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from starlette.types import Receive, Scope, Send

from kvota.edge.exchange import Exchange
from kvota.edge.listening import http_server
from kvota.edge.settings import EdgeSettings

PATIENCE_S = 60.0
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
Work = Callable[[Exchange], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(work: Work) -> AsyncIterator[int]:
    """A server of `work`, and its port."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await work(Exchange(scope, receive, send, EdgeSettings()))
            return
        for _ in range(2):  # start-up and shutdown
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})

    server = http_server(app)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        running = asyncio.create_task(server.serve(sockets=[taken]))
        while not server.started:  # noqa: ASYNC110  # uvicorn tells nobody
            await asyncio.sleep(0.01)
        yield taken.getsockname()[1]
        server.should_exit = True
        await asyncio.wait_for(running, PATIENCE_S)


async def test_a_client_that_goes_away_is_noticed_while_the_work_goes_on() -> None:
    gone, over = asyncio.Event(), asyncio.Event()

    async def work(exchange: Exchange) -> None:
        assert await exchange.body() == b"{}"
        async with exchange.watched():
            exchange.on_gone = gone.set
            await gone.wait()
        over.set()

    async with serving(work) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"{}")
        await writer.drain()
        writer.close()
        await asyncio.wait_for(over.wait(), PATIENCE_S)


async def test_a_client_that_has_gone_before_anybody_asks_is_noticed_at_once() -> None:
    may_watch, over = asyncio.Event(), asyncio.Event()
    here = asyncio.Event()

    async def work(exchange: Exchange) -> None:
        await exchange.body()
        here.set()
        await may_watch.wait()
        async with exchange.watched():
            assert exchange.is_gone
        over.set()

    async with serving(work) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"{}")
        await asyncio.wait_for(here.wait(), PATIENCE_S)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""  # closed there as well
        may_watch.set()
        await asyncio.wait_for(over.wait(), PATIENCE_S)
        writer.close()


async def test_an_empty_answer_is_an_answer() -> None:
    async def work(exchange: Exchange) -> None:
        await exchange.body()
        await exchange.send_whole(400, b"")

    async with serving(work) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(HEAD + b"{}")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert b"content-length: 0" in head.lower()
        writer.close()


@pytest.mark.parametrize("pieces", [[b"{}"], [b"{", b"}"]])
async def test_a_body_is_read_whole_however_it_comes(pieces: list[bytes]) -> None:
    async def work(exchange: Exchange) -> None:
        body = await exchange.body()
        async with exchange.watched():
            await exchange.send_whole(200, body)

    async with serving(work) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        for piece in pieces:
            await asyncio.sleep(0.02)
            writer.write(piece)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert await reader.readexactly(2) == b"{}"
        writer.close()
