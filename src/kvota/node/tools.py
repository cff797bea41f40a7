"""What a request's tools ask of the prompt, of the grammar and of the answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvota.core.errors import InvalidRequest
from kvota.node.served import DeltaSplitter, NewConstraint, ServedModel, Tooling
from kvota.wire.checks import Form
from kvota.wire.messages import ToolUse
from kvota.wire.responses import ChatDelta


@dataclass(frozen=True, slots=True)
class ToolPlan:
    tools: tuple[Mapping[str, Any], ...]  # what the template is told
    new_splitter: Callable[[], DeltaSplitter]  # finds the calls in the text of one choice
    compile_forced: Callable[[], NewConstraint] | None  # set when the model has to call


def plan_tools(use: ToolUse | None, form: Form | None, model: ServedModel) -> ToolPlan | None:
    """None when the answer is plain text. Raises InvalidRequest for what cannot be honoured."""
    if use is None:
        return None
    if form is not None:
        raise InvalidRequest(
            f"`{form.param}` together with `tools` is not supported: the form would forbid every "
            'call. Set `tool_choice` to "none" to get the form.',
            param="tool_choice",
        )
    tooling = model.tooling
    if tooling is None:
        raise InvalidRequest(f"The model `{model.name}` cannot call tools.", param="tools")
    return ToolPlan(
        tools=use.tools,
        new_splitter=lambda: _splitter(tooling, use),
        compile_forced=(lambda: tooling.forced(use)) if use.required else None,
    )


def _splitter(tooling: Tooling, use: ToolUse) -> DeltaSplitter:
    splitter = tooling.new_splitter(use)
    return splitter if use.parallel else _FirstCallOnly(splitter)


class _FirstCallOnly:
    """Drops every call but the first, for clients that can take only one."""

    def __init__(self, splitter: DeltaSplitter) -> None:
        self._splitter = splitter

    def push(self, text: str) -> list[ChatDelta]:
        return _without_later_calls(self._splitter.push(text))

    def finish(self) -> list[ChatDelta]:
        return _without_later_calls(self._splitter.finish())


def _without_later_calls(deltas: list[ChatDelta]) -> list[ChatDelta]:
    return [delta for delta in deltas if not any(call.index > 0 for call in delta.tool_calls or ())]
