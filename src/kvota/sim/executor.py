"""An executor without a model: it knows what a step costs, and moves the clock by that.

    t(step) = base + per_prefill_token · Σ n                n tokens of a chunk, c before them
                   + per_attention     · Σ n · (c + n/2)
                   + per_decode        · decodes
                   + per_context       · Σ context of the decodes
                   + any_prefill       · [some chunk has more than one token]

(The form is that of Vidur, MLSys 2024; the coefficients come from `calibration.py`.)

What it says is decided by the request alone. The model would always rather stop: it answers every
draw with the end token as soon as `min_tokens` allows it. So a workload sets an output's length by
`min_tokens`, by what that field means anyway, and a preempted sequence ends where it would have.
"""

from dataclasses import dataclass

from kvota.core.clock import ManualClock
from kvota.core.plan import Capacity, Chunk, ChunkResult, Draw, Sampled, StepPlan, StepResult
from kvota.sim.jitter import Player
from kvota.telemetry.steps import StepTerms, terms_of

WORD = 0  # the token of every answer, until the end
END = 1
_MORE = ChunkResult()
_SAY = ChunkResult((Sampled(WORD),))
_STOP = ChunkResult((Sampled(END),))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds: what a step costs. Terms that do not matter may stay 0."""

    base: float
    per_prefill_token: float = 0.0
    per_attention: float = 0.0
    per_decode: float = 0.0
    per_context: float = 0.0
    any_prefill: float = 0.0

    def seconds(self, terms: StepTerms) -> float:
        total = self.base + self.per_decode * terms.decodes + self.per_context * terms.context
        if terms.prefill:
            total += self.any_prefill + self.per_prefill_token * terms.prefill
            total += self.per_attention * terms.attention
        return total


class StepCostExecutor:
    """Answers at once and moves `clock` by the step's cost.

    Without `jitter` every step takes what it costs.
    """

    def __init__(
        self,
        capacity: Capacity,
        cost: StepCost,
        clock: ManualClock,
        jitter: Player | None = None,
    ) -> None:
        self._cost = cost
        self._jitter = jitter
        self._capacity = capacity
        self._clock = clock
        self.busy_s = 0.0

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def next_seconds(self, terms: StepTerms) -> float:
        """How long the next step takes. To be asked once for each step that is taken."""
        seconds = self._cost.seconds(terms)
        return seconds if self._jitter is None else seconds * self._jitter.next(seconds)

    def execute(self, plan: StepPlan) -> StepResult:
        seconds = self.next_seconds(terms_of(plan))
        self._clock.advance(seconds)
        self.busy_s += seconds
        return StepResult([_answer(chunk) for chunk in plan.chunks])


def _answer(chunk: Chunk) -> ChunkResult:
    draws = chunk.draws
    if not draws:
        return _MORE
    if len(draws) == 1:
        return _STOP if _is_last(draws[0]) else _SAY
    return ChunkResult([Sampled(END if _is_last(draw) else WORD) for draw in draws])


def _is_last(draw: Draw) -> bool:
    return len(draw.tokens) - draw.num_prompt + 1 >= draw.params.min_tokens
