"""Tools for a chat template that knows none: said in words, in the format of the Hermes models.

tools                   → the system message, as JSON in <tools></tools>
assistant tool_calls    → <tool_call>{"name": …, "arguments": …}</tool_call> in its text
tool messages           → <tool_response>…</tool_response> from the user
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_PROMPT = """\
# Tools

You may call one or more of these functions to help the user. Their signatures are within \
<tools></tools>:
<tools>
{signatures}
</tools>

To call a function, write a JSON object with its name and its arguments within \
<tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <JSON object>}}
</tool_call>"""


def with_tool_prompt(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, role: str
) -> list[Message]:
    """Add the tools to the first message, if `role` wrote it; else put one in front.

    `role` is "system", or "user" for templates that refuse system messages.
    """
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = _PROMPT.format(signatures=signatures)
    first, rest = messages[:1], list(messages[1:])
    if not first or first[0].get("role") != role:
        return [{"role": role, "content": prompt}, *messages]
    own = str(first[0].get("content") or "")
    parts = (own, prompt) if role == "system" else (prompt, own)
    return [{**first[0], "content": "\n\n".join(part for part in parts if part)}, *rest]


def as_plain_messages(messages: Sequence[Message]) -> list[Message]:
    """The conversation in the roles system, user and assistant only.

    Answers of tools that follow each other, and what the user says right after, become one
    message, for templates that want user and assistant to take turns.
    """
    plain: list[Message | list[str]] = []  # texts: of one message of the user
    texts: list[str] | None = None  # the last ones, while more may belong to them
    for message in messages:
        is_tool = message.get("role") == "tool"
        if texts is not None and (is_tool or message.get("role") == "user"):
            texts.append(_text(message))
        elif is_tool:
            texts = [_text(message)]
            plain.append(texts)
        else:
            plain.append(_without_calls(message))
        if not is_tool:
            texts = None
    return [_user("\n".join(one)) if isinstance(one, list) else one for one in plain]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return f"<tool_response>\n{content}\n</tool_response>"
    return str(content)


def _without_calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [_text(message)] if message.get("content") else []
    texts += [_call_text(call["function"]) for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def _call_text(function: Mapping[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
