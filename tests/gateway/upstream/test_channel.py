"""A connection to a backend, with a transport that a test plays."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.gateway.upstream.channel import (
    BUFFERED_BYTES_MAX,
    HEAD_BYTES_MAX,
    Channel,
    ChannelLost,
    NotHttp,
)

OK = b"HTTP/1.1 200 OK\r\n"
WAIT_S = 20.0


class Wire:
    """What a channel does to its socket."""

    def __init__(self) -> None:
        self.written = b""
        self.is_aborted = False
        self.is_paused = False
        self.num_unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


def asked() -> tuple[Channel, Wire]:
    """A connection on which a request has gone out."""
    channel, wire = Channel(), Wire()
    transport: Any = wire
    channel.connection_made(transport)
    channel.send(b"GET / HTTP/1.1\r\n\r\n")
    return channel, wire


async def read_all(channel: Channel) -> bytes:
    content = b""
    while piece := await channel.piece(WAIT_S):
        content += piece
    return content


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=5), st.lists(st.integers(1, 40)))
def test_however_the_bytes_are_cut_the_answer_is_the_same(
    chunks: list[bytes], cuts: list[int]
) -> None:
    sent = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks)
    sent = OK + b"X-One: 1\r\ntransfer-encoding: chunked\r\n\r\n" + sent + b"0\r\n\r\n"

    async def run() -> None:
        channel, _ = asked()
        rest = sent
        for cut in cuts:
            if rest[:cut]:
                channel.data_received(rest[:cut])
            rest = rest[cut:]
        if rest:
            channel.data_received(rest)
        await channel.head(WAIT_S)
        assert channel.status == 200
        assert (b"x-one", b"1") in channel.headers
        assert await read_all(channel) == b"".join(chunks)
        assert channel.is_reusable

    asyncio.run(run())


async def test_an_interim_answer_is_passed_over() -> None:
    channel, _ = asked()
    channel.data_received(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
    channel.data_received(OK + b"content-length: 2\r\n\r\nok")
    await channel.head(WAIT_S)
    assert channel.status == 200
    assert channel.headers == [(b"content-length", b"2")]
    assert await read_all(channel) == b"ok"
    assert channel.is_reusable


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    channel, _ = asked()
    channel.data_received(OK + b"\r\nhalf")
    assert await channel.piece(WAIT_S) == b"half"
    channel.connection_lost(None)
    assert await channel.piece(WAIT_S) == b""
    assert not channel.is_reusable


@pytest.mark.parametrize("head", [b"content-length: 9\r\n", b"transfer-encoding: chunked\r\n"])
async def test_an_answer_with_a_length_that_stops_is_lost(head: bytes) -> None:
    channel, _ = asked()
    channel.data_received(OK + head + b"\r\n2\r\nab\r\n")
    assert await channel.piece(WAIT_S)
    channel.connection_lost(None)
    with pytest.raises(ChannelLost):
        await channel.piece(WAIT_S)


async def test_what_has_arrived_is_given_out_before_the_loss_is_told() -> None:
    channel, _ = asked()
    channel.data_received(OK + b"content-length: 9\r\n\r\nab")
    channel.connection_lost(ConnectionResetError("reset"))
    assert await channel.piece(WAIT_S) == b"ab"
    with pytest.raises(ChannelLost, match="reset"):
        await channel.piece(WAIT_S)


@pytest.mark.parametrize("content", [b"SSH-2.0\r\n", OK + b"x: " + b"y" * HEAD_BYTES_MAX])
async def test_what_is_no_head_of_an_answer(content: bytes) -> None:
    channel, wire = asked()
    channel.data_received(content)
    with pytest.raises(NotHttp):
        await channel.head(WAIT_S)
    assert wire.is_aborted


@pytest.mark.parametrize(
    "more",
    [
        OK + b"content-length: 0\r\n\r\n",
        b"noise",
        OK + b"content-length: 1\r\n\r\nx",
        OK + b"content-length: 5\r\n",  # it would begin the next answer
        b"H",
    ],
)
async def test_nothing_is_asked_again_where_an_answer_has_more_than_its_length(
    more: bytes,
) -> None:
    channel, wire = asked()
    channel.data_received(OK + b"content-length: 2\r\n\r\nok" + more)
    await channel.head(WAIT_S)
    assert await read_all(channel) == b"ok"
    assert not channel.is_reusable
    assert wire.is_aborted


async def test_what_comes_unasked_ends_an_idle_connection() -> None:
    channel, wire = asked()
    channel.data_received(OK + b"content-length: 0\r\n\r\n")
    assert channel.is_reusable
    channel.data_received(OK + b"content-length: 0\r\n\r\n")
    assert wire.is_aborted
    assert not channel.is_reusable


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n", OK + b"connection: close\r\n"])
async def test_a_backend_that_closes_is_not_asked_again(head: bytes) -> None:
    channel, _ = asked()
    channel.data_received(head + b"content-length: 2\r\n\r\nok")
    assert await read_all(channel) == b"ok"
    assert not channel.is_reusable


async def test_a_reader_that_falls_behind_stops_the_socket() -> None:
    channel, wire = asked()
    channel.data_received(OK + b"content-length: %d\r\n\r\n" % (2 * BUFFERED_BYTES_MAX))
    channel.data_received(b"x" * (BUFFERED_BYTES_MAX + 1))
    assert wire.is_paused
    await channel.piece(WAIT_S)
    assert not wire.is_paused


async def test_line_ends_behind_an_answer_are_no_other_answer() -> None:
    channel, _ = asked()
    channel.data_received(OK + b"content-length: 2\r\n\r\nok\r\n")
    assert await read_all(channel) == b"ok"
    assert channel.is_reusable


async def test_an_answer_before_its_request_has_gone_out_ends_the_connection() -> None:
    """The backend, which has refused a large body, may leave it where it is."""
    channel, wire = asked()
    wire.num_unsent = 1
    channel.data_received(b"HTTP/1.1 413 Too large\r\ncontent-length: 2\r\n\r\nno")
    assert await read_all(channel) == b"no"
    assert not channel.is_reusable


async def test_an_encoding_that_is_not_chunked_ends_with_its_connection() -> None:
    channel, _ = asked()
    channel.data_received(OK + b"transfer-encoding: identity\r\n\r\nall")
    assert await channel.piece(WAIT_S) == b"all"
    channel.connection_lost(None)
    assert await channel.piece(WAIT_S) == b""


async def test_a_trailer_without_an_end_is_cut_off() -> None:
    channel, wire = asked()
    channel.data_received(OK + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx: ")
    assert await channel.piece(WAIT_S) == b"ok"
    channel.data_received(b"y" * (HEAD_BYTES_MAX + 1))
    assert wire.is_aborted
    with pytest.raises(ChannelLost, match="too long"):
        await channel.piece(WAIT_S)


async def test_a_long_body_is_not_taken_for_a_long_head() -> None:
    channel, wire = asked()
    channel.data_received(OK + b"transfer-encoding: chunked\r\n\r\n")
    for _ in range(5):
        channel.data_received(b"%x\r\n%b\r\n" % (HEAD_BYTES_MAX, b"y" * HEAD_BYTES_MAX))
        assert await channel.piece(WAIT_S)
    channel.data_received(b"0\r\nx: 1\r\n\r\n")
    assert await channel.piece(WAIT_S) == b""
    assert not wire.is_aborted


async def test_patience_ends() -> None:
    channel, _ = asked()
    with pytest.raises(TimeoutError):
        await channel.head(0.01)
    channel.data_received(OK + b"content-length: 2\r\n\r\n")
    with pytest.raises(TimeoutError):
        await channel.piece(0.01)
    channel.data_received(b"ok")
    assert await read_all(channel) == b"ok"


async def test_each_wait_has_its_own_patience_whatever_the_waits_before_it_had() -> None:
    channel, _ = asked()
    for patience_s in (WAIT_S, 0.01, float("inf"), 0.02):
        waiting = asyncio.create_task(channel.head(patience_s))
        if patience_s < 1:
            with pytest.raises(TimeoutError):
                await waiting
            continue
        await asyncio.sleep(0.03)  # longer than the short ones: their timer has fired, or may yet
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    channel.data_received(OK + b"content-length: 1\r\n\r\n")
    await channel.head(WAIT_S)
    piece = asyncio.create_task(channel.piece(WAIT_S))
    await asyncio.sleep(0.03)
    channel.data_received(b"x")
    assert await piece == b"x"
    channel.close()
