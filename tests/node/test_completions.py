"""POST /v1/completions, as clients see it."""

import asyncio
from collections.abc import Sequence
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest

from kvota.core.request import Event, FinishReason, Request
from kvota.node.logprobs import TokenNames
from tests.support.http import MODEL, delta, ended, make_node, read, says, tiny_served
from tests.support.tiny_tokenizer import IM_END_ID, VOCAB_SIZE, byte_ids

STOP = FinishReason.STOP


async def test_an_answer_has_every_field_that_openai_documents() -> None:
    body = (await make_node(says("a", "b")).complete("hi")).json
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 2


async def test_a_stream_says_the_same_as_a_body() -> None:
    node = make_node(says("a", "b"))
    whole = (await node.complete(n=2, echo=True, logprobs=1)).json
    reply = await node.complete(n=2, echo=True, logprobs=1, stream=True)
    for index in (0, 1):
        mine = [c["choices"][0] for c in reply.chunks if c["choices"][0]["index"] == index]
        choice = whole["choices"][index]
        assert "".join(part["text"] for part in mine) == choice["text"] == "hiab"
        assert [p["finish_reason"] for p in mine if p["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            parts = [part["logprobs"][name] for part in mine if part["logprobs"]]
            assert [value for part in parts for value in part] == choice["logprobs"][name]
    assert reply.events[-1] == "[DONE]"


async def test_usage_chunk_of_a_stream_equals_the_bodys_usage() -> None:
    node = make_node(says("a", "b"))
    whole = (await node.complete(["hi", "you"])).json["usage"]
    options = {"include_usage": True}
    reply = await node.complete(["hi", "you"], stream=True, stream_options=options)
    assert reply.chunks[-1]["usage"] == whole
    assert [c["usage"] for c in reply.chunks[:-1]] == [None] * (len(reply.chunks) - 1)


async def test_without_a_seed_each_of_several_prompts_has_its_own_luck() -> None:
    node = make_node(says("a"))
    await node.complete(["hi"] * 4, temperature=1)
    assert len({request.sampling.seed for request in node.runner.requests}) == 4


async def test_a_seed_is_every_prompts_seed() -> None:
    node = make_node(says("a"))
    await node.complete(["hi"] * 4, temperature=1, seed=7)
    assert {request.sampling.seed for request in node.runner.requests} == {7}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        (["hi", "you"], ["hi", "you"]),
        (byte_ids("hi"), ["hi"]),
        ([byte_ids("hi"), byte_ids("you")], ["hi", "you"]),
        ([[1, *byte_ids("x")]], ["<|im_start|>x"]),
    ],
)
async def test_every_form_of_prompt_is_read(prompt: Any, expected: list[str]) -> None:
    node = make_node(says("a"))
    body = (await node.complete(prompt)).json
    decode = node.served.tokenizer.decode
    texts = [decode(r.prompt, skip_special_tokens=False) for r in node.runner.requests]
    assert texts == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(len(r.prompt) for r in node.runner.requests)


async def test_choices_are_numbered_prompt_by_prompt() -> None:
    def script(request: Request) -> Sequence[Event]:
        name = request.id[-1]
        return [
            read(request),
            *(
                delta(request, f"{name}.{choice}", choice=choice, finish=STOP)
                for choice in range(request.n)
            ),
            ended(request, output=2),
        ]

    body = (await make_node(script).complete(["hi", "you"], n=2)).json
    assert [choice["text"] for choice in body["choices"]] == ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        (["", ""], "prompt"),
        ([[]], "prompt"),
        ([[1], []], "prompt"),
        (["a", 1], "prompt"),
        ([1, True], "prompt"),
        ([1.5], "prompt"),
        ([None], "prompt"),
        ([0, VOCAB_SIZE], "prompt"),
        ([-1], "prompt"),
        ([9223372036854775808], "prompt"),
        ([[1], [VOCAB_SIZE]], "prompt[1]"),
        (["x"] * 257, "prompt"),
        ({"text": "x"}, "prompt"),
    ],
)
async def test_a_bad_prompt_is_refused(prompt: Any, param: str) -> None:
    node = make_node(says("a"))
    reply = await node.complete(prompt)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert node.runner.requests == []
    assert (await node.complete("hi")).status == 200


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
async def test_without_a_limit_sixteen_tokens_are_made_or_what_is_left(
    fields: dict[str, Any],
) -> None:
    node = make_node(says("a"), served=tiny_served(max_model_len=64))
    await node.complete("hi", **fields)
    await node.complete(byte_ids("x" * 63), **fields)
    assert [request.max_tokens for request in node.runner.requests] == [16, 1]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"),
    [(8, 61, "max_tokens"), (200, None, "prompt"), (64, None, "prompt"), (64, 1, "prompt")],
)
async def test_over_the_context_is_refused_with_true_numbers(
    num_prompt: int, max_tokens: int | None, param: str
) -> None:
    node = make_node(says("a"), served=tiny_served(max_model_len=64))
    reply = await node.complete(byte_ids("x" * num_prompt), max_tokens=max_tokens)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["param"] == param
    assert "64" in reply.error["message"]
    assert str(num_prompt) in reply.error["message"]


# --- echo and logprobs


async def test_echo_without_new_tokens_gives_the_prompt_and_its_logprobs() -> None:
    node = make_node(says("never shown", "nor this"))
    prompt = "two plus two is four"
    body = (await node.complete(prompt, echo=True, max_tokens=0, logprobs=1)).json
    [choice] = body["choices"]
    assert choice["text"] == prompt
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == prompt
    assert (await node.complete()).status == 200


async def test_a_long_echo_of_token_ids_is_written_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[Thread] = []
    text = TokenNames.text

    def noted(names: TokenNames, ids: Sequence[int]) -> str:
        threads.append(current_thread())
        return text(names, ids)

    monkeypatch.setattr(TokenNames, "text", noted)
    node = make_node(says("x"), inline_characters_max=3)
    prompt = node.served.tokenizer.encode("the text")
    body = (await node.complete(prompt, echo=True, max_tokens=0)).json
    assert body["choices"][0]["text"] == "the text"
    assert len(threads) == 1
    assert main_thread() not in threads


async def test_special_tokens_that_the_text_shows_are_not_hidden_in_an_echo_or_its_logprobs() -> (
    None
):
    """Such as mark a tool call: they are in the text, so offsets count them."""
    node = make_node(says("x"), served=tiny_served(hidden_ids=frozenset()))
    prompt = [*byte_ids("a"), IM_END_ID, *byte_ids("b")]
    body = (await node.complete(prompt, echo=True, max_tokens=0, logprobs=0)).json
    [choice] = body["choices"]
    assert choice["text"] == "a<|im_end|>b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 11]


async def test_echoed_offsets_are_the_length_of_the_text_before() -> None:
    node = make_node(says("x", "y"))
    body = (await node.complete("\n the é好", echo=True, max_tokens=3, logprobs=2)).json
    [choice] = body["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    assert text == "\n the é好xy"
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not name.startswith("bytes:") and name not in ("C", "D"):
            assert text[offset : offset + len(name)] == name
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert len(logprobs["tokens"]) == len(node.runner.requests[0].prompt) + 2


@pytest.mark.parametrize(("num", "entries"), [(0, 1), (1, 1), (5, 5)])
async def test_every_new_token_has_its_logprobs(num: int, entries: int) -> None:
    logprobs = (await make_node(says("a", "b", "c", "d")).complete(logprobs=num)).json["choices"][
        0
    ]["logprobs"]
    assert [len(logprobs[name]) for name in logprobs] == 4 * [4]
    assert [len(top) for top in logprobs["top_logprobs"]] == 4 * [entries]
    assert logprobs["text_offset"] == [0, 1, 2, 3]


async def test_parts_of_characters_are_named_by_their_bytes() -> None:
    node = make_node(says("x"))
    logprobs = (await node.complete("好", echo=True, max_tokens=0, logprobs=0)).json["choices"][0][
        "logprobs"
    ]
    assert logprobs["tokens"] == ["bytes:\\xe5", "bytes:\\xa5", "bytes:\\xbd"]
    assert logprobs["text_offset"] == [0, 0, 0]


async def test_too_many_logprobs_are_refused_and_the_next_request_works() -> None:
    node = make_node(says("a"))
    reply = await node.complete(logprobs=21)
    assert (reply.status, reply.error["param"]) == (400, "logprobs")
    assert (await node.complete(logprobs=20)).status == 200


async def test_token_ids_come_when_asked() -> None:
    body = (await make_node(says("a", "b")).complete(byte_ids("hi"), return_token_ids=True)).json
    [choice] = body["choices"]
    assert choice["prompt_token_ids"] == byte_ids("hi")
    assert choice["token_ids"] == [70, 71]


async def test_prompt_logprobs_come_by_token_id() -> None:
    node = make_node(says("a"))
    [choice] = (await node.complete("hi", prompt_logprobs=1)).json["choices"]
    token = str(node.runner.requests[0].prompt[1])
    assert choice["prompt_logprobs"] == [
        None,
        {token: {"logprob": -1.0, "rank": 1, "decoded_token": "i"}},
    ]


async def test_choices_show_the_same_prompt_and_each_goes_on_behind_it() -> None:
    node = make_node(says("a", "b"))
    prompts = [byte_ids("hi"), byte_ids("好")[:2]]  # the second ends within a character
    fields = {"n": 3, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    together = (await node.complete(prompts, **fields)).json["choices"]
    alone = [
        (await node.complete(prompt, **{**fields, "n": 1})).json["choices"][0] for prompt in prompts
    ]
    for choice in together:
        expected = alone[choice["index"] // 3]
        assert choice["logprobs"]["text_offset"] == expected["logprobs"]["text_offset"]
        for name in ("tokens", "token_logprobs"):
            assert choice["logprobs"][name][:2] == expected["logprobs"][name][:2]
        assert choice["prompt_logprobs"] == expected["prompt_logprobs"]


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
async def test_more_scores_of_prompts_than_an_answer_may_hold_are_refused(
    fields: dict[str, Any],
) -> None:
    node = make_node(says("a"), served=tiny_served(max_model_len=4096))
    reply = await node.complete(byte_ids("x" * 2000), n=64, **fields)
    assert (reply.status, reply.error["param"]) == (400, [*fields][-1])
    assert "2688000" in reply.error["message"]


async def test_many_prompts_end_together_although_they_end_at_different_times() -> None:
    node = make_node()
    call = node.caller.begin("POST", "/v1/completions", {"model": MODEL, "prompt": ["a", "b"]})
    first, second = await node.runner.submitted(2)
    for stream in (second, first):
        request = stream.request
        stream.push(read(request), delta(request, request.id[-1], finish=STOP))
        stream.push(ended(request, output=1))
        await asyncio.sleep(0)
    body = (await call.end()).json
    assert [choice["text"] for choice in body["choices"]] == ["0", "1"]
    assert body["usage"]["completion_tokens"] == 2
