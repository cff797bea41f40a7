"""What counts of a run is the time in which all clients have a request running."""

import asyncio
import time
from collections.abc import Callable

import pytest

from bench.client import BenchFailed, completion_body, generated_tokens
from bench.genai_loop import run
from bench.genai_server import serve
from bench.lasting import Mark, rate, wanted_marks
from bench.throughput import under_load
from tests.bench.test_genai import VOCABULARY, FakePipeline

AT_ONCE = 4
# The last of all is longer than all others together, and alone then.
LENGTHS = [30] * 16 + [10] * 3 + [2000]


def steps_of(pipeline: FakePipeline) -> Callable[[], float]:
    """A clock that shows how many steps there were."""
    return lambda: float(len(pipeline.num_running))


def prompts() -> list[list[int]]:
    return [[0] * length for length in LENGTHS]


def test_both_moments_lie_between_the_requests() -> None:
    assert wanted_marks(4, 9) == (8, 9)
    with pytest.raises(ValueError, match="8 requests are too few for 4"):
        wanted_marks(4, 8)


def test_a_rate_is_of_what_lies_between() -> None:
    assert rate(Mark(100, 2.0), Mark(400, 4.0)) == 150.0


def test_all_take_part_in_every_step_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = FakePipeline()
    monkeypatch.setattr(time, "perf_counter", steps_of(pipeline))
    found = run(pipeline, prompts(), num_tokens=2000, at_once=AT_ONCE)
    assert found == {"num_tokens": sum(LENGTHS), "tokens_per_s": AT_ONCE}
    assert sum(LENGTHS) / len(pipeline.num_running) < 0.3 * AT_ONCE  # with the end of the run


async def test_it_is_the_same_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the steps in which a client turns from one answer to its next request."""
    pipeline = FakePipeline()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(pipeline, VOCABULARY, port.set_result))
    monkeypatch.setattr(time, "perf_counter", steps_of(pipeline))
    bodies = [completion_body("m", prompt, len(prompt)) for prompt in prompts()]
    answers, tokens_per_s = await under_load(await port, bodies, AT_ONCE)
    assert await generated_tokens(await port) == sum(LENGTHS)
    serving.cancel()
    assert sorted(answer.num_tokens for answer in answers) == sorted(LENGTHS)
    assert 0.5 * AT_ONCE < tokens_per_s <= AT_ONCE


async def test_a_server_that_does_not_count_is_named() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        with pytest.raises(BenchFailed, match="no kvota_generated_tokens_total"):
            await generated_tokens(server.sockets[0].getsockname()[1])
