"""The model as the HTTP edge sees it: its names, its limits, and how text becomes token ids."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvota.core.errors import ModelNotFound
from kvota.core.request import Constraint, FinishReason
from kvota.model.tool_grammar import CallGrammar
from kvota.wire.messages import ToolUse
from kvota.wire.responses import ChatDelta

NewConstraint = Callable[[], Constraint]


class Tokenizer(Protocol):
    @property
    def pieces(self) -> Sequence[bytes]:
        """What each token adds to a text, by id; a piece may be part of a character."""

    @property
    def longest_piece_bytes(self) -> int:
        """The most bytes that one token adds to a text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with the model's BOS when the flag is set and it has one."""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all `ids` together; undecodable bytes become U+FFFD."""

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones included."""

    def describe(self) -> Mapping[str, Any]:
        """Facts for `/tokenizer_info`, among them `eos_token`."""


class ChatTemplate(Protocol):
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, BOS included if the template writes one.

        Raises InvalidRequest with the template's own message when it refuses the messages.
        """


class GrammarCompiler(Protocol):
    """Turns what a client may ask of the output's form into grammars, in bounded time.

    `param` is the field to blame in the InvalidRequest that a bad one raises. `calls` may be
    written instead.
    """

    def json_object(self, *, param: str, calls: CallGrammar | None) -> NewConstraint: ...
    def json_schema(
        self, schema: dict[str, Any], *, param: str, calls: CallGrammar | None
    ) -> NewConstraint: ...
    def regex(self, pattern: str, *, param: str, calls: CallGrammar | None) -> NewConstraint: ...
    def choice(
        self, choices: Sequence[str], *, param: str, calls: CallGrammar | None
    ) -> NewConstraint: ...
    def grammar(self, text: str, *, param: str, calls: CallGrammar | None) -> NewConstraint: ...


class DeltaSplitter(Protocol):
    """Tells tool calls from content in the text of one choice. Stateful."""

    def push(self, text: str) -> list[ChatDelta]:
        """What `text`, the next piece, adds to the answer; text that may begin a call waits."""

    def finish(self, reason: FinishReason) -> list[ChatDelta]:
        """What was still waiting."""

    @property
    def cut_call(self) -> int | None:
        """The first call of which only a part was told, and more cannot come."""


class Tooling(Protocol):
    """How this model writes tool calls."""

    def new_splitter(self, use: ToolUse, *, whole_calls: bool, beside_form: bool) -> DeltaSplitter:
        """With `whole_calls` no call is told before its arguments are whole.

        With `beside_form` an answer that does not begin with a call is in a form, and has none.
        """

    def guided(self, use: ToolUse) -> NewConstraint | None:
        """Words and calls, with arguments as `strict` tools want them; None for free text."""

    def beside(
        self, use: ToolUse, compile_form: Callable[[CallGrammar], NewConstraint]
    ) -> NewConstraint:
        """The form that `compile_form` knows, or else calls. Raises InvalidRequest."""

    def forced(self, use: ToolUse) -> NewConstraint:
        """A grammar that admits nothing but calls. Raises InvalidRequest for a bad schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under one name and any number of aliases."""

    name: str
    aliases: tuple[str, ...] = ()
    created: int  # unix seconds
    max_model_len: int  # prompt and output together, in tokens
    vocab_size: int
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    hidden_ids: frozenset[int]  # special tokens that answers do not show
    template: ChatTemplate | None = None  # None: chat is refused, completions work
    grammar: GrammarCompiler | None = None  # None: structured output is refused
    tooling: Tooling | None = None  # None: tools are refused

    def require(self, name: str) -> None:
        """Raise ModelNotFound unless the model answers to `name`."""
        if name != self.name and name not in self.aliases:
            raise ModelNotFound(
                f"The model `{name[:128]}` does not exist here. This server has `{self.name}`.",
                param="model",
            )
