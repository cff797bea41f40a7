"""How fast a replica is with so many requests in flight, and how many keep the targets.

A replica that has so many requests in flight decodes one token of each in every step, and reads
prompts beside that, on average prompt/output tokens for every token it decodes:

    TPOT = t(step with n decodes and n · prompt/output prompt tokens)
    TTFT = half a step that is under way + the steps that read the prompt, chunk by chunk, each
           with all decodes of the others; waiting in line is not in it
    requests/s = n / (output · TPOT)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from kvota.tools.plan.roofline import Bound, Roofline, Step, StepTime
from kvota.tools.plan.workload import Workload

CONCURRENCY_MAX: Final = 1024  # sequences of a step; and no more than half of its tokens


class Target(StrEnum):
    """What the operator promises."""

    TTFT = "TTFT"
    TPOT = "TPOT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One replica with `concurrency` requests in flight. Without time in line."""

    concurrency: int
    ttft_s: float
    tpot_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prefill_bound: Bound
    decode_bound: Bound

    def misses(self, workload: Workload) -> tuple[Target, ...]:
        """Which targets do not hold."""
        is_missed = {
            Target.TTFT: self.ttft_s > workload.ttft_s,
            Target.TPOT: self.tpot_s > workload.tpot_s,
        }
        return tuple(target for target, missed in is_missed.items() if missed)


@dataclass(frozen=True, slots=True)
class Pacing:
    """How fast a replica is with so many requests in flight."""

    roofline: Roofline
    workload: Workload
    chunk: int

    def most(self, fitting: int) -> tuple[int, str]:
        """The largest concurrency that keeps the targets, and what keeps it from being more.

        A target that one request alone misses already cannot hold anybody back; where that is so
        for both, nothing but one at a time is sensible.
        """
        hopeless = set(self.at(1).misses(self.workload))
        if len(hopeless) == len(Target):
            return 1, "both targets: one request alone misses them"
        high = max(1, min(fitting, CONCURRENCY_MAX, self.chunk // 2))

        def missed(concurrency: int) -> set[Target]:
            return set(self.at(concurrency).misses(self.workload)) - hopeless

        best = largest(lambda concurrency: not missed(concurrency), 1, high)
        if best == high:
            return best, "KV memory" if best == fitting else "the size of a step"
        return best, f"the target for {' and '.join(sorted(missed(best + 1)))}"

    def step(self, concurrency: int) -> StepTime:
        """What a step takes in which so many requests decode, and what it waits for."""
        work = self.workload
        mixed = Step(
            prompt_tokens=concurrency * work.prompt_tokens / work.output_tokens,
            prompt_context=work.prompt_tokens / 2,
            num_decoding=concurrency,
            decode_context=work.mean_context,
            num_prompts_ended=concurrency / work.output_tokens,
        )
        if concurrency == 1:  # alone, nothing is read beside its decodes
            mixed = replace(mixed, prompt_tokens=0.0, num_prompts_ended=0.0)
        return self.roofline.time(mixed)

    def at(self, concurrency: int) -> Pace:
        """The pace of a replica that has so many requests in flight."""
        work, decode = self.workload, self.step(concurrency)
        ttft_s, prefill_bound = self._first_token(concurrency - 1)
        busy_s = work.output_tokens * decode.total_s
        whole_s = busy_s + ttft_s if concurrency == 1 else busy_s
        return Pace(
            concurrency=concurrency,
            ttft_s=ttft_s + (decode.total_s / 2 if concurrency > 1 else 0.0),
            tpot_s=decode.total_s,
            requests_per_s=concurrency / whole_s,
            output_tokens_per_s=concurrency * work.output_tokens / whole_s,
            prefill_bound=prefill_bound,
            decode_bound=decode.bound,
        )

    def _first_token(self, num_others: int) -> tuple[float, Bound]:
        """Seconds to read one prompt beside the decodes of others, and what they wait for."""
        prompt = self.workload.prompt_tokens
        room = max(1, self.chunk - num_others)
        num_steps = -(-prompt // room)
        step = Step(
            prompt_tokens=prompt / num_steps,
            prompt_context=prompt / 2,
            num_decoding=num_others,
            decode_context=self.workload.mean_context,
            num_prompts_ended=1 / num_steps,
        )
        time = self.roofline.time(step)
        return num_steps * time.total_s, time.bound


def largest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number in [low, high] that holds, when `low` does and none does beyond it."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
