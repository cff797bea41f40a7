"""The engine's view of one request: its choices as they grow, and its one ending."""

from dataclasses import dataclass

from kvota.core.errors import KvotaError, Outcome
from kvota.core.plan import Sampled
from kvota.core.request import (
    Constraint,
    Delta,
    Ended,
    FinishReason,
    PromptRead,
    Request,
    TokenLogprobs,
)
from kvota.engine.mailbox import RequestState
from kvota.engine.text import TextStream, Vocabulary
from kvota.scheduler.sequence import SequenceGroup


@dataclass(slots=True)
class Choice:
    """One of the n answers of a request."""

    index: int
    text: TextStream
    constraint: Constraint | None
    num_tokens: int = 0


@dataclass(slots=True)
class Answer:
    """Everything the engine remembers of a request until its `Ended` is published."""

    group: SequenceGroup
    choices: list[Choice]
    num_open: int
    first_token_s: float | None = None

    @property
    def request(self) -> Request:
        return self.group.request

    def read(self) -> PromptRead:
        """The event that says the prompt is in KV."""
        group = self.group
        assert group.first_scheduled_s is not None
        queued_s = group.first_scheduled_s - group.request.arrived_s
        return PromptRead(group.cached_tokens or 0, group.prompt_logprobs, queued_s)

    def state(self) -> RequestState:
        """How far it is. A block that several choices share counts once."""
        sequences = self.group.sequences
        tables = [one.table.blocks for one in sequences if one.table is not None]
        return RequestState(
            request_id=self.request.id,
            is_running=bool(tables),
            is_prompt_read=self.group.is_prompt_read,
            computed_tokens=sum(one.num_computed for one in sequences),
            cached_tokens=self.group.cached_tokens or 0,
            output_tokens=sum(choice.num_tokens for choice in self.choices),
            first_token_s=self.first_token_s,
            num_blocks=len(set().union(*tables)),
            num_preemptions=self.group.num_preemptions,
        )

    def take(self, choice: Choice, sampled: Sampled) -> Delta:
        """Add one token to a choice and decide whether it was the last one.

        Raises ValueError when the choice's grammar cannot take the token.
        """
        request, token = self.request, sampled.token
        params = request.sampling
        choice.num_tokens += 1
        may_stop = choice.num_tokens >= params.min_tokens
        if token in params.stop_token_ids and may_stop:
            shown = choice.text.push(token, may_stop=False)[0] if request.include_stop else ""
            shown += choice.text.flush()
            return self._close(choice, sampled, shown, FinishReason.STOP, token)
        text, stop = choice.text.push(token, may_stop=may_stop)
        if choice.constraint is not None:
            choice.constraint.accept(token)
            if stop is None and choice.constraint.is_complete():
                return self._close(
                    choice, sampled, text + choice.text.flush(), FinishReason.STOP, None
                )
        if stop is not None:
            return self._close(choice, sampled, text, FinishReason.STOP, stop)
        if choice.num_tokens >= request.max_tokens:
            return self._close(
                choice, sampled, text + choice.text.flush(), FinishReason.LENGTH, None
            )
        return Delta(choice.index, text, (token,), _logprobs(sampled))

    def close_empty(self) -> list[Delta]:
        """End every choice without a token: nothing but the prompt was asked for."""
        self.num_open = 0
        return [Delta(choice.index, "", finish=FinishReason.LENGTH) for choice in self.choices]

    def ended(self, outcome: Outcome, error: KvotaError | None, now: float) -> Ended:
        """The event that closes the request."""
        request, group, first_s = self.request, self.group, self.first_token_s
        started_s = now if group.first_scheduled_s is None else group.first_scheduled_s
        return Ended(
            outcome=outcome,
            error=error,
            prompt_tokens=len(request.prompt),
            cached_tokens=group.cached_tokens or 0,
            output_tokens=sum(choice.num_tokens for choice in self.choices),
            num_preemptions=group.num_preemptions,
            queued_s=started_s - request.arrived_s,
            first_token_s=None if first_s is None else first_s - request.arrived_s,
            total_s=now - request.arrived_s,
            kv_block_s=group.meter.block_s,
        )

    def _close(
        self,
        choice: Choice,
        sampled: Sampled,
        text: str,
        reason: FinishReason,
        stop: str | int | None,
    ) -> Delta:
        self.num_open -= 1
        return Delta(choice.index, text, (sampled.token,), _logprobs(sampled), reason, stop)


def new_answer(group: SequenceGroup, vocabulary: Vocabulary) -> Answer:
    """An answer whose n choices are open and empty."""
    request = group.request
    choices = [
        Choice(
            index=index,
            text=TextStream(
                vocabulary,
                stops=request.stop,
                include_stop=request.include_stop,
                hide_special=request.skip_special_tokens,
            ),
            constraint=constraint,
        )
        for index, constraint in enumerate(group.constraints)
    ]
    return Answer(group, choices, num_open=request.n)


def _logprobs(sampled: Sampled) -> tuple[TokenLogprobs, ...]:
    return () if sampled.logprobs is None else (sampled.logprobs,)
