"""The generator sends on time whatever comes back, and says how each client ended."""

import asyncio
import json

import pytest

from bench.client import BenchFailed
from bench.desk_live_load import Job, LoadProcess, Seen, send_on_time
from bench.desk_live_mix import Ask

USAGE = {"prompt_tokens": 8, "completion_tokens": 2}
STREAM = b"".join(
    b"data: " + text + b"\n\n"
    for text in (
        b'{"choices":[{"text":"a"}]}',
        b'{"choices":[{"text":"b"}]}',
        b'{"choices":[],"usage":' + json.dumps(USAGE, separators=(",", ":")).encode() + b"}",
        b"[DONE]",
    )
)
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\n\r\n"
    + json.dumps(
        {"error": {"message": "m", "type": "t", "param": None, "code": "queue_full"}}
    ).encode()
)


class Toy:
    """Answers by the number of tokens asked for: 1 is refused, 2 streamed, 3 never ended."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.prompts.append(body["prompt"])
        if body["max_tokens"] == 3:
            await reader.read()  # until the client leaves
        writer.write(FULL if body["max_tokens"] == 1 else OK + STREAM)
        writer.close()


async def offered(asks: list[Ask], hang_s: float) -> tuple[list[Seen], Toy]:
    toy = Toy()
    server = await asyncio.start_server(toy.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        job = Job(port, "m", 1_000, asks, hang_s, "s")
        return await send_on_time(job, asyncio.Event()), toy


async def test_each_client_is_followed_to_its_own_end() -> None:
    asks = [Ask(0.0, 8, 3), Ask(0.0, 9, 1), Ask(0.05, 10, 2)]
    (hanging, refused, served), toy = await offered(asks, hang_s=1.5)
    assert hanging.is_hanging
    assert hanging.ended_s > 1.4
    assert (refused.status, refused.code, refused.is_hanging) == (503, "queue_full", False)
    assert (served.status, served.is_whole, served.num_tokens) == (200, True, 2)
    assert served.first_s is not None
    assert 0 < served.lag_s < served.first_s <= served.ended_s
    assert sorted(len(prompt) for prompt in toy.prompts) == [8, 9, 10]


async def test_a_server_that_is_gone_is_seen_by_each_client() -> None:
    job = Job(1, "m", 1_000, [Ask(0.0, 8, 2)], 1.0, "s")
    (seen,) = await send_on_time(job, asyncio.Event())
    assert seen.status is None
    assert seen.code is not None
    assert seen.code.startswith("connection")


async def test_what_is_not_due_when_it_is_over_is_not_sent() -> None:
    is_over = asyncio.Event()
    job = Job(1, "m", 1_000, [Ask(0.0, 8, 2), Ask(1e6, 8, 2)], 1.0, "s")
    is_over.set()
    assert await send_on_time(job, is_over) == []


def test_the_time_per_token_leaves_the_first_one_out() -> None:
    assert Seen(0.0, 3.0, 1.0, 3.0, num_tokens=5).per_token_s == 0.5
    assert Seen(0.0, 3.0).per_token_s == 0.0


def test_a_job_is_done_in_another_process() -> None:
    with LoadProcess(Job(1, "m", 1_000, [Ask(0.0, 8, 2), Ask(0.01, 8, 2)], 1.0, "s")) as load:
        assert len(load.seen()) == 2
    assert not load.is_running


def test_a_job_in_another_process_is_cut_short_when_told() -> None:
    asks = [Ask(0.0, 8, 2), Ask(1e6, 8, 2)]
    with LoadProcess(Job(1, "m", 1_000, asks, 1.0, "s")) as load:
        load.send_no_more()
        assert len(load.seen()) <= 1, "the second is due in eleven days"


def test_a_generator_that_fails_is_no_result() -> None:
    with (
        LoadProcess(Job(1, "m", 1, [Ask(0.0, 8, 2)], 1.0, "s")) as load,  # no ordinary token
        pytest.raises(BenchFailed, match="load generator"),
    ):
        load.seen()
