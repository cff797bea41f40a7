"""From engine events to wire chunks, for both dialects.

A finished body is the fold of the very chunks that a stream would have sent, so the two cannot
disagree. `chunks()` makes them, `completed()` folds them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from msgspec import UNSET, Struct, UnsetType

from kvota.core.request import Delta, PromptRead
from kvota.wire.responses import ChatChunk, Completion, PromptTokensDetails, StopReason, Usage

T = TypeVar("T")
Chunk = ChatChunk | Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What every chunk of one answer repeats."""

    id: str
    created: int  # unix seconds
    model: str


class Answer(Protocol):
    """One HTTP answer in the making."""

    def opening(self) -> Sequence[Chunk]:
        """What a stream says before the first token."""

    def chunks(self, index: int, event: PromptRead | Delta) -> Sequence[Chunk]:
        """What an event of prompt number `index` adds to the answer; may be nothing."""

    def usage_chunk(self, usage: Usage) -> Chunk:
        """The last chunk of a stream that asked for usage; it has no choices."""

    def completed(self, chunks: Sequence[Chunk], usage: Usage) -> Struct:
        """The whole answer, from all chunks except the opening ones."""


def usage_of(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=output_tokens,
        total_tokens=prompt_tokens + output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens),
    )


def stop_reason(delta: Delta, stop_ids: Collection[int]) -> StopReason:
    """The stop string, or which of the client's `stop_ids`, ended a choice; else UNSET.

    The model's own end of text is no client's stop.
    """
    matched = delta.matched_stop
    is_clients = isinstance(matched, str) or matched in stop_ids
    return matched if matched is not None and is_clients else UNSET


def joined(lists: Sequence[list[T] | UnsetType]) -> list[T] | UnsetType:
    """All lists in one; UNSET when none of them was set."""
    present = [part for part in lists if not isinstance(part, UnsetType)]
    return [item for part in present for item in part] if present else UNSET


def coalesced(events: Sequence[PromptRead | Delta]) -> list[PromptRead | Delta]:
    """The same events with all deltas of a choice in one, where its first one stood.

    A reader that keeps up gets one delta per step anyway; one that lags gets fewer, longer chunks.
    """
    if len(events) < 2:
        return list(events)
    place: dict[int, int] = {}
    result: list[PromptRead | Delta] = []
    for event in events:
        if not isinstance(event, Delta):
            result.append(event)
            continue
        earlier = place.setdefault(event.choice, len(result))
        if earlier == len(result):
            result.append(event)
        else:
            before = result[earlier]
            assert isinstance(before, Delta)
            result[earlier] = _added(before, event)
    return result


def _added(first: Delta, second: Delta) -> Delta:
    return Delta(
        choice=first.choice,
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=[*first.logprobs, *second.logprobs],
        finish=second.finish,
        matched_stop=second.matched_stop,
    )
