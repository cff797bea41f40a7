"""The official client, sync and async, against a node: what it parses, raises, cancels, retries."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.live_node import MODEL, LiveNode, live_node, staged_model, until
from tests.support.stage import by_prompt, says
from tests.support.tiny_tokenizer import byte_ids

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Colour(BaseModel):
    name: str
    is_warm: bool


@pytest.fixture
def client(node: LiveNode) -> Iterator[openai.OpenAI]:
    with connected(node) as opened:
        yield opened


def connected(node: LiveNode, **options: Any) -> openai.OpenAI:
    options = {"max_retries": 0, "timeout": 60, **options}
    return openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", **options)


def connected_async(node: LiveNode) -> openai.AsyncOpenAI:
    url = f"{node.url}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


def test_chat_answers_in_the_clients_own_types(node: LiveNode, client: openai.OpenAI) -> None:
    node.stage.play = says("hello é")
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == ["hello é"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer._request_id
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 9
    assert answer.usage.prompt_tokens_details is not None
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    joined = bytes(byte for entry in logprobs.content for byte in entry.bytes or [])
    assert joined.decode() == "hello é"


def test_chat_streams_with_usage_last(node: LiveNode, client: openai.OpenAI) -> None:
    node.stage.play = says("one two")
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "one two"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_completions_streamed_and_not(node: LiveNode, client: openai.OpenAI) -> None:
    node.stage.play = says("abc")
    whole = client.completions.create(model=MODEL, prompt=["x", "y"], logprobs=1, echo=True)
    assert [choice.text for choice in whole.choices] == ["xabc", "yabc"]
    stream = client.completions.create(model=MODEL, prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abc"


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kvota"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_a_tool_call_arrives_streamed_and_not(node: LiveNode, client: openai.OpenAI) -> None:
    node.stage.play = says(CALL)
    answer = client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL])
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert answer.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(model=MODEL, messages=HI, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    [streamed] = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments


def test_a_conversation_goes_on_after_a_tool_call(node: LiveNode, client: openai.OpenAI) -> None:
    node.stage.play = by_prompt({"4 degrees": says("It is cold.")}, otherwise=says(CALL))
    first = client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL])
    [call] = first.choices[0].message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "4 degrees"}
    messages = [*HI, first.choices[0].message, result]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "It is cold."


def test_a_form_is_kept_to_and_parsed(node: LiveNode, client: openai.OpenAI) -> None:
    """A16: whatever the model would rather say"""
    node.stage.play = says('{"name":"red","is_warm":true}')
    parsed = client.chat.completions.parse(model=MODEL, messages=HI, response_format=Colour)
    assert parsed.choices[0].message.parsed == Colour(name="red", is_warm=True)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL, messages=HI, response_format=Colour, max_tokens=4
        )


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "none"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
        ({"max_tokens": 100_000}, openai.BadRequestError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_raise_the_clients_own_errors(
    client: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], stream: bool
) -> None:
    """A12, A14"""
    given: dict[str, Any] = {"model": MODEL, "messages": HI, **fields, "stream": stream}
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**given)
    assert len(caught.value.message) > 20
    assert caught.value.body
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_wrong_media_and_too_large_bodies_raise_status_errors() -> None:
    """A12"""
    with live_node(max_body_bytes=500) as node, connected(node) as client:
        with pytest.raises(openai.APIStatusError, match="limit") as caught:
            client.completions.create(model=MODEL, prompt="x" * 1000)
        assert caught.value.status_code == 413


def test_a_model_that_fails_raises_before_or_within_the_stream(
    node: LiveNode, client: openai.OpenAI
) -> None:
    """A14"""
    node.stage.poison = frozenset(byte_ids("~"))
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=MODEL, prompt="~")
    node.stage.play = says("ab~c")
    stream = client.completions.create(model=MODEL, prompt="x", max_tokens=9, stream=True)
    with pytest.raises(openai.APIError, match="failed on this request"):
        list(stream)


def test_a_full_server_is_tried_again_when_it_said() -> None:
    """B03, B04: the client obeys Retry-After and gets its answer"""
    with (
        live_node(max_running_requests=1, max_waiting_queue=0) as node,
        connected(node, max_retries=3) as client,
        ThreadPoolExecutor() as pool,
        node.stage.held() as gate,
    ):
        first = pool.submit(node.complete, "x", max_tokens=2)
        gate.wait_for_step()
        second = pool.submit(client.completions.create, model=MODEL, prompt="y", max_tokens=2)
        until(lambda: "queue_full" in node.log, "the first refusal")
        gate.open()
        assert first.result().status == 200
        assert second.result().choices[0].finish_reason == "length"


def test_closing_a_stream_stops_the_work(node: LiveNode, client: openai.OpenAI) -> None:
    """C01"""
    with node.stage.held() as gate:
        gate.allow(3)
        stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        next(stream)
        before = node.metric("kvota_requests_total")
        stream.close()
    until(lambda: node.metric("kvota_requests_total") == before + 1, "its end")
    assert node.metrics()["kvota_requests_total{model=tiny,outcome=client_closed}"] >= 1


async def test_many_async_requests_get_their_own_answers(node: LiveNode) -> None:
    node.stage.play = by_prompt({f"<{i}>": says(f"answer {i}") for i in range(20)})
    async with connected_async(node) as client:
        asked = [
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": f"<{i}>"}]
            )
            for i in range(20)
        ]
        answers = await asyncio.gather(*asked)
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts == [f"answer {i}" for i in range(20)]


async def test_async_streams_interleave_and_can_be_cancelled(node: LiveNode) -> None:
    """C01"""
    async with connected_async(node) as client:

        async def text_of(prompt: str, seed: int) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, seed=seed, max_tokens=20, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        together = await asyncio.gather(*(text_of(f"p{i}", i) for i in range(6)))
        assert together == [await text_of(f"p{i}", i) for i in range(6)]
        with node.stage.held():
            waiting = asyncio.create_task(text_of("cut", 1))
            await asyncio.to_thread(node.stage.gate.wait_for_step)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting


def test_a_template_of_its_own_is_obeyed() -> None:
    """The tokens that the client pays for are those of the template"""
    served = staged_model(template="{{ messages[0].content }}!")
    with live_node(served=served) as node, connected(node) as client:
        answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 3
