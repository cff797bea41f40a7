"""Connections to one backend: used again, closed when idle, never too many."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvloop

from kvota.gateway.upstream.channel import Channel
from kvota.gateway.upstream.pool import Address, Pool, address_of

PATIENCE_S = 60.0
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers every request, and counts."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.closed: asyncio.Queue[None] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.put_nowait(None)
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, Address]]:
    counting = Server()
    listening = await asyncio.start_server(counting.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    yield counting, Address("127.0.0.1", port)
    listening.close()


async def ask(channel: Channel) -> bytes:
    channel.send(b"GET / HTTP/1.1\r\n\r\n")
    await channel.head(PATIENCE_S)
    return await channel.piece(PATIENCE_S)


class LateServer:
    """Says all that matters, and ends its answer when it may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.is_left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER[:-1])
        ending = asyncio.create_task(self._end(writer))
        await reader.read()
        self.is_left.set()
        ending.cancel()
        writer.close()

    async def _end(self, writer: asyncio.StreamWriter) -> None:
        await self.may_end.wait()
        writer.write(ANSWER[-1:])


@pytest.fixture
async def late() -> AsyncIterator[tuple[LateServer, Address]]:
    made = LateServer()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    yield made, Address("127.0.0.1", listening.sockets[0].getsockname()[1])
    listening.close()


async def test_a_connection_whose_answer_ends_soon_is_kept(
    late: tuple[LateServer, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvota.gateway.upstream.pool.LINGER_S", PATIENCE_S)
    pool = Pool(late[1], connections_max=1, keep_alive_s=PATIENCE_S)
    channel = await pool.take(PATIENCE_S)
    assert await ask(channel) == b"o"
    pool.give_back(channel, sees_end=True)
    late[0].may_end.set()
    assert await pool.take(PATIENCE_S) is channel
    pool.close()


async def test_a_connection_whose_answer_does_not_end_is_closed(
    late: tuple[LateServer, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvota.gateway.upstream.pool.LINGER_S", 0.05)
    pool = Pool(late[1], connections_max=1, keep_alive_s=PATIENCE_S)
    channel = await pool.take(PATIENCE_S)
    assert await ask(channel) == b"o"
    pool.give_back(channel, sees_end=True)
    await asyncio.wait_for(late[0].is_left.wait(), PATIENCE_S)
    assert await pool.take(PATIENCE_S) is not channel
    pool.close()


async def test_a_connection_is_used_again_and_the_latest_first(
    server: tuple[Server, Address],
) -> None:
    pool = Pool(server[1], connections_max=2, keep_alive_s=PATIENCE_S)
    first, second = await pool.take(PATIENCE_S), await pool.take(PATIENCE_S)
    for channel in (first, second):
        assert await ask(channel) == b"ok"
        pool.give_back(channel)
        pool.give_back(channel)  # once is enough
    assert await pool.take(PATIENCE_S) is second
    assert await pool.take(PATIENCE_S) is first
    assert server[0].num_connections == 2
    pool.close()
    for _ in range(2):
        await asyncio.wait_for(server[0].closed.get(), PATIENCE_S)


async def test_what_was_idle_for_long_is_closed(server: tuple[Server, Address]) -> None:
    pool = Pool(server[1], connections_max=1, keep_alive_s=0.02)
    channel = await pool.take(PATIENCE_S)
    await ask(channel)
    pool.give_back(channel)
    await asyncio.wait_for(server[0].closed.get(), PATIENCE_S)
    again = await pool.take(PATIENCE_S)
    assert again is not channel
    pool.close()


async def test_an_answer_that_was_not_read_ends_its_connection(
    server: tuple[Server, Address],
) -> None:
    pool = Pool(server[1], connections_max=1, keep_alive_s=PATIENCE_S)
    channel = await pool.take(PATIENCE_S)
    channel.send(b"GET / HTTP/1.1\r\n\r\n")
    await channel.head(PATIENCE_S)
    pool.give_back(channel)
    await asyncio.wait_for(server[0].closed.get(), PATIENCE_S)
    pool.close()


async def test_a_place_is_waited_for_and_given_back(server: tuple[Server, Address]) -> None:
    pool = Pool(server[1], connections_max=1, keep_alive_s=PATIENCE_S)
    channel = await pool.take(PATIENCE_S)
    with pytest.raises(TimeoutError):
        await pool.take(0.01)
    waiting = asyncio.create_task(pool.take(PATIENCE_S))
    await ask(channel)
    pool.give_back(channel)
    assert await waiting is channel
    pool.close()


async def test_a_connection_that_cannot_be_opened_keeps_no_place() -> None:
    pool = Pool(Address("127.0.0.1", 1), connections_max=1, keep_alive_s=PATIENCE_S)
    for _ in range(3):
        with pytest.raises(OSError, match="refused"):
            await pool.take(PATIENCE_S)


async def test_idle_connections_can_be_closed_and_others_opened(
    server: tuple[Server, Address],
) -> None:
    pool = Pool(server[1], connections_max=1, keep_alive_s=PATIENCE_S)
    for number in (1, 2):
        channel = await pool.take(PATIENCE_S)
        assert await ask(channel) == b"ok"
        pool.give_back(channel)
        pool.close_idle()
        await asyncio.wait_for(server[0].closed.get(), PATIENCE_S)
        assert server[0].num_connections == number


async def test_who_waits_for_a_place_or_a_connection_gets_none_of_a_closed_pool(
    server: tuple[Server, Address],
) -> None:
    pool = Pool(server[1], connections_max=1, keep_alive_s=PATIENCE_S)
    asked = [asyncio.create_task(pool.take(PATIENCE_S)) for _ in range(2)]
    await asyncio.sleep(0)  # one connects, one waits
    pool.close()
    for one in asked:
        with pytest.raises(ConnectionAbortedError):
            await asyncio.wait_for(one, PATIENCE_S)


async def test_waiting_for_a_place_and_connecting_share_one_limit(
    server: tuple[Server, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(server[1], connections_max=1, keep_alive_s=PATIENCE_S)
    held = await pool.take(PATIENCE_S)
    given: list[float] = []

    async def opened(self: Pool, timeout_s: float) -> Channel:
        given.append(timeout_s)
        raise TimeoutError

    monkeypatch.setattr(Pool, "_opened", opened)
    waiting = asyncio.create_task(pool.take(PATIENCE_S))
    await asyncio.sleep(0)  # it waits for the place
    loop = asyncio.get_running_loop()
    real_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_s() + 5)  # and five seconds pass
    held.close()
    pool.give_back(held)
    with pytest.raises(TimeoutError):
        await waiting
    assert given[0] <= PATIENCE_S - 5
    pool.close()


async def test_of_several_addresses_a_silent_one_is_passed_over_and_remembered(
    server: tuple[Server, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, port = "127.0.0.2", server[1].port
    with contextlib.ExitStack() as full:
        taken = full.enter_context(socket.socket())
        taken.bind((silent, port))
        taken.listen(0)
        for _ in range(4):  # its queue is full: more are not answered
            waits = full.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex((silent, port))
        asked: list[str] = []

        async def two(self: object, host: str, port: int, **_: object) -> list[object]:
            asked.append(host)
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*kind, (name, port)) for name in (silent, "127.0.0.1")]

        monkeypatch.setattr(uvloop.Loop, "getaddrinfo", two)
        pool = Pool(Address("both.test", port), connections_max=2, keep_alive_s=PATIENCE_S)
        assert await ask(await pool.take(3.0)) == b"ok"
        began_s = asyncio.get_running_loop().time()
        assert await ask(await pool.take(PATIENCE_S)) == b"ok"
        assert asyncio.get_running_loop().time() - began_s < PATIENCE_S / 2, "it was tried again"
        assert asked == ["both.test"] * 2
        pool.close()


@pytest.mark.parametrize(
    ("url", "host", "port", "is_tls"),
    [
        ("http://x", "x", 80, False),
        ("https://x/v1", "x", 443, True),
        ("http://[::1]:8000/a", "::1", 8000, False),
        ("http://me:secret@x:1", "x", 1, False),
    ],
)
def test_addresses(url: str, host: str, port: int, is_tls: bool) -> None:
    address = address_of(url, unix_socket=None, verify_tls=True)
    assert (address.host, address.port, address.tls is not None) == (host, port, is_tls)


@pytest.mark.parametrize("url", ["http://", "http://x:abc", "http://x:99999"])
def test_urls_that_name_no_address(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        address_of(url, unix_socket=None, verify_tls=True)
