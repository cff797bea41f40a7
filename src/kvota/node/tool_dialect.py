"""The model's own way of writing tool calls, as the HTTP edge needs it."""

from collections.abc import Callable, Iterable
from random import Random

from kvota.core.errors import InvalidRequest
from kvota.core.request import FinishReason
from kvota.model.grammar import GrammarCompiler
from kvota.model.tokenizer import Tokenizer
from kvota.model.tool_format import ToolFormat
from kvota.model.tool_grammar import (
    PARAM,
    CallGrammar,
    blamed,
    call_grammar,
    forced_grammar,
    guided_grammar,
)
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

    def new_splitter(self, use: ToolUse, *, whole_calls: bool, beside_form: bool) -> DeltaSplitter:
        parser = ToolCallParser(
            self._format,
            self._new_id,
            whole_calls=whole_calls,
            only=frozenset(use.names) if beside_form else None,
        )
        return _Splitter(parser, calls_only=use.required)

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
        return self._compiled(lark, use)

    def guided(self, use: ToolUse) -> NewConstraint | None:
        """Words and calls, those of `strict` tools with arguments that follow their schemas.

        None where nothing is strict, or where the format has no mark by which to know a call.
        Raises InvalidRequest for a bad schema.
        """
        if not use.is_strict:
            return None
        lark = guided_grammar(
            self._format, use.tools, parallel=use.parallel, marker_ids=self._marker_ids
        )
        return None if lark is None else self._compiled(lark, use)

    def _compiled(self, lark: str, use: ToolUse) -> NewConstraint:
        try:
            return self._grammar.tool_calls(lark, param=PARAM)
        except InvalidRequest as error:
            raise blamed(error, lark, use.tools) from error

    def beside(
        self, use: ToolUse, compile_form: Callable[[CallGrammar], NewConstraint]
    ) -> NewConstraint:
        """Arguments follow their schemas, unless one cannot be enforced: then only `strict` ones.

        Nobody promised that arguments of other tools would: without a form they are free.
        """
        try:
            return compile_form(self._calls(use, strict_only=False))
        except InvalidRequest as error:
            if error.param != PARAM:
                raise
        calls = self._calls(use, strict_only=True)
        try:
            return compile_form(calls)
        except InvalidRequest as error:
            raise blamed(error, calls.lark, use.tools) from error

    def _calls(self, use: ToolUse, *, strict_only: bool) -> CallGrammar:
        return call_grammar(
            self._format,
            use.tools,
            parallel=use.parallel,
            strict_only=strict_only,
            marker_ids=self._marker_ids,
        )


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

    def finish(self, reason: FinishReason) -> list[ChatDelta]:
        """At a limit a client is told of the call that was cut there, as OpenAI's are."""
        return self._deltas(self._parser.finish(at_limit=reason is FinishReason.LENGTH))

    @property
    def cut_call(self) -> int | None:
        return self._parser.cut_call

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
