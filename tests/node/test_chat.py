"""POST /v1/chat/completions, as clients see it."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvota.core.request import Band, Delta, Event, FinishReason, Request
from kvota.model.template import ChatTemplate
from kvota.node.served import ServedModel
from tests.support.http import (
    MODEL,
    Script,
    delta,
    ended,
    make_node,
    read,
    says,
    tiny_served,
)

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def test_an_answer_has_every_field_that_openai_documents() -> None:
    body = (await make_node(says("Hel", "lo")).chat()).json
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["created"] == 1_700_000_123
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt_tokens = body["usage"]["prompt_tokens"]
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 2,
        "total_tokens": prompt_tokens + 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_begins_with_the_role_ends_with_done_and_says_the_same() -> None:
    node = make_node(says("Hel", "lo"))
    whole = (await node.chat()).json
    reply = await node.chat(stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.events[-1] == "[DONE]"
    chunks = reply.chunks
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("finish", list(FinishReason))
@pytest.mark.parametrize("stream", [True, False])
async def test_the_finish_reason_is_the_engines(finish: FinishReason, stream: bool) -> None:
    reply = await make_node(says("a", "b", finish=finish)).chat(stream=stream)
    last = reply.chunks[-1] if stream else reply.json
    assert last["choices"][0]["finish_reason"] == finish.value


async def test_usage_comes_once_at_the_end_of_a_stream_that_asked_for_it() -> None:
    node = make_node(says("a", "b", cached=16))
    whole = (await node.chat()).json["usage"]
    reply = await node.chat(stream=True, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in reply.chunks[:-1])
    assert reply.chunks[-1]["choices"] == []
    assert reply.chunks[-1]["usage"] == whole
    assert reply.events[-1] == "[DONE]"
    assert whole["prompt_tokens_details"]["cached_tokens"] == 16


async def test_running_usage_grows_on_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await make_node(says("a", "b", "c")).chat(stream=True, stream_options=options)
    seen = [chunk["usage"]["completion_tokens"] for chunk in reply.chunks]
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 3)


async def test_the_prompt_is_the_rendered_template_with_its_special_tokens() -> None:
    node = make_node(says("x"))
    await node.chat("hi")
    [request] = node.runner.requests
    text = node.served.tokenizer.decode(request.prompt, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt[0] == 1, "the marker is one token, not its letters"


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
async def test_parts_and_string_give_the_same_prompt(role: str) -> None:
    node = make_node(says("x"))
    parts = [{"type": "text", "text": "red, "}, {"type": "text", "text": "green, blue"}]
    await node.chat(messages=[{"role": role, "content": "red, green, blue"}, *USER])
    await node.chat(messages=[{"role": role, "content": parts}, *USER])
    first, second = node.runner.requests
    assert first.prompt == second.prompt


@pytest.mark.parametrize(
    "begun", ["Once upon", "Once upon ", "```json\n", "<", "end", "im", "\n|", "assistant", " \n x"]
)
async def test_a_final_message_is_continued_where_it_ends(begun: str) -> None:
    node = make_node(says("x"))
    final = {"role": "assistant", "content": begun}
    await node.chat(messages=[*USER, final], continue_final_message=True)
    text = node.served.tokenizer.decode(node.runner.requests[0].prompt, skip_special_tokens=False)
    assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{begun}"


async def test_a_template_that_trims_messages_trims_a_final_one_too() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}|{% endfor %}"
    template = ChatTemplate(source, bos_token=None, eos_token=None)
    node = make_node(says("x"), served=tiny_served(template=template))
    final = {"role": "assistant", "content": " a | \n"}
    await node.chat(messages=[*USER, final], continue_final_message=True)
    text = node.served.tokenizer.decode(node.runner.requests[0].prompt)
    assert text == "[user]hi|[assistant]a |"


@pytest.mark.parametrize("begun", ["", " \n"])
async def test_nothing_cannot_be_continued(begun: str) -> None:
    final = {"role": "assistant", "content": begun}
    reply = await make_node(says("x")).chat(messages=[*USER, final], continue_final_message=True)
    assert (reply.status, reply.error["param"]) == (400, "continue_final_message")


async def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", bos_token=None, eos_token=None)
    node = make_node(says("x"), served=tiny_served(template=template))
    final = {"role": "assistant", "content": "Once"}
    reply = await node.chat(messages=[*USER, final], continue_final_message=True)
    assert (reply.status, reply.error["param"]) == (400, "continue_final_message")


# --- limits


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 64 - 21),
        ({"max_tokens": None}, 64 - 21),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 9, "max_completion_tokens": 4}, 4),
    ],
)
async def test_the_limit_is_what_was_asked_or_all_that_is_left(
    fields: dict[str, Any], expected: int
) -> None:
    node = make_node(says("x"), served=tiny_served(max_model_len=64))
    assert (await node.chat(**fields)).status == 200
    [request] = node.runner.requests
    assert (len(request.prompt), request.max_tokens) == (21, expected)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_over_the_context_is_refused_with_the_true_numbers(stream: bool) -> None:
    node = make_node(says("x"), served=tiny_served(max_model_len=64))
    reply = await node.chat(max_tokens=44, stream=stream)
    assert reply.status == 400
    assert reply.headers["content-type"] == "application/json"
    assert reply.error["code"] == "context_length_exceeded"
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == "max_tokens"
    for number in ("64", "21", "44", "65"):
        assert number in reply.error["message"]
    assert node.runner.requests == []


async def test_a_prompt_that_fills_the_context_alone_is_refused() -> None:
    node = make_node(says("x"), served=tiny_served(max_model_len=21))
    reply = await node.chat()
    assert reply.error["code"] == "context_length_exceeded"
    assert reply.error["param"] == "messages"
    assert "-" not in reply.error["message"].replace("'s", "")


async def test_an_answer_longer_than_the_model_can_ever_write_is_refused() -> None:
    reply = await make_node(says("x")).chat(max_completion_tokens=257)
    assert reply.error["code"] == "output_too_long"
    assert reply.error["param"] == "max_completion_tokens"


async def test_more_tokens_than_the_limit_cannot_be_a_minimum() -> None:
    assert (await make_node(says("x")).chat(max_tokens=3, min_tokens=4)).error["param"] == (
        "min_tokens"
    )


# --- choices


@pytest.mark.parametrize("stream", [True, False])
async def test_n_choices_share_the_prompt_and_end_once_each(stream: bool) -> None:
    node = make_node(says("a", "b"))
    one = (await node.chat()).json["usage"]["prompt_tokens"]
    reply = await node.chat(n=3, stream=stream, **_usage(stream))
    chunks = reply.chunks if stream else [reply.json]
    ends = [
        choice["index"] for chunk in chunks for choice in chunk["choices"]
        if choice["finish_reason"]
    ]  # fmt: skip
    assert sorted(ends) == [0, 1, 2]
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (one, 6)
    assert node.runner.requests[-1].n == 3
    if stream:
        roles = [c["choices"][0]["index"] for c in chunks if _delta(c).get("role")]
        assert roles == [0, 1, 2]


@pytest.mark.parametrize("n", [0, -1, 65, 10_000, 1.5, "2"])
async def test_a_bad_n_is_refused(n: Any) -> None:
    reply = await make_node(says("x")).chat(n=n)
    assert (reply.status, reply.error["param"]) == (400, "n")


# --- sampling


async def test_sampling_fields_reach_the_engine() -> None:
    node = make_node(says("x"))
    await node.chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.1, logit_bias={"5": 2}, seed=-3, min_tokens=2, stop=["a", ""],
        stop_token_ids=[9], include_stop_str_in_output=True, skip_special_tokens=False,
        logprobs=True, top_logprobs=4, cache_salt="s", use_prefix_cache=False,
    )  # fmt: skip
    [request] = node.runner.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.presence_penalty) == (0.1, 1)
    assert (sampling.frequency_penalty, sampling.repetition_penalty) == (-1, 1.1)
    assert sampling.logit_bias == {5: 2}
    assert sampling.seed == 2**64 - 3
    assert (sampling.min_tokens, sampling.logprobs) == (2, 4)
    assert sampling.stop_token_ids == {9, *node.served.eos_ids}
    assert (request.stop, request.include_stop) == (("a",), True)
    assert request.skip_special_tokens is False
    assert (request.cache_salt, request.use_prefix_cache) == ("s", False)


async def test_without_sampling_fields_the_defaults_hold_and_seeds_differ() -> None:
    node = make_node(says("x"))
    nothing: dict[str, Any] = dict.fromkeys(
        ["temperature", "top_p", "seed", "stop", "logit_bias", "n", "top_k"]
    )
    await node.chat(**nothing)
    await node.chat()
    first, second = node.runner.requests
    assert (first.sampling.temperature, first.sampling.top_p, first.n) == (1.0, 1.0, 1)
    assert first.sampling.top_k is None
    assert first.sampling.logprobs is None
    assert first.sampling.seed != second.sampling.seed


@pytest.mark.parametrize("top_k", [-1, 0])
async def test_top_k_below_one_means_all_tokens(top_k: int) -> None:
    node = make_node(says("x"))
    await node.chat(top_k=top_k)
    assert node.runner.requests[0].sampling.top_k is None


async def test_a_temperature_near_zero_is_greedy() -> None:
    node = make_node(says("x"))
    await node.chat(temperature=1e-9)
    assert node.runner.requests[0].sampling.temperature == 0.0


async def test_ignoring_eos_leaves_only_the_clients_stop_tokens() -> None:
    node = make_node(says("x"))
    await node.chat(ignore_eos=True, stop_token_ids=[8])
    assert node.runner.requests[0].sampling.stop_token_ids == {8}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"300": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias[...]"),
        ({"stop_token_ids": [1300]}, "stop_token_ids"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"model": None}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_bad_field_is_refused_before_anything_runs(
    fields: dict[str, Any], param: str, stream: bool
) -> None:
    node = make_node(says("x"))
    reply = await node.chat(stream=stream, **fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.headers["x-should-retry"] == "false"
    assert node.runner.requests == []
    assert (await node.chat()).status == 200


async def test_an_unknown_model_is_not_found_and_an_alias_is() -> None:
    node = make_node(says("x"))
    reply = await node.chat(model="gpt-9")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    reply = await node.chat(model="also-tiny")
    assert (reply.status, reply.json["model"]) == (200, MODEL)


async def test_a_model_without_a_template_refuses_chat() -> None:
    reply = await make_node(says("x"), served=tiny_served(template=None)).chat()
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "/v1/completions" in reply.error["message"]


async def test_what_the_template_refuses_is_told_in_its_own_words() -> None:
    source = "{{ raise_exception('no system role here') }}"
    template = ChatTemplate(source, bos_token=None, eos_token=None)
    reply = await make_node(says("x"), served=tiny_served(template=template)).chat()
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "no system role here" in reply.error["message"]


# --- logprobs


async def test_logprobs_have_one_entry_per_token_and_bytes_that_join_to_the_content() -> None:
    node = make_node(_spells("hé"))
    for top in (None, 3):
        fields: dict[str, Any] = {} if top is None else {"top_logprobs": top}
        choice = (await node.chat(logprobs=True, **fields)).json["choices"][0]
        content = choice["logprobs"]["content"]
        assert choice["logprobs"]["refusal"] is None
        assert [set(entry) for entry in content] == 4 * [
            {"token", "logprob", "bytes", "top_logprobs"}
        ]
        assert bytes(b for entry in content for b in entry["bytes"]).decode() == "hé"
        assert [len(entry["top_logprobs"]) for entry in content] == 4 * [top or 0]


async def test_streamed_logprobs_are_the_same_as_whole_ones() -> None:
    node = make_node(_spells("hé"))
    whole = (await node.chat(logprobs=True)).json["choices"][0]["logprobs"]["content"]
    chunks = (await node.chat(logprobs=True, stream=True)).chunks
    entries = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for entry in entries for entry in entry["content"]] == whole


async def test_token_ids_and_prompt_logprobs_come_when_asked() -> None:
    node = make_node(says("a", "b"))
    body = (await node.chat(return_token_ids=True, prompt_logprobs=1)).json
    prompt = node.runner.requests[0].prompt
    assert body["prompt_token_ids"] == list(prompt)
    assert body["choices"][0]["token_ids"] == [70, 71]
    assert len(body["prompt_logprobs"]) == len(prompt)
    assert body["prompt_logprobs"][0] is None
    first = body["prompt_logprobs"][1]
    assert first[str(prompt[1])]["rank"] == 1


# --- the form of the output


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
async def test_a_form_becomes_a_fresh_constraint_per_choice(fields: dict[str, Any]) -> None:
    node = make_node(says("x"))
    assert (await node.chat(**fields)).status == 200
    new = node.runner.requests[0].new_constraint
    assert new is not None
    assert new() is not new()


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "yaml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": ""}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
    ],
)
async def test_a_bad_form_is_refused_by_name(response_format: dict[str, Any]) -> None:
    reply = await make_node(says("x")).chat(response_format=response_format)
    assert reply.status == 400
    assert reply.error["param"].startswith("response_format")


async def test_text_format_is_no_format() -> None:
    node = make_node(says("x"))
    await node.chat(response_format={"type": "text"})
    assert node.runner.requests[0].new_constraint is None


# --- headers


async def test_headers_set_urgency_and_deadlines() -> None:
    node = make_node(says("x"), queue_timeout_s=30, request_timeout_s=120)
    body = {"model": MODEL, "messages": USER}
    path = "/v1/chat/completions"
    await node.post(path, body)
    await node.post(path, body, x_kvota_priority="batch", x_kvota_deadline_s="12.5")
    await node.post(path, body, x_kvota_deadline_s="5000")
    plain, urgent, patient = node.runner.requests
    assert (plain.band, plain.queue_deadline_s, plain.deadline_s) == (Band.INTERACTIVE, 130, 220)
    assert (urgent.band, urgent.queue_deadline_s, urgent.deadline_s) == (Band.BATCH, 112.5, 112.5)
    assert patient.deadline_s == 220, "a client cannot ask for more than the server's limit"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-kvota-deadline-s", "soon"),
        ("x-kvota-deadline-s", "0"),
        ("x-kvota-deadline-s", "-1"),
        ("x-kvota-deadline-s", "nan"),
        ("x-kvota-deadline-s", "inf"),
        ("x-kvota-priority", "urgent"),
    ],
)
async def test_a_bad_header_is_refused_by_name(name: str, value: str) -> None:
    node = make_node(says("x"))
    body = {"model": MODEL, "messages": USER}
    reply = await node.post("/v1/chat/completions", body, **{name: value})
    assert (reply.status, reply.error["param"]) == (400, name)


async def test_what_the_engine_measured_is_in_the_headers() -> None:
    node = make_node(says("x", cached=32))
    whole, stream = await node.chat(), await node.chat(stream=True)
    assert whole.headers["x-kvota-cached-tokens"] == "32"
    assert whole.headers["x-kvota-queue-ms"] == "250"
    assert stream.headers["x-kvota-cached-tokens"] == "32"


def _delta(chunk: dict[str, Any]) -> dict[str, Any]:
    delta: dict[str, Any] = chunk["choices"][0]["delta"] if chunk["choices"] else {}
    return delta


def _usage(stream: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if stream else {}


def _spells(text: str) -> Script:
    """The bytes of a text, one token each, then the end-of-turn token."""
    served: ServedModel = tiny_served()
    tokens = [3 + byte for byte in text.encode()]

    def script(request: Request) -> Sequence[Event]:
        end = next(iter(served.eos_ids))
        deltas: list[Delta] = [delta(request, "", token=token) for token in tokens]
        shown = delta(request, text, token=end, finish=FinishReason.STOP)
        return [read(request), *deltas, shown, ended(request, output=len(tokens) + 1)]

    return script
