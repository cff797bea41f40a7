"""Messages reach the template in one form, whatever form they came in."""

from typing import Any

import pytest

from kvota.core.errors import InvalidRequest
from kvota.wire.decode import ENTRIES_MAX, BodyDecoder
from kvota.wire.messages import ToolUse, template_messages, tool_use
from kvota.wire.openai import ChatRequest
from tests.wire.bodies import chat_body

CHAT = BodyDecoder(ChatRequest)


def messages(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages(CHAT.decode(chat_body(messages=list(given))).messages)


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def use(**fields: Any) -> ToolUse | None:
    return tool_use(CHAT.decode(chat_body(**fields)))


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_text_parts_are_joined_without_a_separator(role: str) -> None:
    parts = [{"type": "text", "text": "red, "}, {"type": "text", "text": "green, blue"}]
    as_parts = messages({"role": role, "content": parts})
    assert as_parts == messages({"role": role, "content": "red, green, blue"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"reasoning_content": "a"}, {"reasoning_content": "a"}),
        ({"reasoning": "a"}, {"reasoning": "a", "reasoning_content": "a"}),
        ({"reasoning": "a", "reasoning_content": "b"},
         {"reasoning": "a", "reasoning_content": "b"}),
        ({"reasoning": {"effort": "low"}}, {}),
        ({"reasoning": None}, {}),
    ],
)  # fmt: skip
def test_earlier_reasoning_reaches_the_template_under_either_name(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    [message] = messages({"role": "assistant", "content": "x", **given})
    assert message == {"role": "assistant", "content": "x", **expected}


def test_developer_is_read_as_system_and_function_as_tool() -> None:
    roles = [m["role"] for m in messages(
        {"role": "developer", "content": "a"}, {"role": "function", "name": "f", "content": "b"}
    )]  # fmt: skip
    assert roles == ["system", "tool"]


def test_an_assistant_may_say_nothing_and_its_refusal_is_text() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    refusal = [{"type": "refusal", "refusal": "no"}]
    first, second = messages(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": refusal},
    )
    assert first == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert second["content"] == "no"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "tool", "tool_call_id": "x"}, "messages[1].content"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": [{"type": "text", "text": "a"},
          {"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[1].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "assistant", "content": "", "audio": {"id": "x"}}, "messages[1].audio"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
         "messages[1].function_call"),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_read_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages({"role": "user", "content": "fine"}, message)
    assert caught.value.param == param


@pytest.mark.parametrize("given", [None, []])
def test_no_messages_are_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template_messages(given)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": []}, {"tools": None, "tool_choice": None}, {"tool_choice": "auto"},
     {"tool_choice": "none"}, {"tools": [tool("f")], "tool_choice": "none"}],
)  # fmt: skip
def test_without_callable_tools_the_answer_is_text(fields: dict[str, Any]) -> None:
    assert use(**fields) is None


def test_tools_keep_the_clients_wording() -> None:
    given = [tool("f", description="d", parameters={"type": "object"}), tool("g")]
    found = use(tools=given)
    assert found == ToolUse(tuple(given), required=False, name=None, parallel=True)


def test_a_choice_can_require_a_call_name_it_or_narrow_the_tools() -> None:
    tools = [tool("f"), tool("g")]
    assert use(tools=tools, tool_choice="required") == ToolUse(tuple(tools), required=True)
    named = {"type": "function", "function": {"name": "g"}}
    assert use(tools=tools, tool_choice=named) == ToolUse((tools[1],), True, "g")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("g")]}}
    assert use(tools=tools, tool_choice=allowed) == ToolUse((tools[1],))
    single = use(tools=tools, parallel_tool_calls=False)
    assert single is not None
    assert not single.parallel


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
         "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
         "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [tool("f"), tool("a b")]}, "tools[1].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1]"),
        ({"tools": [tool(f"f{i}") for i in range(ENTRIES_MAX["tools"] + 1)]}, "tools"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_used_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        use(**fields)
    assert caught.value.param == param
