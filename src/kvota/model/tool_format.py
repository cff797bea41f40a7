"""How models write tool calls into their text.

HERMES       <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>    Hermes, Qwen 2.5, 3
LLAMA3_JSON  {"name": "f", "parameters": {…}}   the whole answer, or after <|python_tag|>
MISTRAL      [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]
MISTRAL_ARGS [TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]…   since 2025, some with [CALL_ID]… before [ARGS]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Syntax:
    """The marks around call objects. A separator leads to the next object of the same group."""

    opening: str
    closing: str = ""
    is_array: bool = False  # objects in […]
    may_start_bare: bool = False  # an answer that begins with an object may be a call
    separator: str = ""
    arguments_key: str = "arguments"
    arguments_mark: str = ""  # the name stands before it, and no object around name and arguments
    id_mark: str = ""  # an id may stand between name and `arguments_mark`, behind this


class ToolFormat(StrEnum):
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral_args"

    @property
    def syntax(self) -> Syntax:
        return _SYNTAX[self]

    @property
    def visible_markers(self) -> tuple[str, ...]:
        """Texts that must reach the parser.

        In many vocabularies they are special tokens, which output hides by default: then a call
        would arrive as bare JSON. Hide `Tokenizer.hidden_ids(format.visible_markers)` instead of
        all special ids. The parser removes the markers of every call.
        """
        syntax = self.syntax
        marks = (syntax.opening, syntax.closing, syntax.id_mark, syntax.arguments_mark)
        return tuple(mark for mark in marks if mark)


_SYNTAX: Mapping[ToolFormat, Syntax] = MappingProxyType(
    {
        ToolFormat.HERMES: Syntax("<tool_call>", "</tool_call>"),
        ToolFormat.LLAMA3_JSON: Syntax(
            "<|python_tag|>", may_start_bare=True, separator=";", arguments_key="parameters"
        ),
        ToolFormat.MISTRAL: Syntax("[TOOL_CALLS]", is_array=True, separator=","),
        ToolFormat.MISTRAL_ARGS: Syntax(
            "[TOOL_CALLS]", arguments_mark="[ARGS]", id_mark="[CALL_ID]"
        ),
    }
)


def tool_format(template_source: str | None) -> ToolFormat:
    """The format that a chat template's own text shows; HERMES when it shows none.

    A template without tools is given them by `tool_prompt.py`, which asks for HERMES.
    """
    source = template_source or ""
    if "<tool_call>" in source:
        return ToolFormat.HERMES
    if "[TOOL_CALLS]" in source:
        return ToolFormat.MISTRAL_ARGS if "[ARGS]" in source else ToolFormat.MISTRAL
    if "<|python_tag|>" in source or ('"parameters": ' in source and "ipython" in source):
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.HERMES
