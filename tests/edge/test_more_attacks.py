"""What a client may smuggle in or hold: trailers, half a body, an answer that it does not take."""

import asyncio
import gc
import weakref

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from kvota.edge import connection, cycle
from kvota.edge.connection import BoundedConnection
from kvota.edge.exchange import Exchange
from kvota.edge.settings import EdgeSettings
from tests.edge.test_attacks import (
    GET,
    LENGTH,
    PATIENCE_S,
    POST,
    Ear,
    echo,
    plain_echo,
    say,
    seen,
    serving,
    statuses,
)

GET_ON = b"GET /a HTTP/1.1\r\n\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n"


async def test_a_trailer_is_never_taken_for_a_header() -> None:
    """It may arrive before the application has begun; a proxy that drops a header lets it pass."""

    async def show(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, EdgeSettings())
        await exchange.body()
        names = b" ".join(name for name, _ in scope["headers"])
        await exchange.send_whole(200, b"<%b>" % names)

    async with serving(show) as port:
        trailer = b"0\r\nx-kvota-tenant: somebody\r\n\r\n"
        sent = CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        assert seen(await say(port, sent + trailer)) == [b"host transfer-encoding connection"]


@pytest.mark.parametrize("start", [b"0\r\nx: ", b"2;x="], ids=["a trailer", "a chunk's extension"])
async def test_what_is_neither_head_nor_body_is_bounded_as_well(start: bytes) -> None:
    async with serving(echo) as port:
        answer = await say(port, CHUNKED + start, *[b"y" * 20_000] * 10)
    assert statuses(answer) in ([], [431])  # it may be lost, with all that was not read
    assert seen(answer) == []


UPGRADE = POST + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n"


@pytest.mark.parametrize(
    "rest",
    [
        b"content-length: 3\r\n\r\nabc",
        b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
    ],
    ids=["length", "chunks"],
)
@pytest.mark.parametrize("app", [echo, plain_echo])
async def test_a_request_that_asks_for_another_protocol_keeps_its_body(
    app: object, rest: bytes
) -> None:
    """Java's client asks for h2c with every request."""
    sent = UPGRADE + rest
    async with serving(app) as port:  # type: ignore[arg-type]
        cuts = range(len(UPGRADE) - 2, len(sent), 5)
        answers = await asyncio.gather(*(say(port, sent[:cut], sent[cut:] + GET) for cut in cuts))
    assert {tuple(seen(one)) for one in answers} == {(b"POST /a abc",)}
    assert all(b"connection: close" in one for one in answers)


@pytest.mark.parametrize("behind", [LENGTH, UPGRADE + b"content-length: 3\r\n\r\nxyz"])
@pytest.mark.parametrize("cut", [0, 3])
async def test_what_follows_a_declined_upgrade_is_no_part_of_its_body(
    behind: bytes, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = UPGRADE + b"content-length: 3\r\n\r\nabc"
    sent = first + behind.replace(b"abc", b"xyz")
    async with serving(echo) as port:
        answer = await say(port, sent[: len(first) - cut], sent[len(first) - cut :])
    assert seen(answer) == [b"POST /a abc"]
    assert not caplog.records


async def test_a_broken_body_behind_a_declined_upgrade_is_refused() -> None:
    async with serving(echo) as port:
        answer = await say(port, UPGRADE + b"transfer-encoding: chunked\r\n\r\n", b"zz\r\n")
    assert statuses(answer) == [400]


async def test_a_cut_head_before_a_large_body_does_not_make_the_next_head_long() -> None:
    body = b"b" * 90_000
    request = POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    async with serving(echo) as port:
        answer = await say(port, request[:9], request[9:] + GET[:10], GET[10:])
    assert seen(answer) == [b"POST /a " + body, b"GET /next "]


@pytest.mark.parametrize("version", [b"0.9", b"1.0", b"2.0"])
async def test_a_client_of_another_version_gets_no_chunks_and_no_interim_answer(
    version: bytes,
) -> None:
    head = b"POST /a HTTP/%b\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n" % version
    async with serving(plain_echo) as port:
        answer = await say(port, head, b"abc")
    assert statuses(answer) == [200]
    assert answer.endswith(b"\r\n\r\n<POST /a abc>")


TARGETS = [b"/\xc3\xa9", b"/\xc3\xa9?a", b"http://[::/", b"http://h:99999999/", b"a", b""]


@pytest.mark.parametrize("target", TARGETS)
async def test_a_target_that_is_none_is_the_clients_fault(target: bytes) -> None:
    async with serving(echo) as port:
        answer = await say(port, b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
    assert statuses(answer) == [400]


async def test_requests_sent_ahead_do_not_pile_up_however_often_one_is_answered() -> None:
    """Each answer used to let in another read, of some thousand requests."""

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, EdgeSettings())
        await exchange.body()
        async with exchange.watched():
            await asyncio.sleep(0.002)
            ahead = next(iter(state.connections))._ahead  # type: ignore[union-attr]
            lengths.append(len(ahead))
            await exchange.send_whole(200, b"{}")

    lengths: list[int] = []
    state = ServerState()
    config = Config(slow, http=BoundedConnection, lifespan="off")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedConnection(config, state, {}), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    one_read = b"GET / HTTP/1.1\r\n\r\n" * 500
    for _ in range(8):
        writer.write(one_read)
        await asyncio.sleep(0.01)
    async with asyncio.timeout(PATIENCE_S):
        while len(lengths) < 30:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    writer.transport.abort()
    server.close()
    assert max(lengths[10:]) <= lengths[10]


async def test_of_one_large_read_no_more_requests_are_made_than_may_wait() -> None:
    """A read may hold 14,000; each of them is kilobytes when it waits."""

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        nums_ahead.append(len(live._ahead))
        await plain_echo(scope, receive, send)

    nums_ahead: list[int] = []
    config = Config(slow, http=BoundedConnection, lifespan="off")
    live = BoundedConnection(config, ServerState(), {})
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: live, "127.0.0.1", 0)
    _, ear = await loop.create_connection(Ear, *server.sockets[0].getsockname())
    async with asyncio.timeout(PATIENCE_S):
        while live._transport is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        num = 3_000
        live.data_received((GET_ON * num)[:-1])
        live.data_received(GET_ON[-1:] + GET)
        await ear.is_over.wait()
    server.close()
    assert len(seen(ear.heard)) == len(nums_ahead) == num + 1
    assert max(nums_ahead) < 300, "those of one slice, and a few"


async def test_who_leaves_behind_requests_sent_ahead_is_noticed() -> None:
    gone = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, EdgeSettings())
        await exchange.body()
        async with exchange.watched():
            exchange.on_gone = gone.set
            await gone.wait()

    async with serving(wait) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(LENGTH)
        await asyncio.sleep(0.05)  # it runs
        writer.write(LENGTH)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await asyncio.wait_for(gone.wait(), PATIENCE_S)


@pytest.mark.parametrize("is_closing", [False, True])
async def test_the_end_of_an_answer_that_nobody_takes_does_not_keep_its_connection(
    is_closing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little is left for a pause in writing, so no application waits for it."""
    monkeypatch.setattr(connection, "FLUSH_TIMEOUT_S", 0.2)
    lost = asyncio.Event()

    async def fill(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        # More than the kernel takes, in one piece: the answer is complete at once.
        await send({"type": "http.response.body", "body": b"x" * 30_000_000})
        lost.set()

    async with serving(fill, keep_alive_s=1) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET if is_closing else LENGTH)
        await asyncio.wait_for(lost.wait(), PATIENCE_S)
        monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", 0.2)  # `_is_cut` sends empty lines
        async with asyncio.timeout(PATIENCE_S):
            while not _is_cut(writer):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        writer.transport.abort()


def _is_cut(writer: asyncio.StreamWriter) -> bool:
    """Without reading: a reset shows when something is sent."""
    writer.write(b"\r\n")
    return writer.transport.is_closing()


async def test_an_answer_without_an_exchange_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cycle, "SEND_TIMEOUT_S", 0.2)
    over = asyncio.Event()

    async def talk(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(40):
            await send({"type": "http.response.body", "body": b"x" * 10**6, "more_body": True})
        over.set()

    async with serving(talk) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(LENGTH)
        await asyncio.wait_for(over.wait(), PATIENCE_S)
        writer.transport.abort()


async def test_a_closed_connection_is_collected_and_its_timer_with_it() -> None:
    refs: list[weakref.ref[BoundedConnection]] = []
    state = ServerState()
    config = Config(echo, http=BoundedConnection, lifespan="off")

    def connect() -> BoundedConnection:
        one = BoundedConnection(config, state, {})
        refs.append(weakref.ref(one))
        return one

    loop = asyncio.get_running_loop()
    server = await loop.create_server(connect, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for sent in (GET, LENGTH + GET, UPGRADE + b"content-length: 1\r\n\r\na", b"garbage\r\n\r\n"):
        await say(port, sent)
    server.close()
    async with asyncio.timeout(PATIENCE_S):
        while state.connections or state.tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    gc.collect()
    assert [one() for one in refs] == [None] * 4
