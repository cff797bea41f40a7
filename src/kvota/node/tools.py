"""What a request's tools ask of the prompt, of the grammar and of the answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvota.core.errors import InvalidRequest
from kvota.core.request import FinishReason
from kvota.model.tool_grammar import CallGrammar
from kvota.node.served import DeltaSplitter, NewConstraint, ServedModel, Tooling
from kvota.wire.checks import Form
from kvota.wire.messages import ToolUse
from kvota.wire.responses import ChatDelta


@dataclass(frozen=True, slots=True)
class ToolPlan:
    use: ToolUse
    tooling: Tooling
    has_form: bool  # for answers that are no calls
    whole_calls: bool  # half a call must not be told

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """What the template is told."""
        return self.use.tools

    def new_splitter(self) -> DeltaSplitter:
        """Finds the calls in the text of one choice."""
        splitter = self.tooling.new_splitter(
            self.use,
            whole_calls=self.whole_calls,
            beside_form=self.has_form and not self.must_call,
        )
        return splitter if self.use.parallel else _FirstCallOnly(splitter)

    @property
    def must_call(self) -> bool:
        return self.use.required

    def compile_forced(self) -> NewConstraint:
        """Calls and nothing else: no form binds an answer that has no words."""
        return self.tooling.forced(self.use)

    def compile_guided(self) -> NewConstraint | None:
        """Free text, but for the arguments of tools that are strict."""
        return self.tooling.guided(self.use)

    def compile_beside(self, compile_form: Callable[[CallGrammar], NewConstraint]) -> NewConstraint:
        """Calls, or an answer in the form that `compile_form` compiles beside them."""
        return self.tooling.beside(self.use, compile_form)


def plan_tools(
    use: ToolUse | None, form: Form | None, model: ServedModel, *, whole_calls: bool = False
) -> ToolPlan | None:
    """None when no tool may be called. Raises InvalidRequest for what cannot be honoured."""
    if use is None:
        return None
    if model.tooling is None:
        raise InvalidRequest(f"The model `{model.name}` cannot call tools.", param="tools")
    return ToolPlan(use, model.tooling, form is not None, whole_calls)


class _FirstCallOnly:
    """Drops every call but the first, for clients that can take only one."""

    def __init__(self, splitter: DeltaSplitter) -> None:
        self._splitter = splitter

    def push(self, text: str) -> list[ChatDelta]:
        return _without_later_calls(self._splitter.push(text))

    def finish(self, reason: FinishReason) -> list[ChatDelta]:
        return _without_later_calls(self._splitter.finish(reason))

    @property
    def cut_call(self) -> int | None:
        cut = self._splitter.cut_call
        return cut if cut == 0 else None


def _without_later_calls(deltas: list[ChatDelta]) -> list[ChatDelta]:
    return [delta for delta in deltas if not any(call.index > 0 for call in delta.tool_calls or ())]
