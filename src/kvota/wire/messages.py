"""Messages and tools as clients send them, turned into what chat templates are written for.

Templates know the roles system, user, assistant and tool, and content as one string; clients also
send developer and function, and lists of parts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvota.core.errors import InvalidRequest
from kvota.wire.openai import ChatRequest, ContentPart, Message, Tool, ToolCall, ToolChoice

_TEMPLATE_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_FUNCTION_NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request that the model may call, and whether it has to."""

    tools: tuple[dict[str, Any], ...]
    required: bool = False  # at least one call, and nothing else
    name: str | None = None  # this function and no other
    parallel: bool = True  # more than one call in one answer

    @property
    def is_strict(self) -> bool:
        """Whether the arguments of some tool have to follow its schema."""
        return any(tool["function"].get("strict") for tool in self.tools)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)


def template_messages(messages: Sequence[Message] | None) -> list[dict[str, Any]]:
    """One dict per message. Raises InvalidRequest that names the message at fault."""
    if not messages:
        raise InvalidRequest("`messages` must hold at least one message.", param="messages")
    return [_template_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    role = _TEMPLATE_ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"`{where}.role` is {message.role[:32]!r}; roles are {', '.join(_TEMPLATE_ROLES)}.",
            param=f"{where}.role",
        )
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise InvalidRequest(f"`{where}.{name}` is not supported.", param=f"{where}.{name}")
    result: dict[str, Any] = {"role": role, "content": _joined_content(message, where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            result[name] = getattr(message, name)
    if isinstance(message.reasoning, str):  # templates know either name
        result["reasoning"] = message.reasoning
        result.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls:
        result["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return result


def _joined_content(message: Message, where: str) -> str:
    """The content as one string; parts are joined without a separator."""
    content = message.content
    if isinstance(content, str):
        return content
    if content is None and message.role == "assistant":
        return ""  # usual beside tool calls
    if not content:
        raise InvalidRequest(f"`{where}.content` is missing or empty.", param=f"{where}.content")
    return "".join(
        _part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)
    )


def _part_text(part: ContentPart, where: str) -> str:
    if part.type not in ("text", "refusal"):
        raise InvalidRequest(
            f"`{where}` has the type {part.type[:32]!r}; this model reads text only.",
            param=f"{where}.type",
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise InvalidRequest(f"`{where}.{part.type}` is missing.", param=f"{where}.{part.type}")
    return text


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Arguments stay as the client wrote them: the template knows which form it reads."""
    function = {"name": call.function.name, "arguments": call.function.arguments or {}}
    return {"id": call.id or "", "type": "function", "function": function}


def tool_use(request: ChatRequest) -> ToolUse | None:
    """What the request says about tools; None when the answer is to be plain text."""
    tools = _checked_tools(request.tools or [])
    choice = request.tool_choice
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, ToolChoice):
        return _chosen(choice, tools, parallel)
    if choice not in (None, "none", "auto", "required"):
        raise InvalidRequest(
            "`tool_choice` must be none, auto, required, or name a function.", param="tool_choice"
        )
    if choice == "required" and not tools:
        raise InvalidRequest("`tool_choice` needs `tools`.", param="tool_choice")
    if choice == "none" or not tools:
        return None
    return ToolUse(tuple(tools.values()), choice == "required", None, parallel)


def _chosen(choice: ToolChoice, tools: dict[str, dict[str, Any]], parallel: bool) -> ToolUse:
    if choice.type == "function" and choice.function is not None:
        name = choice.function.name
        _require_known([name], tools)
        return ToolUse((tools[name],), True, name, parallel)
    allowed = choice.allowed_tools
    if choice.type == "allowed_tools" and allowed and allowed.mode in ("auto", "required"):
        names = [tool.function.name for tool in allowed.tools if tool.function is not None]
        _require_known(names, tools)
        chosen = tuple(tools[name] for name in dict.fromkeys(names))
        if chosen:
            return ToolUse(chosen, allowed.mode == "required", None, parallel)
    raise InvalidRequest(
        "`tool_choice` must be a function or a list of allowed functions.", param="tool_choice"
    )


def _require_known(names: list[str], tools: dict[str, dict[str, Any]]) -> None:
    for name in names:
        if name not in tools:
            raise InvalidRequest(
                f"`tool_choice` names {name[:64]!r}, which is not in `tools`.", param="tool_choice"
            )


def _checked_tools(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """The tools by name, in the client's order and wording."""
    checked: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        name = _tool_name(tool, f"tools[{index}]")
        if name in checked:
            raise InvalidRequest(
                f"`tools[{index}].function.name` is used twice.", param=f"tools[{index}]"
            )
        checked[name] = msgspec.to_builtins(tool)
    return checked


def _tool_name(tool: Tool, where: str) -> str:
    if tool.type != "function" or tool.function is None:
        raise InvalidRequest(
            f"`{where}` must have the type function and describe one.", param=f"{where}.type"
        )
    if not _FUNCTION_NAME.fullmatch(tool.function.name):
        raise InvalidRequest(
            f"`{where}.function.name` must be 1 to 64 of a-z, A-Z, 0-9, _ and -.",
            param=f"{where}.function.name",
        )
    return tool.function.name
