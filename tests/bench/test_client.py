"""The load generator reads a stream the same however its bytes arrive."""

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.client import (
    Answer,
    Asked,
    BenchFailed,
    Dechunker,
    ask,
    complete,
    complete_in_turn,
    complete_together,
    completion_body,
)

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 2},
}
EVENTS = [
    b": queued position=1 eta_s=1\n\n",
    b'data: {"choices":[{"text":"a"}]}\n\n',
    b'data: {"choices":[{"text":"b"}]}\n\n',
    b'data: {"choices":[],' + json.dumps({"usage": USAGE}, separators=(",", ":"))[1:].encode(),
    b"\n\n",
    b"data: [DONE]\n\n",
]


def chunked(parts: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@given(
    parts=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
def test_chunks_are_joined_wherever_the_reads_cut(parts: list[bytes], cuts: list[int]) -> None:
    wire = chunked(parts)
    bounds = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    reader = Dechunker()
    body = b"".join(reader.feed(wire[a:b]) for a, b in pairwise(bounds))
    assert body == b"".join(parts)


async def answered(writes: Sequence[bytes], num_requests: int = 1) -> list[Answer]:
    """What the client makes of a server that answers every request with these writes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        for write in writes:
            writer.write(write)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        body = completion_body("m", [1, 2], 3)
        return await complete_together(port, [body] * num_requests)


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_an_answer_has_its_tokens_from_the_usage(size: int) -> None:
    wire = HEAD + chunked(EVENTS)
    pieces = [wire[i : i + size] for i in range(0, len(wire), size)]
    for answer in await answered(pieces, num_requests=3):
        assert answer.num_tokens == 3
        assert answer.num_prompt_tokens == 5
        assert answer.num_cached_tokens == 2
        assert answer.sent_s < answer.first_s <= answer.last_s


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{\"error\": \"full\"}", "full"),
        (HEAD + chunked(EVENTS[:2]), "no whole stream"),
        (b"", "no whole stream"),
    ],
)  # fmt: skip
async def test_anything_else_than_a_whole_stream_is_an_error(wire: bytes, message: str) -> None:
    with pytest.raises(BenchFailed, match=message):
        await answered([wire])


async def test_a_client_asks_again_once_its_answer_is_whole() -> None:
    open_now = 0
    most_open = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most_open
        await reader.readuntil(b"\r\n\r\n")
        open_now += 1
        most_open = max(most_open, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        writer.write(HEAD + chunked(EVENTS))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        bodies = [completion_body("m", [1, 2], 3)] * 7
        answers = await complete_in_turn(server.sockets[0].getsockname()[1], bodies, 3)
    assert (len(answers), most_open) == (7, 3)
    ends = sorted(answer.last_s for answer in answers)
    later = sorted(answer.sent_s for answer in answers)[3:]
    assert all(sent > end for sent, end in zip(later, ends, strict=False))


async def test_a_refused_connection_is_an_error() -> None:
    with pytest.raises(ConnectionRefusedError):
        await complete(1, b"{}")


async def asked_of(wire: bytes, *, leave_after: int | None = None) -> Asked:
    """What is known of one request, to a server that answers `wire` and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(wire)
        if leave_after is None:
            writer.close()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        asked = await ask(server.sockets[0].getsockname()[1], b"{}")
        if leave_after is not None:
            await asked.heard(leave_after)
            asked.leave()
        await asked.ended
        return asked


async def test_an_answer_that_is_no_stream_is_whole_with_its_usage() -> None:
    body = json.dumps({"choices": [{"text": "ab"}], "usage": USAGE}).encode()
    asked = await asked_of(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    assert (asked.answer.status, asked.answer.is_whole) == (200, True)
    assert asked.answer.num_tokens == 3


async def test_a_refusal_has_its_status_and_code() -> None:
    body = b'{"error": {"message": "m", "type": "t", "param": null, "code": "queue_full"}}'
    asked = await asked_of(b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + body)
    answer = asked.answer
    assert (answer.status, answer.code, answer.is_whole) == (503, "queue_full", False)
    assert answer.ended_s > answer.sent_s


async def test_an_error_within_a_stream_has_its_code_and_no_whole_answer() -> None:
    failed = b'data: {"error":{"message":"m","type":"t","param":null,"code":"request_timeout"}}\n\n'
    asked = await asked_of(HEAD + chunked([*EVENTS[:2], failed]))
    assert (asked.answer.status, asked.answer.code) == (200, "request_timeout")
    assert (asked.answer.is_whole, asked.answer.num_events) == (False, 1)


async def test_whoever_leaves_is_known_to_have_left() -> None:
    asked = await asked_of(HEAD + chunked(EVENTS[:3])[:-5], leave_after=2)
    assert asked.is_left
    assert (asked.answer.num_events, asked.answer.is_whole) == (2, False)


async def test_whoever_has_the_whole_answer_does_not_leave() -> None:
    asked = await asked_of(HEAD + chunked(EVENTS)[:-5], leave_after=2)
    assert asked.answer.is_whole != asked.is_left
