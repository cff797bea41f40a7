"""Whatever a client sends, the answer is its own fault or a success, never ours."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.node.served import ServedModel
from kvota.wire.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.support.asgi_caller import Reply
from tests.support.http import MODEL, Node, make_node, says, tiny_served

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = sorted(
    {
        name
        for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
        for name in kind.__struct_fields__
    }
)
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from([MODEL, "also-tiny", "other", ""]),
    "prompt": st.text(max_size=20) | st.lists(st.integers(-1, 400), max_size=4),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool", "bot"])},
            optional={"content": st.text(max_size=9) | st.none() | JSON, "tool_calls": JSON},
        ),
        max_size=3,
    ),
    "max_tokens": st.integers(-1, 300),
    "stream": st.booleans(),
    "n": st.integers(-1, 5),
    "tokens": st.lists(st.integers(-1, 310), max_size=5),
    "logprobs": st.booleans() | st.integers(-1, 21),
    "echo": st.booleans(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
    "logit_bias": st.dictionaries(st.integers(-1, 310).map(str), st.integers(-101, 101)),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema", "yaml"])},
        optional={"json_schema": st.fixed_dictionaries({"schema": JSON})},
    ),
    "tool_choice": st.sampled_from(["none", "auto", "required", "maybe"]) | JSON,
    "tools": st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["function", "custom"])},
            optional={"function": st.fixed_dictionaries({"name": st.text(max_size=5)})},
        ),
        max_size=2,
    ),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A body that is right but for a few fields, each plausible, null or anything."""
    names = draw(st.lists(st.sampled_from(NAMES), max_size=4))
    fields = {name: draw(PLAUSIBLE.get(name, JSON) | st.none() | JSON) for name in names}
    messages = [{"role": "user", "content": draw(st.text(max_size=9))}]
    right = {"model": MODEL, "prompt": "hi", "messages": messages, "tokens": [5], "max_tokens": 9}
    return {**right, **fields}


PATHS = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
HEADERS = st.dictionaries(
    st.sampled_from(["x-request-id", "x-kvota-deadline-s", "x-kvota-priority", "content-length"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=12),
    max_size=2,
)
MANY = settings(max_examples=300, deadline=None)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return tiny_served()


def answer(
    served: ServedModel, path: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[Node, Reply]:
    async def call() -> tuple[Node, Reply]:
        node = make_node(says("a", "b"), served=served)
        return node, await node.caller.request("POST", path, body, headers)

    return asyncio.run(call())


def assert_never_our_fault(path: str, node: Node, reply: Reply) -> None:
    assert 200 <= reply.status < 500, reply.content
    assert reply.is_complete
    if reply.status >= 400:
        assert reply.error["code"]
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.events[-1] == "[DONE]"
    else:
        assert reply.json
    generates = path.startswith("/v1/")
    assert len(node.records) == (1 if generates else 0)


@MANY
@given(path=PATHS, body=bodies(), headers=HEADERS)
def test_plausible_bodies(
    served: ServedModel, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    node, reply = answer(served, path, msgspec.json.encode(body), headers)
    assert_never_our_fault(path, node, reply)


@MANY
@given(path=PATHS, body=JSON)
def test_any_json(served: ServedModel, path: str, body: Any) -> None:
    node, reply = answer(served, path, msgspec.json.encode(body))
    assert 400 <= reply.status < 500
    assert_never_our_fault(path, node, reply)


@MANY
@given(path=PATHS, body=st.binary(max_size=60))
def test_any_bytes(served: ServedModel, path: str, body: bytes) -> None:
    node, reply = answer(served, path, body)
    assert 400 <= reply.status < 500
    assert_never_our_fault(path, node, reply)
