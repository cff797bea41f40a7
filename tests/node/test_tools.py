"""Tool calls over HTTP: streams and bodies tell the same calls."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from kvota.core.request import FinishReason
from tests.support.grammar_walk import is_allowed_whole
from tests.support.http import Node, Script, make_node, says, tiny_served
from tests.support.tiny_tokenizer import IM_END_ID

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
ARGUMENTS = '{"city": "a {b} \\"c\\"", "deep": {"x": [1, {"y": "}"}]}}'
TWO_CALLS = (
    '<tool_call>\n{"name": "ping"}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
)


def tool_node(script: Script) -> Node:
    """With room for the words that tell the model of its tools."""
    return make_node(script, served=tiny_served(max_model_len=8000))


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_two_calls_stream_as_they_are_told_whole(size: int) -> None:
    node = tool_node(says(*cut(TWO_CALLS, size)))
    fields: dict[str, Any] = {"tools": [WEATHER, PING]}
    [choice] = (await node.chat(**fields)).json["choices"]
    chunks = (await node.chat(stream=True, **fields)).chunks
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["ping", "weather"]
    assert [set(call) for call in message["tool_calls"]] == 2 * [{"id", "type", "function"}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    joined = _joined_calls(chunks)
    assert [call["arguments"] for call in joined] == [
        call["function"]["arguments"] for call in message["tool_calls"]
    ]
    assert json.loads(joined[0]["arguments"]) == {}
    assert json.loads(joined[1]["arguments"]) == json.loads(ARGUMENTS)
    ends = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert ends == ["tool_calls"]


def _joined_calls(chunks: list[Any]) -> list[dict[str, Any]]:
    """The calls of a stream, after checking that each is announced once, whole, first."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for piece in chunk["choices"][0]["delta"].get("tool_calls", []):
            if piece["index"] == len(calls):
                assert set(piece) == {"index", "id", "type", "function"}
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
            calls[piece["index"]]["arguments"] += piece["function"].get("arguments", "")
    return calls


async def test_text_before_a_call_is_content() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    [choice] = (await tool_node(says(*cut(text, 3))).chat(tools=[PING])).json["choices"]
    assert choice["message"]["content"] == "Let me see."
    assert len(choice["message"]["tool_calls"]) == 1


async def test_an_answer_without_calls_is_plain_content() -> None:
    [choice] = (await tool_node(says("Just", " text")).chat(tools=[PING])).json["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Just text", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_a_forced_call_that_is_cut_before_its_name_shows_no_markup() -> None:
    pieces = cut('<tool_call>\n{"name": "pi', 3)
    for choice, shown in (("required", ""), ("auto", "".join(pieces))):
        node = tool_node(says(*pieces, finish=FinishReason.LENGTH))
        fields: dict[str, Any] = {"tools": [PING], "tool_choice": choice}
        [told] = (await node.chat(**fields)).json["choices"]
        assert (told["message"]["content"], told["finish_reason"]) == (shown, "length")
        chunks = (await node.chat(stream=True, **fields)).chunks
        deltas = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        assert "".join(delta or "" for delta in deltas) == shown


async def test_a_call_that_the_limit_cuts_ends_with_length() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "B'
    node = tool_node(says(*cut(text, 4), finish=FinishReason.LENGTH))
    [choice] = (await node.chat(tools=[WEATHER])).json["choices"]
    assert choice["finish_reason"] == "length"


HALF = ['<tool_call>\n{"name": "weather", ', '"arguments": {"city": ', '"B']


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True, "stop": "erlin"},
        {"stream": True, "stream_options": {"whole_tool_calls": True}},
    ],
    ids=["body", "stop", "put together"],
)
async def test_half_a_call_is_told_as_the_text_it_is(fields: dict[str, Any]) -> None:
    """An agent would run it, or fail to read its arguments."""
    first = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n'
    for before, num_calls, reason in (("", 0, "stop"), (first, 1, "tool_calls")):
        told = await _told(tool_node(says(before, *HALF)), tools=[WEATHER, PING], **fields)
        assert (len(told.calls), told.finish_reason) == (num_calls, reason)
        assert told.content.strip() == "".join(HALF)


async def test_half_a_call_that_is_out_already_does_not_end_as_a_call() -> None:
    told = await _told(tool_node(says(*HALF)), tools=[WEATHER], stream=True)
    assert (told.calls, told.finish_reason) == ([("weather", '{"city": "B')], "stop")


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "stop": "x"}], ids=str)
async def test_half_a_call_at_the_limit_is_told_with_length(fields: dict[str, Any]) -> None:
    node = tool_node(says(*HALF, finish=FinishReason.LENGTH))
    told = await _told(node, tools=[WEATHER], **fields)
    assert (told.calls, told.finish_reason) == ([("weather", '{"city": "B')], "length")


async def test_half_a_forced_call_shows_no_markup() -> None:
    told = await _told(tool_node(says(*HALF)), tools=[WEATHER], tool_choice="required")
    assert (told.content, told.calls, told.finish_reason) == ("", [], "stop")


async def test_a_stop_behind_the_arguments_leaves_the_call_whole() -> None:
    text = '<tool_call>\n{"name": "ping", "arguments": {"a": {}}'
    for fields in ({}, {"stream": True, "stop": "}\n</tool_call>"}):
        told = await _told(tool_node(says(*cut(text, 5))), tools=[PING], **fields)
        assert (told.calls, told.finish_reason) == ([("ping", '{"a": {}}')], "tool_calls")


async def test_half_of_a_second_call_is_nothing_to_who_takes_one() -> None:
    node = tool_node(says('<tool_call>{"name": "ping"}</tool_call><tool_call>', *HALF[0:1], "x"))
    told = await _told(node, tools=[WEATHER, PING], parallel_tool_calls=False, stream=True)
    assert (told.calls, told.finish_reason) == ([("ping", "{}")], "tool_calls")


@dataclass
class Told:
    content: str
    calls: list[tuple[str, str]]
    finish_reason: str


async def _told(node: Node, **fields: Any) -> Told:
    """What a client makes of the only choice, streamed or not."""
    reply = await node.chat(**fields)
    if not fields.get("stream"):
        [choice] = reply.json["choices"]
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [(function["name"], function["arguments"]) for function in functions]
        return Told(message["content"] or "", calls, choice["finish_reason"])
    choices = [chunk["choices"][0] for chunk in reply.chunks]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    calls = [(call["name"], call["arguments"]) for call in _joined_calls(reply.chunks)]
    [reason] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return Told(content, calls, reason)


async def test_without_parallel_calls_only_the_first_is_told() -> None:
    node = tool_node(says(*cut(TWO_CALLS, 5)))
    fields: dict[str, Any] = {"tools": [WEATHER, PING], "parallel_tool_calls": False}
    [choice] = (await node.chat(**fields)).json["choices"]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["ping"]
    assert len(_joined_calls((await node.chat(stream=True, **fields)).chunks)) == 1


async def test_tools_are_told_to_the_model_unless_the_choice_is_none() -> None:
    node = tool_node(says("x"))
    await node.chat(tools=[WEATHER])
    await node.chat(tools=[WEATHER], tool_choice="none")
    told, untold = (node.served.tokenizer.decode(r.prompt) for r in node.runner.requests)
    assert "weather" in told
    assert "weather" not in untold


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_a_required_call_is_forced_by_a_grammar(choice: Any) -> None:
    node = tool_node(says(*cut(TWO_CALLS, 5)))
    reply = await node.chat(tools=[WEATHER, PING], tool_choice=choice)
    assert reply.json["choices"][0]["finish_reason"] == "tool_calls"
    assert node.runner.requests[0].new_constraint is not None
    await node.chat(tools=[WEATHER, PING])
    assert node.runner.requests[1].new_constraint is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [PING], "response_format": {"type": "json_schema", "json_schema":
          {"name": "x", "schema": {"type": "nope"}}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters":
          {"type": "nope"}}}], "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters":
          {"type": "nope"}}}], "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
async def test_tools_that_cannot_be_honoured_are_refused(
    fields: dict[str, Any], param: str
) -> None:
    node = tool_node(says("x"))
    reply = await node.chat(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": '\\{"x": 3\\}'}},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
async def test_beside_a_form_the_model_may_call_or_answer_in_it(form: dict[str, Any]) -> None:
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    for text, content, num_calls in (('{"x": 3}', '{"x": 3}', 0), (call, "", 1)):
        node = tool_node(says(*cut(text, 2)))
        for stream in (False, True):
            told = await _told(node, tools=[WEATHER, PING], stream=stream, **form)
            assert (told.content, len(told.calls)) == (content, num_calls)
            assert told.finish_reason == ("tool_calls" if num_calls else "stop")
        assert _allows(node, text)
        assert not _allows(node, "Hello")


async def test_a_document_that_quotes_a_call_is_a_document() -> None:
    text = '{"x": 3, "y": "<tool_call>", "name": "ping", "arguments": {}}'
    told = await _told(tool_node(says(*cut(text, 3))), tools=[PING], **FORMS[0])
    assert (told.content, told.calls) == (text, [])


async def test_where_a_call_is_due_the_form_has_nothing_to_say() -> None:
    node = tool_node(says(*cut(TWO_CALLS, 9)))
    told = await _told(node, tools=[WEATHER, PING], tool_choice="required", **FORMS[0])
    assert told.finish_reason == "tool_calls"
    assert _allows(node, '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>')
    assert not _allows(node, '{"x": 3}')


async def test_beside_a_form_a_schema_that_cannot_be_enforced_binds_only_strict_tools() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "nope"}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    node = tool_node(says("{}"))
    assert (await node.chat(tools=[tool, WEATHER], **FORMS[0])).status == 200
    call = '<tool_call>\n{"name": "odd", "arguments": {"a": [1]}}\n</tool_call>'
    assert _allows(node, call)


STRICT: dict[str, Any] = {
    "type": "function",
    "function": {"name": "strict", "strict": True, "parameters": SCHEMA},
}


async def test_a_strict_tool_gets_the_arguments_that_it_asks_for() -> None:
    node = tool_node(says("x"))
    await node.chat(tools=[WEATHER, STRICT])
    call = '<tool_call>\n{"name": "strict", "arguments": %s}\n</tool_call>'
    assert _allows(node, "Let me see. " + call % '{"x": 3}' + " Done.")
    assert not _allows(node, "Let me see. " + call % "{}" + " Done.")
    assert _allows(node, (call % '{"any": 1}').replace("strict", "weather"))


async def test_a_schema_that_cannot_be_enforced_is_said_to_be_whose() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "nope"}}}
    function = {"name": "odd", "parameters": odd, "strict": True}
    node = tool_node(says("x"))
    for fields in ({}, {"tool_choice": "required"}, FORMS[0]):
        tools = [WEATHER, PING, {"type": "function", "function": function}]
        reply = await node.chat(tools=tools, **fields)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "'odd'" in reply.error["message"]
        assert "Invalid type: nope" in reply.error["message"]


def _allows(node: Node, text: str) -> bool:
    """Whether the grammar of the last request lets this be the answer."""
    new_constraint = node.runner.requests[-1].new_constraint
    assert new_constraint is not None
    return is_allowed_whole(new_constraint(), text, node.served.tokenizer.pieces, IM_END_ID)


async def test_a_model_that_cannot_call_tools_says_so() -> None:
    reply = await make_node(says("x"), served=tiny_served(tooling=None)).chat(tools=[PING])
    assert (reply.status, reply.error["param"]) == (400, "tools")
