"""The engine's view of one request: its choices as they grow, and its one ending."""

from dataclasses import dataclass, field

from kvota.core.errors import KvotaError, Outcome
from kvota.core.plan import Sampled
from kvota.core.request import Constraint, Delta, Ended, FinishReason, Request, TokenLogprobs
from kvota.engine.text import TextStream, Vocabulary


@dataclass(slots=True)
class Choice:
    """One of the n answers of a request."""

    index: int
    text: TextStream
    constraint: Constraint | None
    num_tokens: int = 0
    is_open: bool = True


@dataclass(slots=True)
class Answer:
    """Everything the engine remembers of a request until its `Ended` is published."""

    request: Request
    choices: list[Choice]
    num_open: int
    started_s: float | None = None  # first chunk in a step
    first_token_s: float | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, choice: Choice, sampled: Sampled) -> Delta:
        """Add one token to a choice and decide whether it was the last one.

        Raises ValueError when the choice's grammar cannot take the token.
        """
        request, token = self.request, sampled.token
        params = request.sampling
        choice.num_tokens += 1
        may_stop = choice.num_tokens >= params.min_tokens
        if token in params.stop_token_ids and may_stop:
            return self._close(choice, sampled, choice.text.flush(), FinishReason.STOP, token)
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

    def ended(self, outcome: Outcome, error: KvotaError | None, now: float) -> Ended:
        """The event that closes the request."""
        request = self.request
        started_s = now if self.started_s is None else self.started_s
        first_s = self.first_token_s
        return Ended(
            outcome=outcome,
            error=error,
            prompt_tokens=len(request.prompt),
            cached_tokens=self.cached_tokens,
            output_tokens=sum(choice.num_tokens for choice in self.choices),
            num_preemptions=self.num_preemptions,
            queued_s=started_s - request.arrived_s,
            first_token_s=None if first_s is None else first_s - request.arrived_s,
            total_s=now - request.arrived_s,
        )

    def _close(
        self,
        choice: Choice,
        sampled: Sampled,
        text: str,
        reason: FinishReason,
        stop: str | int | None,
    ) -> Delta:
        choice.is_open = False
        self.num_open -= 1
        return Delta(choice.index, text, (sampled.token,), _logprobs(sampled), reason, stop)


def new_answer(request: Request, vocabulary: Vocabulary) -> Answer:
    """An answer with `request.n` open, empty choices."""
    choices = [
        Choice(
            index=index,
            text=TextStream(
                vocabulary,
                stops=request.stop,
                include_stop=request.include_stop,
                hide_special=request.skip_special_tokens,
            ),
            constraint=request.new_constraint() if request.new_constraint is not None else None,
        )
        for index in range(request.n)
    ]
    return Answer(request, choices, num_open=request.n)


def _logprobs(sampled: Sampled) -> tuple[TokenLogprobs, ...]:
    return () if sampled.logprobs is None else (sampled.logprobs,)
