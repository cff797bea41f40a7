"""Both yardsticks keep a number of prompts running, whatever steps them."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.client import Answer, ask, complete_in_turn, completion_body
from bench.genai_loop import run
from bench.genai_server import serve

VOCABULARY = [b"a", b' "b"', b"\xe2\x82", b"\xac", b""]


@dataclass
class FakeGeneration:
    """Its tokens are those of its prompt, one a step."""

    left: list[int]
    made: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return not self.left

    def new_tokens(self) -> Sequence[int]:
        made, self.made = self.made, []
        return made


@dataclass
class FakePipeline:
    room: int = 100  # prompts in one step; those added first come first
    generations: list[FakeGeneration] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)  # in each step

    def add(self, prompt: Sequence[int], num_tokens: int) -> FakeGeneration:
        self.generations.append(FakeGeneration(list(prompt[:num_tokens])))
        return self.generations[-1]

    def step(self) -> None:
        running = [generation for generation in self.generations if generation.left]
        self.num_running.append(len(running))
        for generation in running[: self.room]:
            generation.made.append(generation.left.pop(0))


async def served(
    pipeline: FakePipeline, prompts: Sequence[Sequence[int]], num_clients: int
) -> list[Answer]:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(pipeline, VOCABULARY, port.set_result))
    bodies = [completion_body("m", prompt, len(prompt)) for prompt in prompts]
    try:
        return await complete_in_turn(await port, bodies, num_clients)
    finally:
        serving.cancel()


def test_a_prompt_takes_the_place_of_one_that_is_over() -> None:
    pipeline = FakePipeline()
    prompts = [[0], [0, 0], [0, 0, 0], [0, 0], [0], [0]]
    found = run(pipeline, prompts, num_tokens=3, at_once=2)
    assert found["num_tokens"] == 10
    assert pipeline.num_running == [2, 2, 2, 2, 2]


async def test_every_answer_over_http_is_whole_and_has_its_usage() -> None:
    pipeline = FakePipeline()
    answers = await served(pipeline, [[0] * n for n in (1, 5, 3, 2)], num_clients=2)
    assert all(answer.is_whole for answer in answers)
    assert sorted(answer.num_tokens for answer in answers) == [1, 2, 3, 5]
    assert all(a.num_events == a.num_tokens == a.num_prompt_tokens for a in answers)
    assert max(pipeline.num_running) <= 2


async def test_an_answer_begins_once_however_long_its_prompt_waits() -> None:
    for answer in await served(FakePipeline(room=1), [[0] * 3] * 4, num_clients=4):
        assert (answer.is_whole, answer.num_events) == (True, 3)


async def test_a_request_that_arrives_in_pieces_is_begun_once() -> None:
    pipeline = FakePipeline()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(pipeline, VOCABULARY, port.set_result))
    body = completion_body("m", [0, 1], 2)
    asked = await ask(await port, body, num_bytes=20)
    await asyncio.sleep(0.01)
    asked.send(body[20:])
    await asked.ended
    serving.cancel()
    assert (asked.answer.is_whole, len(pipeline.generations)) == (True, 1)


async def test_the_text_of_a_character_in_parts_comes_with_its_last() -> None:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(FakePipeline(), VOCABULARY, port.set_result))
    body = completion_body("m", [0, 2, 3, 4, 1], 5)
    reader, writer = await asyncio.open_connection("127.0.0.1", await port)
    writer.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    lines = (await reader.read()).split(b"\n")
    writer.close()
    serving.cancel()
    events = [line[len(b"data: ") :] for line in lines if line.startswith(b"data: ")]
    *chunks, usage, done = events
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["a", "", "€", "", ' "b"']
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
    assert json.loads(usage)["usage"]["completion_tokens"] == 5
    assert done == b"[DONE]"
