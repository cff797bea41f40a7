"""Chat templates: what a client may send, what a template may do, and what it is given."""

import json
from datetime import datetime
from typing import Any

import pytest

from kvota.core.errors import InvalidRequest, ModelError
from kvota.model.template import ChatTemplate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant/…') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
KNOWS_TOOLS = (
    "{% if tools %}TOOLS{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content }}{% for call in m.tool_calls %}"
    '<call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}"
    "{% endfor %}{% endfor %}"
)
JOINS_ARGUMENTS = (
    "{% for m in messages %}{% if m.content is none %}{% for call in m.tool_calls %}"
    "{{ call.function.name + '(' + call.function.arguments + ')' }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{# tools: #}{{ tools }}"
)
USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def template(source: str | None, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", **options)


def refusal(source: str | None, *messages: dict[str, Any], **options: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        template(source).render(messages or (USER,), **options)
    assert caught.value.param is not None
    assert "Traceback" not in caught.value.message
    return caught.value.message


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "now", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function}


def test_the_default_models_template_writes_its_prompt() -> None:
    """The text that SmolLM2's model card documents."""
    prompt = template(SMOLLM2).render([USER])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_generation_prompt_can_be_left_out() -> None:
    prompt = template(SMOLLM2).render([USER], add_generation_prompt=False)
    assert prompt.endswith("hi<|im_end|>\n")


def test_a_template_sees_the_names_that_hugging_face_gives_it() -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ tools }}|{{ documents }}|{{ strftime_now('%Y') }}"
    made = template(source, now=lambda: datetime(2024, 5, 6))
    assert made.render([USER]) == "<s>|</s>|None|None|2024"


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert template(source).render([USER]) == "hi\n"


def test_json_is_not_escaped_for_html() -> None:
    assert template("{{ messages[0].content | tojson }}").render(
        [{"role": "user", "content": "<é & '>"}]
    ) == json.dumps("<é & '>", ensure_ascii=False)


def test_loop_controls_and_the_generation_tag_are_known() -> None:
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert template(source).render([USER, USER, USER]) == "hi"


def test_a_concatenation_joins_as_jinja_does() -> None:
    assert template("{{ 'a' ~ 1 ~ missing ~ none }}").render([USER]) == "a1None"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "system", "content": "s"}, USER], "System role not supported"),
        ([USER, USER], "Roles must alternate user/assistant/…"),
        ([{"role": "assistant", "content": "a"}], "Roles must alternate user/assistant/…"),
    ],
)
def test_a_template_refuses_in_its_own_words(messages: list[dict[str, Any]], message: str) -> None:
    assert refusal(ALTERNATING, *messages) == message


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' | nosuchfilter }}", "{% for m in %}"])
def test_a_template_that_does_not_compile_fails_at_start(source: str) -> None:
    with pytest.raises(ModelError, match="does not compile: line 1"):
        template(source)


def test_without_a_template_chat_is_refused_with_a_way_out() -> None:
    made = template(None)
    assert not made.supports_tools
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        made.render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + none }}",
        "{{ messages[7].content.role }}",
        "{{ 1 // 0 }}",
        "{{ nothing() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_an_error_inside_a_template_is_the_requests(source: str) -> None:
    assert refusal(source)


def test_a_long_error_is_cut() -> None:
    assert len(refusal("{{ raise_exception('x' * 10000) }}")) < 500


def test_extra_variables_reach_the_template() -> None:
    source = "{{ enable_thinking }}{{ more.deep[0] }}"
    extra = {"enable_thinking": False, "more": {"deep": [1.5]}}
    assert template(source).render([USER], extra=extra) == "False1.5"


@pytest.mark.parametrize(
    "extra",
    [
        {"messages": []},
        {"bos_token": "x"},
        {"_spend": 1},
        {"not a name": 1},
        {"f": print},
        {"deep": [[[[[[[[[[1]]]]]]]]]]},
        {"keys": {1: 2}},
    ],
)
def test_extra_variables_are_json_and_replace_nothing(extra: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(PLAIN).render([USER], extra=extra)
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_that_knows_tools_is_given_them() -> None:
    made = template(KNOWS_TOOLS)
    assert made.supports_tools
    assert made.render([USER], tools=[TOOL]) == f"TOOLS{json.dumps([TOOL])}[user]hi"
    assert made.render([USER], tools=[]) == "[user]hi"


def test_a_template_for_tools_is_used_when_there_are_tools_and_only_then() -> None:
    made = template(PLAIN, tool_source=KNOWS_TOOLS)
    assert made.render([USER], tools=[TOOL]) == template(KNOWS_TOOLS).render([USER], tools=[TOOL])
    assert made.render([USER]) == made.render([USER], tools=[]) == template(PLAIN).render([USER])
    with pytest.raises(ModelError):
        template(PLAIN, tool_source="{% if %}")


@pytest.mark.parametrize("arguments", ['{"zone": "CET"}', {"zone": "CET"}])
def test_arguments_are_objects_where_the_template_prints_json(arguments: Any) -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    prompt = template(KNOWS_TOOLS).render([USER, answer])
    assert prompt.endswith('<call>{"name": "now", "arguments": {"zone": "CET"}}')


@pytest.mark.parametrize("arguments", ['{"zone": "CET"}', {"zone": "CET"}])
@pytest.mark.parametrize("content", [None, ""])
def test_arguments_are_text_where_the_template_joins_them(arguments: Any, content: Any) -> None:
    answer = {"role": "assistant", "content": content, "tool_calls": [call(arguments)]}
    prompt = template(JOINS_ARGUMENTS).render([USER, answer])
    assert prompt == 'hinow({"zone": "CET"})None'


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_a_call_without_arguments_has_empty_ones(arguments: Any) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}
    assert template(KNOWS_TOOLS).render([answer]).endswith('"arguments": {}}')


@pytest.mark.parametrize("arguments", ["{not json", "[1]", "3"])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}
    message = refusal(KNOWS_TOOLS, USER, answer)
    assert "messages[1].tool_calls" in message
    assert "'now'" in message


NINE_CHARACTER_IDS = (
    "{% for m in messages %}{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids must have length 9') }}{% endif %}"
    "[{{ call.function | tojson }} {{ call.id }}]{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    "{% if tools %}{% endif %}"
)


@pytest.mark.parametrize(
    ("given_id", "read"),
    [("call_0123456789abcdef", "789abcdef"), ("c-1", "0000000c1"), ("", "000000000")],
)
def test_ids_are_shortened_for_templates_that_insist(given_id: str, read: str) -> None:
    asked = {**call('{"a": 1}'), "id": given_id}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "content": "1", "tool_call_id": given_id},
    ]
    prompt = template(NINE_CHARACTER_IDS).render(messages)
    assert prompt == f'[{{"name": "now", "arguments": {{"a": 1}}}} {read}]{read}'


def test_ids_stay_as_they_are_elsewhere() -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}"
    asked = {**call("{}"), "id": "call_0123456789abcdef"}
    answer = {"role": "assistant", "content": "", "tool_calls": [asked]}
    assert "call_0123456789abcdef" in template(source + "{{ tools }}").render([answer])


def test_null_fields_are_absent_for_the_template() -> None:
    source = "{% for m in messages %}{{ 'tool_calls' in m }}{{ m.content }}{% endfor %}"
    messages = [{"role": "assistant", "content": None, "tool_calls": None, "name": None}]
    assert template(source).render(messages) == "False"


def test_rendering_changes_nothing_of_the_request() -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": None}
    messages = [USER, {**answer, "tool_calls": [call('{"a": 1}')]}]
    before = json.dumps(messages)
    template(KNOWS_TOOLS).render(messages)
    template(PLAIN).render(messages, tools=[TOOL])
    assert json.dumps(messages) == before


def test_tools_are_said_in_words_to_a_template_that_knows_none() -> None:
    made = template(PLAIN)
    assert not made.supports_tools
    prompt = made.render([{"role": "system", "content": "Be brief."}, USER], tools=[TOOL])
    assert prompt.startswith("[system]Be brief.\n\n# Tools")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in prompt
    assert '<tool_call>\n{"name": ' in prompt
    assert prompt.endswith("[user]hi")


def test_tools_become_a_system_message_where_there_is_none() -> None:
    assert template(PLAIN).render([USER], tools=[TOOL]).startswith("[system]# Tools")


def test_tools_go_to_the_user_where_system_messages_are_refused() -> None:
    prompt = template(ALTERNATING).render([USER], tools=[TOOL])
    assert prompt.startswith("<s>[user]# Tools")
    assert prompt.endswith("\n\nhi")


def test_tool_messages_become_turns_of_user_and_assistant() -> None:
    conversation: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call('{"a": 1}'), call("")]},
        {"role": "tool", "content": "12:00", "tool_call_id": "c1"},
        {"role": "tool", "content": "13:00", "tool_call_id": "c2"},
        {"role": "user", "content": "And?"},
    ]
    assert template(ALTERNATING).render(conversation) == (
        "<s>[user]hi[assistant]Let me see.\n"
        '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        "[user]<tool_response>\n12:00\n</tool_response>\n<tool_response>\n13:00\n</tool_response>\n"
        "And?"
    )
