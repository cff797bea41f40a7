"""A node against OpenAI's own description of its API: fuzzed by it, and answering as it says."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http_client import CHAT, COMPLETIONS
from tests.support.live_node import MODEL, LiveNode, live_node, staged_model
from tests.support.openapi import check_stream, fuzz, nearly_right, validator
from tests.support.stage import says


@pytest.fixture(scope="module")
def small_node() -> Iterator[LiveNode]:
    with live_node(served=staged_model(max_model_len=512)) as node:
        node.stage.play = says("ok 😀")
        yield node


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
    statuses = fuzz(small_node.url, path, method, num_cases)
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
    statuses = fuzz(small_node.url, path, "POST", num_cases, nearly_right(MODEL, required))
    assert statuses[200] > num_cases // 5, statuses
    small_node.wait_idle()


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
    check_stream(stream.content, CHAT)
    usage = small_node.chat(**fields, stream=True, stream_options={"include_usage": True})
    check_stream(usage.content, CHAT)


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": 2}, {"echo": True}])
def test_a_completion_is_as_described(small_node: LiveNode, fields: dict[str, Any]) -> None:
    validator("CreateCompletionResponse")(small_node.complete("hi", **fields).json)
    check_stream(small_node.complete("hi", **fields, stream=True).content, COMPLETIONS)


def test_models_and_errors_are_as_described(small_node: LiveNode) -> None:
    validator("ListModelsResponse")(small_node.get("/v1/models").json)
    validator("Model")(small_node.get("/v1/models/tiny").json)
    validator("ErrorResponse")(small_node.chat(n=0).json)
