"""A stream put together: what the pieces say, whatever backend cut them."""

import json
from typing import Any

import msgspec
import pytest

from kvota.gateway.upstream.assembly import Assembler, decode_body


def assembled(*choices: Any, **head: Any) -> dict[str, Any]:
    assembler = Assembler()
    for choice in choices:
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        parts = choice if isinstance(choice, list) else [choice]
        assembler.add(json.dumps({**chunk, **head, "choices": parts}).encode())
    body: dict[str, Any] = msgspec.to_builtins(assembler.body({"total_tokens": 1}))
    return body


def delta(index: Any = 0, finish: Any = None, **said: Any) -> dict[str, Any]:
    return {"index": index, "delta": said, "finish_reason": finish}


def message(*choices: Any) -> dict[str, Any]:
    found: dict[str, Any] = assembled(*choices)["choices"][0]["message"]
    return found


def test_content_is_joined() -> None:
    body = assembled(
        delta(role="assistant", content=""), delta(content="a"), delta(content="b"),
        delta(finish="stop"),
    )  # fmt: skip
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "logprobs": None,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "ab", "refusal": None},
        }
    ]


def test_choices_may_interleave() -> None:
    body = assembled(
        [delta(1, content="x"), delta(0, content="a")], delta(1, content="y"),
        delta(0, finish="stop"), delta(1, finish="length"),
    )  # fmt: skip
    assert [one["message"]["content"] for one in body["choices"]] == ["a", "xy"]
    assert [one["finish_reason"] for one in body["choices"]] == ["stop", "length"]


def test_tool_calls_are_found_by_their_index() -> None:
    def call(index: int, **said: Any) -> dict[str, Any]:
        return delta(tool_calls=[{"index": index, **said}])

    said = message(
        delta(role="assistant", content=""),
        call(0, id="c0", type="function", function={"name": "f", "arguments": ""}),
        call(0, function={"arguments": '{"a": "{\\"'}),
        call(1, id="c1", type="function", function={"name": "g", "arguments": ""}),
        call(0, function={"arguments": '}"}'}),
        delta(finish="tool_calls"),
    )
    assert said["content"] is None
    assert said["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": "{\\"}"}'}},
        {"id": "c1", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"a": '{"}'}


def test_tool_calls_may_be_null_before_they_come() -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = message(
        delta(role="assistant", content=None, tool_calls=None), delta(tool_calls=[call]),
        delta(finish="tool_calls"),
    )  # fmt: skip
    assert [one["id"] for one in said["tool_calls"]] == ["c"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_joined_beside_the_content(name: str) -> None:
    said = message(delta(**{name: "th"}), delta(**{name: "ink", "content": None}),
                   delta(content="so"), delta(finish="stop"))  # fmt: skip
    assert (said[name], said["content"]) == ("think", "so")


def test_logprobs_are_joined() -> None:
    one, two = ({"token": token, "logprob": -0.5, "bytes": [97], "top_logprobs": []}
                for token in "ab")  # fmt: skip
    body = assembled(
        {**delta(content="a"), "logprobs": {"content": [one]}},
        {**delta(content="b"), "logprobs": {"content": [two]}},
        {**delta(finish="stop"), "logprobs": None},
    )
    assert body["choices"][0]["logprobs"] == {"content": [one, two]}


def test_completions_are_joined_with_their_logprobs_and_ids() -> None:
    def piece(text: str, offset: int, finish: str | None = None) -> dict[str, Any]:
        lists = {"tokens": [text], "token_logprobs": [-1.0], "text_offset": [offset]}
        return {"index": 0, "text": text, "logprobs": lists, "finish_reason": finish,
                "stop_reason": None, "token_ids": [offset]}  # fmt: skip

    body = assembled(piece("a", 0), piece("b", 1, "length"), object="text_completion")
    assert body["object"] == "text_completion"
    assert body["choices"][0] == {
        "index": 0,
        "text": "ab",
        "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -1.0], "text_offset": [0, 1]},
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [0, 1],
    }


def test_an_answer_of_nothing_is_an_empty_string() -> None:
    assert message(delta(role="assistant"), delta(finish="stop"))["content"] == ""


def test_what_only_one_backend_knows_arrives() -> None:
    body = assembled(
        {**delta(content="a"), "matched_stop": 7}, delta(finish="stop"),
        system_fingerprint="fp", prompt_token_ids=[1, 2],
    )  # fmt: skip
    assert body["system_fingerprint"] == "fp"
    assert body["prompt_token_ids"] == [1, 2]
    assert body["choices"][0]["matched_stop"] == 7
    assert "service_tier" not in body


def test_a_body_that_is_none_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_body(b'{"choices": 5}')
