"""The model's own way of writing tool calls, as the HTTP edge needs it."""

from collections.abc import Iterable
from random import Random

from kvota.model.grammar import GrammarCompiler
from kvota.model.tokenizer import Tokenizer
from kvota.model.tool_format import ToolFormat
from kvota.model.tool_grammar import PARAM, forced_grammar
from kvota.model.toolcalls import (
    CallArguments,
    CallStarted,
    ContentText,
    ToolCallEvent,
    ToolCallParser,
    call_ids,
)
from kvota.node.served import DeltaSplitter, NewConstraint
from kvota.wire.messages import ToolUse
from kvota.wire.responses import ChatDelta, FunctionPart, ToolCallPart


class ToolDialect:
    """Implements `served.Tooling` for one model."""

    def __init__(
        self, format: ToolFormat, tokenizer: Tokenizer, grammar: GrammarCompiler, chance: Random
    ) -> None:
        self._format = format
        self._grammar = grammar
        self._new_id = call_ids(chance)
        self._marker_ids = tokenizer.special_markers(format.visible_markers)

    def new_splitter(self, use: ToolUse) -> DeltaSplitter:
        return _Splitter(ToolCallParser(self._format, self._new_id), calls_only=use.required)

    def forced(self, use: ToolUse) -> NewConstraint:
        """A grammar of calls and nothing else; one call where the function is named.

        Raises InvalidRequest for a bad schema.
        """
        lark = forced_grammar(
            self._format,
            use.tools,
            use.name,
            parallel=use.parallel and use.name is None,
            marker_ids=self._marker_ids,
        )
        return self._grammar.tool_calls(lark, param=PARAM)


class _Splitter:
    """Turns the parser's events into pieces of a chat answer.

    With `calls_only` the grammar leaves nothing else to write, so text that is no call is one that
    was cut before its name was whole: not an answer, and not shown as one.
    """

    def __init__(self, parser: ToolCallParser, *, calls_only: bool) -> None:
        self._parser = parser
        self._calls_only = calls_only

    def push(self, text: str) -> list[ChatDelta]:
        return self._deltas(self._parser.push(text))

    def finish(self) -> list[ChatDelta]:
        return self._deltas(self._parser.finish())

    def _deltas(self, events: Iterable[ToolCallEvent]) -> list[ChatDelta]:
        return [
            _delta(event)
            for event in events
            if not (self._calls_only and isinstance(event, ContentText))
        ]


def _delta(event: ToolCallEvent) -> ChatDelta:
    match event:
        case ContentText(text):
            return ChatDelta(content=text)
        case CallStarted(index, id_, name):
            function = FunctionPart(name=name, arguments="")
            return ChatDelta(
                tool_calls=[ToolCallPart(index=index, id=id_, type="function", function=function)]
            )
        case CallArguments(index, fragment):
            function = FunctionPart(arguments=fragment)
            return ChatDelta(tool_calls=[ToolCallPart(index=index, function=function)])
