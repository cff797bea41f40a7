"""The answer of /v1/completions. Choice number = prompt · n + choice of that prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from msgspec import UNSET, UnsetType

from kvota.core.request import Delta, PromptRead
from kvota.node.answer import Chunk, Heading, joined, stop_reason
from kvota.node.logprobs import CompletionLogprobWriter, TokenNames, encoded_prompt_logprobs
from kvota.wire.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    EncodedPromptLogprobs,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionWish:
    """How the client wants its choices written."""

    n: int
    echo: bool
    logprobs: bool
    prompt_logprobs: bool
    token_ids: bool
    stop_ids: frozenset[int] = frozenset()  # those the client named


class CompletionAnswer:
    """`prompts` are the token ids of each prompt; `echoes`, needed with echo, their texts."""

    def __init__(
        self, heading: Heading, wish: CompletionWish, names: TokenNames,
        prompts: Sequence[Sequence[int]], echoes: Sequence[str],
    ) -> None:  # fmt: skip
        self._heading = heading
        self._wish = wish
        self._names = names
        self._prompts = prompts
        self._echoes = echoes
        self._writers = [CompletionLogprobWriter(names) for _ in range(len(prompts) * wish.n)]

    def opening(self) -> Sequence[Chunk]:
        return ()

    def chunks(self, index: int, event: PromptRead | Delta) -> Sequence[Completion]:
        if isinstance(event, PromptRead):
            choices = self._after_prompt(index, event)
        else:
            choices = self._after_delta(index, event)
        return [self._chunk([choice]) for choice in choices]

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._chunk([], usage)

    def completed(self, chunks: Sequence[Chunk], usage: Usage) -> Completion:
        parts: dict[int, list[CompletionChoice]] = {
            index: [] for index in range(len(self._prompts) * self._wish.n)
        }
        for chunk in cast("Sequence[Completion]", chunks):
            for choice in chunk.choices:
                parts[choice.index].append(choice)
        return self._chunk([_folded(index, part) for index, part in parts.items()], usage)

    def _after_prompt(self, index: int, event: PromptRead) -> list[CompletionChoice]:
        """What is known of a prompt: its echo and its token ids, for each of its choices.

        The choices share it, for it is large and the same.
        """
        wish = self._wish
        if not (wish.echo or wish.token_ids or wish.prompt_logprobs):
            return []
        echoed = self._echo_logprobs(index, event) if wish.echo and wish.logprobs else None
        scored = self._prompt_logprobs(event)
        return [
            CompletionChoice(
                index=choice,
                text=self._echoes[index] if wish.echo else "",
                logprobs=echoed,
                prompt_token_ids=list(self._prompts[index]) if wish.token_ids else UNSET,
                prompt_logprobs=scored,
            )
            for choice in range(index * wish.n, (index + 1) * wish.n)
        ]

    def _echo_logprobs(self, index: int, event: PromptRead) -> CompletionLogprobs:
        first, *others = self._writers[index * self._wish.n : (index + 1) * self._wish.n]
        echoed = first.prompt(self._prompts[index], event.prompt_logprobs, self._echoes[index])
        for writer in others:
            writer.follow(first)
        return echoed

    def _prompt_logprobs(self, event: PromptRead) -> EncodedPromptLogprobs | UnsetType:
        if not self._wish.prompt_logprobs:
            return UNSET
        return encoded_prompt_logprobs(event.prompt_logprobs, self._names)

    def _after_delta(self, index: int, delta: Delta) -> list[CompletionChoice]:
        """The text and, apart from it, the end: OpenAI's last chunk has no text."""
        wish, number = self._wish, index * self._wish.n + delta.choice
        choices = []
        if delta.text or (delta.token_ids and (wish.logprobs or wish.token_ids)):
            choices.append(
                CompletionChoice(
                    index=number,
                    text=delta.text,
                    logprobs=self._writers[number].output(delta.logprobs)
                    if wish.logprobs
                    else None,
                    token_ids=list(delta.token_ids) if wish.token_ids else UNSET,
                )
            )
        if delta.finish is not None:
            choices.append(
                CompletionChoice(
                    index=number,
                    text="",
                    finish_reason=delta.finish.value,
                    stop_reason=stop_reason(delta, wish.stop_ids),
                )
            )
        return choices

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        head = self._heading
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=UNSET if usage is None else usage,
        )


def _folded(index: int, parts: Sequence[CompletionChoice]) -> CompletionChoice:
    finish = [part for part in parts if part.finish_reason is not None]
    assert len(finish) == 1, f"choice {index} ended {len(finish)} times"
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return CompletionChoice(
        index=index,
        text="".join(part.text for part in parts),
        logprobs=_joined_logprobs(logprobs) if logprobs else None,
        finish_reason=finish[0].finish_reason,
        stop_reason=finish[0].stop_reason,
        token_ids=joined([part.token_ids for part in parts]),
        prompt_token_ids=joined([part.prompt_token_ids for part in parts]),
        prompt_logprobs=_scored(parts),
    )


def _scored(parts: Sequence[CompletionChoice]) -> EncodedPromptLogprobs | UnsetType:
    """Of the one part that has them, if any."""
    scores = [part.prompt_logprobs for part in parts]
    return next((one for one in scores if not isinstance(one, UnsetType)), UNSET)


def _joined_logprobs(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        [token for part in parts for token in part.tokens],
        [value for part in parts for value in part.token_logprobs],
        [top for part in parts for top in part.top_logprobs],
        [offset for part in parts for offset in part.text_offset],
    )
