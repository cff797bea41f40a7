"""An executor whose tokens are written down by the test: the model as an actor with a script."""

from collections.abc import Callable, Sequence

from kvota.core.plan import Capacity, Chunk, ChunkResult, Draw, Sampled, StepPlan, StepResult
from kvota.core.request import TokenLogprobs

Script = Callable[[Draw], int]


def say(*tokens: int, then: int = 0) -> Script:
    """Every choice gets these tokens in order, and `then` for ever after."""

    def next_token(draw: Draw) -> int:
        at = len(draw.tokens) - draw.num_prompt
        return tokens[at] if at < len(tokens) else then

    return next_token


class ScriptedExecutor:
    """Plays a script. `poison` are prompt tokens whose chunk raises; `faults` steps that raise."""

    def __init__(
        self,
        script: Script,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        poison: frozenset[int] = frozenset(),
    ) -> None:
        self.capacity = Capacity(num_blocks, block_size, bytes_per_block=block_size * 16)
        self.num_steps = 0
        self.plans: list[StepPlan] = []
        self.faults: set[int] = set()
        self._script = script
        self._poison = poison

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self.plans.append(plan)
        if self.num_steps in self.faults:
            raise RuntimeError(f"step {self.num_steps} fails")
        if any(self._poison.intersection(chunk.token_ids) for chunk in plan.chunks):
            raise RuntimeError("a poisoned token")
        return StepResult([self._answer(chunk) for chunk in plan.chunks])

    def _answer(self, chunk: Chunk) -> ChunkResult:
        sampled = [self._sample(draw) for draw in chunk.draws]
        return ChunkResult(sampled, _prompt_logprobs(chunk))

    def _sample(self, draw: Draw) -> Sampled:
        token = self._script(draw)
        wanted = draw.params.logprobs
        if wanted is None:
            return Sampled(token)
        return Sampled(token, TokenLogprobs(token, -0.5, _top(token, wanted)))


def _prompt_logprobs(chunk: Chunk) -> Sequence[TokenLogprobs]:
    if chunk.prompt_logprobs is None:
        return ()
    following = [*chunk.token_ids[1:], *([] if chunk.next_token is None else [chunk.next_token])]
    return [TokenLogprobs(t, -1.0, _top(t, chunk.prompt_logprobs)) for t in following]


def _top(token: int, count: int) -> tuple[tuple[int, float], ...]:
    return tuple((token + place, -0.5 - place) for place in range(count))
