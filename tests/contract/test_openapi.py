"""A node against OpenAI's own description of its API: fuzzed by it, and answering as it says.

`openai_openapi_chat.json` is a part of OpenAI's OpenAPI description
(https://github.com/openai/openai-openapi, commit f85dbe2), MIT licence, © OpenAI: its text is
beside it in `openai_openapi_chat.LICENSE.txt`. Changed: other paths and all `x-*` extensions
removed, one link removed from a description, the server's address set.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.support.http_client import CHAT, COMPLETIONS, Reply, checked_error
from tests.support.live_node import LiveNode, live_node, staged_model
from tests.support.stage import says

FILE = Path(__file__).with_name("openai_openapi_chat.json")
KEPT_OF_TEN = 2  # optional fields left in a body that is to be accepted


@pytest.fixture(scope="module")
def small_node() -> Iterator[LiveNode]:
    with live_node(served=staged_model(max_model_len=512)) as node:
        node.stage.play = says("ok 😀")
        yield node


def _with_nulls(schema: Any) -> Any:
    """The same schema without `nullable`, which 3.1 does not know and the file still uses."""
    if isinstance(schema, list):
        return [_with_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _with_nulls(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [kept, {"type": "null"}]} if schema.get("nullable") is True else kept


DESCRIPTION: dict[str, Any] = _with_nulls(json.loads(FILE.read_text()))


def validator(name: str) -> Callable[[Any], None]:
    """Checks a value against one schema of the description."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DESCRIPTION["components"]}
    check: Callable[[Any], None] = jsonschema.Draft202012Validator(schema).validate
    return check


# --- fuzzing


@pytest.mark.parametrize(
    ("path", "method", "num_cases"),
    [
        ("/chat/completions", "POST", 100),
        ("/completions", "POST", 800),
        ("/embeddings", "POST", 350),
        ("/models", "GET", 50),
        ("/models/{model}", "GET", 350),
    ],
)
def test_whatever_the_description_allows_never_breaks_the_server(
    small_node: LiveNode, path: str, method: str, num_cases: int
) -> None:
    """conformance 1.3: not_a_server_error; with the next test 2,000 cases and more"""
    statuses = _fuzz(small_node, path, method, num_cases, lambda case: None)
    assert sum(statuses.values()) >= num_cases
    small_node.wait_idle()


@pytest.mark.parametrize(
    ("path", "required", "num_cases"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 80),
        ("/completions", {"prompt": "hi"}, 300),
    ],
)
def test_bodies_that_are_nearly_right_are_answered_as_described(
    small_node: LiveNode, path: str, required: dict[str, Any], num_cases: int
) -> None:
    """conformance 1.3: response_schema_conformance"""
    chance = random.Random(7)

    def mend(case: Any) -> None:
        if not isinstance(case.body, dict):
            return
        kept = {k: v for k, v in case.body.items() if chance.random() * 10 < KEPT_OF_TEN}
        case.body = {**kept, **required, "model": small_node.model}
        if "logprobs" in case.body:
            # The first token of an echo has no probability: null, which lm-eval and others read,
            # although the description does not foresee it.
            case.body.pop("echo", None)

    statuses = _fuzz(small_node, path, "POST", num_cases, mend)
    assert statuses[200] > num_cases // 5, statuses
    small_node.wait_idle()


def _fuzz(
    node: LiveNode, path: str, method: str, num_cases: int, mend: Callable[[Any], None]
) -> Counter[int]:
    """Send `num_cases` generated requests, the same ones at every run."""
    operation = schemathesis.openapi.from_dict(DESCRIPTION)[path][method]
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=num_cases, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        mend(case)
        response = case.call(base_url=f"{node.url}/v1", timeout=60)
        statuses[response.status_code] += 1
        checks: list[Any] = [not_a_server_error]
        if response.headers["content-type"] == ["application/json"]:
            checks.append(response_schema_conformance)
        else:
            # schemathesis reads the first 20 events of a stream.
            _check_stream(response.content, path, is_whole=not response.stream_cut_short)
        case.validate_response(response, checks=checks)
        if response.status_code >= 400:
            checked_error(response.json())

    send()
    return statuses


# --- every field that is documented


CHAT_FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 3},
    {"stop": "k"},
    {"max_tokens": 2, "seed": 1},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {"response_format": {"type": "json_object"}, "max_tokens": 5, "temperature": 0},
]


@pytest.mark.parametrize("fields", CHAT_FIELDS)
def test_a_chat_answer_is_as_described(small_node: LiveNode, fields: dict[str, Any]) -> None:
    body, stream = small_node.chat(**fields), small_node.chat(**fields, stream=True)
    validator("CreateChatCompletionResponse")(body.json)
    _check_stream(stream.content, CHAT)
    usage = small_node.chat(**fields, stream=True, stream_options={"include_usage": True})
    _check_stream(usage.content, CHAT)


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": 2}, {"echo": True}])
def test_a_completion_is_as_described(small_node: LiveNode, fields: dict[str, Any]) -> None:
    validator("CreateCompletionResponse")(small_node.complete("hi", **fields).json)
    _check_stream(small_node.complete("hi", **fields, stream=True).content, COMPLETIONS)


def test_models_and_errors_are_as_described(small_node: LiveNode) -> None:
    validator("ListModelsResponse")(small_node.get("/v1/models").json)
    validator("Model")(small_node.get("/v1/models/tiny").json)
    validator("ErrorResponse")(small_node.chat(n=0).json)


def _check_stream(content: bytes, path: str, *, is_whole: bool = True) -> None:
    """Every event is a chunk as described; a whole stream ends with [DONE] or the one error."""
    events = Reply.events_of(content)
    is_chat = "chat" in path
    check = validator("CreateChatCompletionStreamResponse") if is_chat else _check_chunk
    for event in events[:-1]:
        check(json.loads(event))
    if is_whole and events[-1] != "[DONE]":
        checked_error(json.loads(events[-1]))


def _check_chunk(chunk: dict[str, Any]) -> None:
    """A completions chunk: the described body, whose finish reasons may still be null."""
    described = {**chunk, "choices": [
        {**choice, "finish_reason": choice["finish_reason"] or "stop"}
        for choice in chunk["choices"]
    ]}  # fmt: skip
    if described.get("usage", 0) is None:
        del described["usage"]
    validator("CreateCompletionResponse")(described)
