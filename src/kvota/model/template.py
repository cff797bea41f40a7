"""From chat messages to the prompt text a model was trained on, through its own Jinja template.

    messages, tools ─▶ what this template can read ─▶ rendering within bounds ─▶ prompt text

Templates differ in what they read. It is tried out once, when one is loaded: whether tool calls
carry arguments as objects or as JSON text, whether their ids must have Mistral's nine characters,
and whether a system message is allowed. A template that never reads `tools` knows none; then
`tool_prompt.py` says them in words.

The prompt is complete: it is encoded without further framing (`add_special_tokens=False`),
because a template that wants BOS writes it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from kvota.core.errors import InvalidRequest, ModelError
from kvota.model.template_sandbox import (
    ChatEnvironment,
    TooMuchWork,
    WorkBudget,
    render_bounded,
)
from kvota.model.tool_prompt import as_plain_messages, with_tool_prompt

Message = dict[str, Any]

MESSAGE_CHARS_MAX = 400  # of a template's own error
EXTRA_DEPTH_MAX = 8
EXTRA_PARAM = "chat_template_kwargs"
_LONG_ID, _SHORT_ID = "call_abcdefghijklmnopqrstuvwx", "abcdefghi"  # OpenAI's and Mistral's
# (arguments as objects, short ids), in the order in which they are tried
_CALL_FORMS = ((True, False), (False, False), (True, True), (False, True))
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
        "range",
        "loop",
        "self",
    }
)
_TESTS_FOR_NONE = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none", re.IGNORECASE)


class ChatTemplate:
    """One model's template. Thread-safe; every rendering has a budget of its own."""

    def __init__(
        self,
        source: str | None,
        *,
        tool_source: str | None = None,
        bos_token: str | None,
        eos_token: str | None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`tool_source` is rendered instead when a request brings tools, for models that keep two.

        Raises ModelError for a template that does not compile.
        """
        self._names = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._template: Template | None = None
        self._tests_for_none = source is not None and bool(_TESTS_FOR_NONE.search(source))
        self.supports_tools = False
        if source is not None:
            self._compile(source, now)
        shown = (form for form in _CALL_FORMS if self._shows_call(*form))
        self._wants_objects, self._wants_short_ids = next(shown, _CALL_FORMS[0])
        self._tool_prompt_role = "system" if self._allows_system() else "user"
        self._for_tools: ChatTemplate | None = None
        if tool_source is not None:
            self._for_tools = ChatTemplate(
                tool_source, bos_token=bos_token, eos_token=eos_token, now=now
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for these messages.

        `extra` are further variables for the template (`chat_template_kwargs`): JSON values. Raises
        InvalidRequest with the template's own words when it refuses the messages.
        """
        if tools and self._for_tools:
            return self._for_tools.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra
            )
        variables = _checked_extra(extra or {})
        prepared = self._prepared([dict(message) for message in messages], tools or ())
        return self._render(
            prepared,
            tools=list(tools) if tools and self.supports_tools else None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def _compile(self, source: str, now: Callable[[], datetime]) -> None:
        environment = ChatEnvironment(lambda format_: now().strftime(format_))
        try:
            tree = environment.parse(source)
            names = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "load"}
            self._template = environment.compile_chat(tree)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"The model's chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        self.supports_tools = "tools" in names

    def _prepared(
        self, messages: list[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[Message]:
        if not self.supports_tools:
            messages = as_plain_messages(messages)
            if tools:
                messages = with_tool_prompt(messages, tools, role=self._tool_prompt_role)
        return [self._readable(message, index) for index, message in enumerate(messages)]

    def _readable(self, message: Message, index: int) -> Message:
        """One message without nulls, its call arguments in the form that the template reads."""
        calls = message.get("tool_calls")
        content = message.get("content") or ""
        kept = {key: value for key, value in message.items() if value is not None}
        kept["content"] = None if calls and not content and self._tests_for_none else content
        if "tool_call_id" in kept:
            kept["tool_call_id"] = self._readable_id(kept["tool_call_id"])
        if calls:
            kept["tool_calls"] = [self._readable_call(call, index) for call in calls]
        else:
            kept.pop("tool_calls", None)
        return kept

    def _readable_call(self, call: Mapping[str, Any], index: int) -> Message:
        convert = _as_object if self._wants_objects else _as_text
        return {**convert(call, index), "id": self._readable_id(call.get("id"))}

    def _readable_id(self, call_id: object) -> str:
        """The id, or its last nine letters and digits: a call and its answer still match."""
        text = str(call_id or "")
        if not self._wants_short_ids:
            return text
        kept = "".join(char for char in text if char.isalnum())
        return kept[-len(_SHORT_ID) :].rjust(len(_SHORT_ID), "0")

    def _render(self, messages: list[Message], **variables: Any) -> str:
        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template. Use /v1/completions with a prompt.",
                param="messages",
            )
        named = {"documents": None, **self._names, **variables, "messages": messages}
        try:
            return render_bounded(self._template, named, WorkBudget())
        except TooMuchWork as error:
            raise _refused(f"The chat template does too much work: {error}.") from error
        except TemplateError as error:
            raise _refused(str(error)) from error
        except Exception as error:  # the boundary to foreign code, which may raise anything
            raise _refused(f"The chat template cannot render these messages: {error}.") from error

    def _shows_call(self, as_object: bool, short_id: bool) -> bool:
        """Whether a tool call in this form comes through."""
        arguments = {"kvota_probe": 1} if as_object else '{"kvota_probe": 1}'
        function = {"name": "kvota_function", "arguments": arguments}
        call_id = _SHORT_ID if short_id else _LONG_ID
        call = {"id": call_id, "type": "function", "function": function}
        content = None if self._tests_for_none else ""
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        return "kvota_probe" in self._try([_hello(), answer])

    def _allows_system(self) -> bool:
        return "kvota_probe" in self._try([{"role": "system", "content": "kvota_probe"}, _hello()])

    def _try(self, messages: list[Message]) -> str:
        try:
            return self._render(messages, tools=None, add_generation_prompt=False)
        except InvalidRequest:
            return ""


def _hello() -> Message:
    return {"role": "user", "content": "hello"}


def _refused(message: str) -> InvalidRequest:
    if len(message) > MESSAGE_CHARS_MAX:
        message = message[:MESSAGE_CHARS_MAX] + "…"
    return InvalidRequest(message, param="messages")


def _as_object(call: Mapping[str, Any], index: int) -> Message:
    """The call with its arguments parsed; templates print them with `tojson`."""
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(
            f"`messages[{index}].tool_calls`: the arguments of {call['function'].get('name')!r} "
            "must be a JSON object.",
            param=f"messages[{index}].tool_calls",
        )
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _as_text(call: Mapping[str, Any], index: int) -> Message:
    """The call with its arguments as JSON text; templates join them to other text."""
    arguments = call["function"].get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _checked_extra(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in extra.items():
        if name in _RESERVED or name.startswith("_") or not name.isidentifier():
            raise InvalidRequest(f"{name[:64]!r} cannot be set here.", param=EXTRA_PARAM)
        if not _is_json(value, EXTRA_DEPTH_MAX):
            raise InvalidRequest(
                f"{name!r} must be a JSON value, at most {EXTRA_DEPTH_MAX} levels deep.",
                param=EXTRA_PARAM,
            )
    return extra


def _is_json(value: object, depth: int) -> bool:
    if value is None or isinstance(value, str | bool | int | float):
        return True
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_json(v, depth - 1) for k, v in value.items())
    return isinstance(value, list | tuple) and all(_is_json(item, depth - 1) for item in value)
