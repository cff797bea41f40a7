"""The SDK's requests through a transport with patience, against scripted answers."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import httpx2
import msgspec
import openai
import pytest

from kvota.client import connect, connect_async
from kvota.client.patience import Patience
from kvota.client.transport import AsyncPatientTransport, PatientTransport
from tests.support.live_node import live_node
from tests.support.stage import says

Play = Callable[[httpx2.Request], httpx2.Response]
DONE = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop",
                 "message": {"role": "assistant", "content": "hi"}}],
}  # fmt: skip
ASK: dict[str, Any] = {"model": "large", "messages": [{"role": "user", "content": "x"}]}


class Scripted(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """Answers from a list, the last one for ever; an exception is raised."""

    def __init__(self, *answers: int | tuple[int, dict[str, str]] | Exception) -> None:
        self._answers = list(answers)
        self.requests: list[httpx2.Request] = []

    @property
    def models(self) -> list[str]:
        return [msgspec.json.decode(one.content)["model"] for one in self.requests]

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        status, headers = (answer, {}) if isinstance(answer, int) else answer
        body = DONE if status == 200 else {"error": {"message": "no"}}
        return httpx2.Response(status, headers=headers, json=body)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return self.handle_request(request)


class Asker:
    """The SDK over scripted answers; `waits` are the seconds slept between tries."""

    def __init__(
        self, script: Scripted, *, fallback_model: str | None = None, **patience: Any
    ) -> None:
        self.script = script
        self.waits: list[float] = []
        chosen = Patience(**patience)
        transport = PatientTransport(
            script, chosen, fallback_model=fallback_model, chance=Random(1),
            sleep=self.waits.append, unix_time=lambda: 0.0,
        )  # fmt: skip
        self._sdk = openai.OpenAI(
            base_url="http://server/v1", api_key="k", max_retries=0,
            http_client=httpx2.Client(transport=transport, timeout=chosen.unsaid_s),
        )  # fmt: skip

    def ask(self, **fields: Any) -> str | None:
        answer = self._sdk.chat.completions.create(**{**ASK, **fields})
        content: str | None = answer.choices[0].message.content
        return content


def test_an_answer_at_once_is_one_request() -> None:
    asker = Asker(Scripted(200))
    assert asker.ask() == "hi"
    assert (len(asker.script.requests), asker.waits) == (1, [])


def test_it_comes_back_when_it_was_told() -> None:
    asker = Asker(Scripted((503, {"Retry-After": "7"}), (429, {"Retry-After": "2"}), 200))
    assert asker.ask() == "hi"
    assert asker.waits == [7.0, 2.0]


def test_what_a_retry_cannot_help_is_told_at_once() -> None:
    asker = Asker(Scripted((503, {"x-should-retry": "false"})))
    with pytest.raises(openai.InternalServerError):
        asker.ask()
    assert len(asker.script.requests) == 1


def test_it_gives_up_after_its_tries() -> None:
    asker = Asker(Scripted(503), num_retries=3)
    with pytest.raises(openai.InternalServerError):
        asker.ask()
    assert len(asker.script.requests) == 4


def test_a_connection_that_fails_is_tried_again_and_then_told() -> None:
    asker = Asker(Scripted(httpx2.ConnectError("refused")), num_retries=2)
    with pytest.raises(openai.APIConnectionError):
        asker.ask()
    assert len(asker.script.requests) == 3


def test_a_connection_that_breaks_later_is_not_sent_twice() -> None:
    asker = Asker(Scripted(httpx2.ReadError("reset")))
    with pytest.raises(openai.APIConnectionError):
        asker.ask()
    assert len(asker.script.requests) == 1


def test_a_server_in_trouble_gets_no_more_than_a_tenth_on_top() -> None:
    asker = Asker(Scripted(503), budget_reserve=2.0)
    for _ in range(100):
        with pytest.raises(openai.InternalServerError):
            asker.ask()
    assert 100 + 10 <= len(asker.script.requests) <= 100 + 10 + 2


def test_another_model_is_asked_once_when_retries_are_used_up() -> None:
    script = Scripted(503, 503, 503, 200)
    asker = Asker(script, fallback_model="small", num_retries=2)
    assert asker.ask(temperature=0.5) == "hi"
    assert script.models == ["large", "large", "large", "small"]
    assert msgspec.json.decode(script.requests[-1].content)["temperature"] == 0.5
    assert int(script.requests[-1].headers["content-length"]) == len(script.requests[-1].content)


def test_another_model_is_asked_when_the_wait_would_be_too_long() -> None:
    script = Scripted((503, {"Retry-After": "500"}), 200)
    asker = Asker(script, fallback_model="small")
    assert asker.ask() == "hi"
    assert (script.models, asker.waits) == (["large", "small"], [0.0])


def test_a_failing_fallback_is_told_and_not_retried() -> None:
    script = Scripted(503)
    asker = Asker(script, fallback_model="small", num_retries=1)
    with pytest.raises(openai.InternalServerError):
        asker.ask()
    assert script.models == ["large", "large", "small"]


def test_a_bad_request_is_not_taken_to_another_model() -> None:
    asker = Asker(Scripted(400), fallback_model="small")
    with pytest.raises(openai.BadRequestError):
        asker.ask()
    assert asker.script.models == ["large"]


def test_each_request_waits_as_long_as_its_answer_may_take() -> None:
    script = Scripted(200)
    asker = Asker(script, first_token_s=10.0, per_token_s=1.0, silence_s=33.0)
    asker.ask(max_tokens=20)
    asker.ask(max_completion_tokens=5)
    timeouts = [request.extensions["timeout"] for request in script.requests]
    assert [timeout["read"] for timeout in timeouts] == [30.0, 15.0]
    assert [timeout["connect"] for timeout in timeouts] == [5.0, 5.0]


def test_a_timeout_of_the_caller_stays() -> None:
    script = Scripted(200)
    asker = Asker(script, first_token_s=10.0, per_token_s=1.0)
    asker.ask(max_tokens=20, timeout=3.0)
    asker.ask(max_tokens=20, timeout=httpx2.Timeout(None, connect=1.0))
    asker.ask(max_tokens=20, timeout=60.0)  # as long as the silence of a stream
    timeouts = [request.extensions["timeout"] for request in script.requests]
    assert [timeout["read"] for timeout in timeouts] == [3.0, None, 60.0]
    assert [timeout["connect"] for timeout in timeouts] == [3.0, 1.0, 60.0]


@pytest.mark.parametrize(("said", "reads"), [({}, 10.0 + 20), ({"timeout": 7.0}, 7.0)])
def test_a_client_keeps_the_timeout_it_was_made_with(
    said: dict[str, Any], reads: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Scripted(200)
    monkeypatch.setattr(httpx2, "HTTPTransport", lambda: script)
    patience = Patience(first_token_s=10.0, per_token_s=1.0)
    with connect("http://server/v1", patience=patience, **said) as client:
        client.chat.completions.create(**ASK, max_tokens=20)
    assert script.requests[0].extensions["timeout"]["read"] == reads


async def test_asyncio_has_the_same_patience() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(0)

    script = Scripted((503, {"Retry-After": "3"}), 502, 200)
    transport = AsyncPatientTransport(
        script, Patience(num_retries=1), fallback_model="small", chance=Random(1), sleep=sleep
    )
    async with openai.AsyncOpenAI(
        base_url="http://server/v1", api_key="k", max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport),
    ) as sdk:  # fmt: skip
        answer = await sdk.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "hi"
    assert script.models == ["large", "large", "small"]
    assert waits == [3.0, 0.0]


def test_a_real_server_is_talked_to_in_both_ways() -> None:
    with live_node() as node:
        node.stage.play = says("good day")
        with connect(f"{node.url}/v1") as client:
            answer = client.chat.completions.create(**{**ASK, "model": node.model})
            assert answer.choices[0].message.content == "good day"

        async def streamed() -> str:
            async with connect_async(f"{node.url}/v1") as sdk:
                stream = await sdk.chat.completions.create(
                    **{**ASK, "model": node.model}, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert asyncio.run(streamed()) == "good day"
