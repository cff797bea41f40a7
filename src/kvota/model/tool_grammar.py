"""A grammar that makes the model call a tool: llguidance's Lark dialect with embedded schemas.

    start: OPEN "{\\"name\\": \\"f\\", \\"arguments\\": " arguments_0 "}" CLOSE …
    arguments_0: %json { the tool's own schema }

Every schema stands alone in its rule, so its `$ref`s keep their root. JSON is written with the
separators of Python's `json.dumps` and no other white space: that is how models learned calls.

Words with calls among them (`guided_grammar`) run up to the mark that opens a call, from which on
only a call may follow:

    start: (words group)* TEXT
    words[lazy]: TEXT OPEN

Where nothing marks a call (LLAMA3_JSON), one that may stand instead of a JSON document begins like
it. No two grammars can share that beginning, so there the calls are schemas beside the document's.
"""

import json
import re
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
# How llguidance says where, and what stands there.
_AT_LINE = re.compile(r"at (\d+)\(\d+\): (failed to compile JSON schema: )?")
_ARGUMENTS_RULE = re.compile(r"arguments_(\d+): ")


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
    marks = _marks(format, marker_ids)
    start = f"start: {_answer(format.syntax, marks, parallel=parallel)}"
    return _lines([start, *_call_rules(functions, format.syntax, marks)])


def guided_grammar(
    format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool = True,
    marker_ids: Mapping[str, int] | None = None,
) -> str | None:
    """A Lark grammar of words and calls in which arguments of `strict` tools follow their schema.

    None where nothing marks a call. Raises InvalidRequest for a schema that cannot be enforced.
    """
    syntax, marks = format.syntax, _marks(format, marker_ids)
    if syntax.may_start_bare:
        return None
    opening, is_token = marks[syntax.opening], syntax.opening in (marker_ids or {})
    called = f"words {_group(syntax, marks, parallel=parallel)}"
    rules = [
        f"start: ({called})* TEXT" if parallel else f"start: TEXT | {called}",
        f"words: TEXT {opening}" if is_token else f"words[lazy]: TEXT {opening}",
        r"TEXT: /(.|\n)*/",
    ]
    functions = [_unbound(tool)["function"] for tool in tools]
    return _lines([*rules, *_call_rules(functions, syntax, marks)])


def blamed(error: InvalidRequest, lark: str, tools: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The error; with the name of the tool whose schema is at fault, where a line says it."""
    found = _AT_LINE.search(error.message) if error.param == PARAM else None
    rule = _ARGUMENTS_RULE.match(lark.split("\n")[int(found[1]) - 1]) if found else None
    if found is None or rule is None:
        return error
    name, reason = tools[int(rule[1])]["function"]["name"], error.message[found.end() :]
    return InvalidRequest(f"The parameters of {name!r} cannot be enforced: {reason}", param=PARAM)


def _marks(format: ToolFormat, marker_ids: Mapping[str, int] | None) -> dict[str, str]:
    return {mark: _mark(mark, marker_ids or {}) for mark in format.visible_markers}


def _lines(rules: Sequence[str]) -> str:
    return "\n".join(rules) + "\n"


def _call_rules(
    functions: Sequence[Mapping[str, Any]], syntax: Syntax, marks: Mapping[str, str]
) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        rules.append(f"call_{index}: {_call(function['name'], index, syntax, marks)}")
        rules.append(f"arguments_{index}: %json {_arguments_schema(function)}")
    return rules


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
    group = _group(syntax, marks, parallel=parallel)
    marked = group if syntax.may_start_bare else f"{marks[syntax.opening]} {group}"
    if not parallel or syntax.separator:
        return marked
    return f"({marked})+" if syntax.arguments_mark else f'{marked} ("\\n" {marked})*'


def _group(syntax: Syntax, marks: Mapping[str, str], *, parallel: bool) -> str:
    """What follows the opening mark: one call, or several where a separator may join them."""
    if syntax.arguments_mark:
        return "call"
    if syntax.closing:
        return f'"\\n" call "\\n" {marks[syntax.closing]}'
    calls = f"call ({_json(syntax.separator + ' ')} call)*" if parallel else "call"
    return f'" "? "[" {calls} "]"' if syntax.is_array else calls


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
    try:
        text = safe_schema({"type": "object", **schema}, param=PARAM)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"The parameters of {function['name']!r}: {error.message}", param=PARAM
        ) from error
    checked: dict[str, Any] = json.loads(text)
    return checked


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
