"""A grammar that makes the model call a tool: llguidance's Lark dialect with embedded schemas.

    start: OPEN "{\\"name\\": \\"f\\", \\"arguments\\": " arguments_0 "}" CLOSE …
    arguments_0: %json { the tool's own schema }

Every schema stands alone in its rule, so its `$ref`s keep their root. JSON is written with the
separators of Python's `json.dumps` and no other white space: that is how models learned calls.

Where nothing marks a call (LLAMA3_JSON), one that may stand instead of a JSON document begins like
it. No two grammars can share that beginning, so there the calls are schemas beside the document's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvota.core.errors import InvalidRequest
from kvota.model.json_schema import safe_schema
from kvota.model.schema_choice import any_schema
from kvota.model.tool_format import Syntax, ToolFormat

PARAM = "tools"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}
_OPTIONS = {  # llguidance's own
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,  # a keyword that is not enforced is refused
    "coerce_one_of": False,
}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """What may be written instead of an answer in words.

    `bare` are the same calls, one at a time, as schemas: set where a call begins like any object.
    """

    lark: str
    bare: tuple[dict[str, Any], ...] = ()


def call_grammar(
    format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool = True,
    strict_only: bool = False,
    marker_ids: Mapping[str, int] | None = None,
) -> CallGrammar:
    """Calls of any of the tools. With `strict_only` the others may be given any object."""
    known = [_unbound(tool) if strict_only else tool for tool in tools]
    lark = forced_grammar(format, known, None, parallel=parallel, marker_ids=marker_ids)
    if not format.syntax.may_start_bare:
        return CallGrammar(lark)
    key = format.syntax.arguments_key
    return CallGrammar(lark, tuple(_call_schema(tool["function"], key) for tool in known))


def forced_grammar(
    format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: str | None,
    *,
    parallel: bool = True,
    marker_ids: Mapping[str, int] | None = None,
) -> str:
    """A Lark grammar of answers that are tool calls and nothing else.

    `choice` names the one function to call; None allows each. With `parallel` more calls may
    follow the first. `marker_ids` are the format's markers that are special tokens in this
    vocabulary (`Tokenizer.special_markers`): as plain text a grammar could not reach them. Raises
    InvalidRequest for a name that no tool has, or a schema that cannot be enforced.
    """
    functions = _chosen([tool["function"] for tool in tools], choice)
    syntax = format.syntax
    marks = {mark: _mark(mark, marker_ids or {}) for mark in format.visible_markers}
    calls = " | ".join(f"call_{index}" for index in range(len(functions)))
    rules = [f"start: {_answer(syntax, marks, parallel=parallel)}", f"call: {calls}"]
    for index, function in enumerate(functions):
        rules.append(f"call_{index}: {_call(function['name'], index, syntax, marks)}")
        rules.append(f"arguments_{index}: %json {_arguments_schema(function)}")
    return "\n".join(rules) + "\n"


def _chosen(functions: list[Mapping[str, Any]], choice: str | None) -> list[Mapping[str, Any]]:
    chosen = [function for function in functions if choice in (None, function["name"])]
    if not chosen:
        raise InvalidRequest(f"`tools` has no function {choice!r}.", param="tool_choice")
    return chosen


def _call(name: str, index: int, syntax: Syntax, marks: Mapping[str, str]) -> str:
    """The right-hand side of one function's call."""
    if syntax.arguments_mark:
        call_id = f"({marks[syntax.id_mark]} /[a-zA-Z0-9]{{9}}/)?"
        return f"{_json(name)} {call_id} {marks[syntax.arguments_mark]} arguments_{index}"
    head = f'{{"name": {_json(name)}, {_json(syntax.arguments_key)}: '
    return f'{_json(head)} arguments_{index} "}}"'


def _answer(syntax: Syntax, marks: Mapping[str, str], *, parallel: bool) -> str:
    """The right-hand side of `start`: one call, or several joined as the format joins them."""
    opening = marks[syntax.opening]
    if syntax.arguments_mark:
        return f"({opening} call)+" if parallel else f"{opening} call"
    if syntax.closing:
        group = f'{opening} "\\n" call "\\n" {marks[syntax.closing]}'
        return f'{group} ("\\n" {group})*' if parallel else group
    calls = f"call ({_json(syntax.separator + ' ')} call)*" if parallel else "call"
    return f'{opening} " "? "[" {calls} "]"' if syntax.is_array else calls


def _mark(text: str, marker_ids: Mapping[str, int]) -> str:
    return f"<[{marker_ids[text]}]>" if text in marker_ids else _json(text)


def _unbound(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool["function"]
    if function.get("strict"):
        return tool
    return {**tool, "function": {**function, "parameters": _ANY_ARGUMENTS}}


def _call_schema(function: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: {"$ref": "#/$defs/0"}},
        "required": ["name", key],
        "additionalProperties": False,
        "$defs": any_schema([_checked_schema(function)])["$defs"],
    }


def _arguments_schema(function: Mapping[str, Any]) -> str:
    return _json({**_checked_schema(function), "x-guidance": _OPTIONS})


def _checked_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or _NO_PARAMETERS
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"The parameters of {function['name']!r} must be a schema of type object.", param=PARAM
        )
    checked: dict[str, Any] = json.loads(safe_schema({"type": "object", **schema}, param=PARAM))
    return checked


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
