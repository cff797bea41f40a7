"""The answer of /v1/chat/completions, tool calls included."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from msgspec import UNSET, UnsetType

from kvota.core.request import Delta, FinishReason, PromptRead
from kvota.node.answer import Chunk, Heading, joined, stop_reason
from kvota.node.logprobs import TokenNames, chat_logprobs, encoded_prompt_logprobs
from kvota.node.served import DeltaSplitter
from kvota.wire.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    EncodedPromptLogprobs,
    FinishedToolCall,
    FunctionText,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWish:
    """How the client wants its choices written."""

    n: int
    logprobs: bool
    prompt_logprobs: bool
    token_ids: bool
    stop_ids: frozenset[int] = frozenset()  # those the client named
    new_splitter: Callable[[], DeltaSplitter] | None = None  # set when tools may be called


class ChatAnswer:
    """One prompt, `n` choices."""

    def __init__(
        self, heading: Heading, wish: ChatWish, names: TokenNames, prompt: Sequence[int]
    ) -> None:
        self._heading = heading
        self._wish = wish
        self._names = names
        self._prompt = prompt
        make = wish.new_splitter
        self._choices = [_Choice(make() if make else None) for _ in range(wish.n)]
        self._prompt_logprobs: EncodedPromptLogprobs | UnsetType = UNSET

    def opening(self) -> Sequence[Chunk]:
        """The role of each choice, before anything else of it."""
        chunks: list[ChatChunk] = []
        for index in range(self._wish.n):
            role = ChatDelta(role="assistant", content="")
            chunks.append(self._chunk([ChatChunkChoice(index=index, delta=role)]))
        if self._wish.token_ids and chunks:
            chunks[0].prompt_token_ids = list(self._prompt)
        return chunks

    def chunks(self, index: int, event: PromptRead | Delta) -> Sequence[ChatChunk]:
        if isinstance(event, Delta):
            return [self._chunk([choice]) for choice in self._after_delta(event)]
        if self._wish.prompt_logprobs:
            self._prompt_logprobs = encoded_prompt_logprobs(event.prompt_logprobs, self._names)
        return []

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def completed(self, chunks: Sequence[Chunk], usage: Usage) -> ChatCompletion:
        parts: list[list[ChatChunkChoice]] = [[] for _ in self._choices]
        for chunk in cast("Sequence[ChatChunk]", chunks):
            for choice in chunk.choices:
                parts[choice.index].append(choice)
        head = self._heading
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[_folded(index, part) for index, part in enumerate(parts)],
            usage=usage,
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=list(self._prompt) if self._wish.token_ids else UNSET,
        )

    def _after_delta(self, delta: Delta) -> list[ChatChunkChoice]:
        """The parts of a delta and, apart from them, the end: OpenAI's last chunk is empty."""
        wish, choice = self._wish, self._choices[delta.choice]
        parts = choice.split(delta)
        has_extras = bool(delta.token_ids) and (wish.logprobs or wish.token_ids)
        if has_extras and not parts:
            parts = [ChatDelta(content="")]
        chunks = [ChatChunkChoice(index=delta.choice, delta=part) for part in parts]
        if has_extras:
            if wish.logprobs:
                chunks[0].logprobs = chat_logprobs(delta.logprobs, self._names)
            if wish.token_ids:
                chunks[0].token_ids = list(delta.token_ids)
        if delta.finish is not None:
            reason = choice.finish_reason(delta.finish)
            chunks.append(
                ChatChunkChoice(
                    index=delta.choice,
                    delta=ChatDelta(),
                    finish_reason=reason,
                    stop_reason=stop_reason(delta, wish.stop_ids),
                )
            )
        return chunks

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        head = self._heading
        return ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=UNSET if usage is None else usage,
        )


class _Choice:
    """What has to be remembered of a choice between its deltas."""

    def __init__(self, splitter: DeltaSplitter | None) -> None:
        self._splitter = splitter
        self._has_calls = False

    def split(self, delta: Delta) -> list[ChatDelta]:
        text = delta.text
        if self._splitter is None:
            return [ChatDelta(content=text)] if text else []
        parts = self._splitter.push(text) if text else []
        if delta.finish is not None:
            parts = [*parts, *self._splitter.finish(delta.finish)]
        self._has_calls = self._has_calls or any(part.tool_calls for part in parts)
        return parts

    def finish_reason(self, finish: FinishReason) -> str:
        """OpenAI's, where "tool_calls" means: run them. So it is not said of half a call."""
        is_cut = self._splitter is not None and self._splitter.cut_call is not None
        if self._has_calls and not is_cut and finish is FinishReason.STOP:
            return "tool_calls"
        return finish.value


def _folded(index: int, parts: Sequence[ChatChunkChoice]) -> ChatChoice:
    finish = [part for part in parts if part.finish_reason is not None]
    assert len(finish) == 1, f"choice {index} ended {len(finish)} times"
    calls = _folded_calls(parts)
    content = "".join(part.delta.content for part in parts if part.delta.content)
    logprobs = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    has_logprobs = any(part.logprobs is not None for part in parts)
    return ChatChoice(
        index=index,
        message=ChatMessage(content=None if calls and not content else content, tool_calls=calls),
        logprobs=ChatLogprobs(logprobs) if has_logprobs else None,
        finish_reason=str(finish[0].finish_reason),
        stop_reason=finish[0].stop_reason,
        token_ids=joined([part.token_ids for part in parts]),
    )


def _folded_calls(parts: Sequence[ChatChunkChoice]) -> list[FinishedToolCall] | UnsetType:
    calls: dict[int, FinishedToolCall] = {}
    for part in parts:
        for piece in part.delta.tool_calls or ():
            if piece.index not in calls:
                assert not isinstance(piece.id, UnsetType), "a call begins with its id and name"
                assert not isinstance(piece.function.name, UnsetType)
                function = FunctionText(piece.function.name, "")
                calls[piece.index] = FinishedToolCall(id=piece.id, function=function)
            if not isinstance(piece.function.arguments, UnsetType):
                calls[piece.index].function.arguments += piece.function.arguments
    return [calls[index] for index in sorted(calls)] if calls else UNSET
