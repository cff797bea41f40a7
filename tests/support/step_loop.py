"""The smallest possible engine: a scheduler, an executor, and nothing in between."""

from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvota.core.plan import Chunk, ChunkResult, StepPlan, StepResult
from kvota.core.request import Request, SamplingParams
from kvota.kv.cache import KVCache
from kvota.kv.prefix import BlockHash, sha256_block
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Committed, Scheduler
from kvota.scheduler.sequence import Sequence, SequenceGroup, Status
from tests.support.kv_executor import (
    Following,
    HashingExecutor,
    InjectedFailure,
    next_token,
    reference_prompt_logprobs,
    reference_tokens,
)


def new_request(
    request_id: str, prompt: Seq[int], max_tokens: int = 8, *, seed: int = 0, **fields: Any
) -> Request:
    """A request whose expected output `reference_tokens` knows."""
    return Request(
        id=request_id,
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=seed),
        arrived_s=0.0,
        **fields,
    )


@dataclass
class StepLoop:
    """Runs steps over a small pool, checks the invariants after each, ends choices at max_tokens.

    Every group that was ever added stays in `groups`.
    """

    num_blocks: int = 64
    block_size: int = 4
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    hash_block: BlockHash = sha256_block
    following: Following = next_token

    def __post_init__(self) -> None:
        self.executor = HashingExecutor(self.num_blocks, self.block_size, self.following)
        self.cache = KVCache(self.num_blocks, self.block_size, hash_block=self.hash_block)
        self.scheduler = Scheduler(self.cache, self.limits)
        self.groups: list[SequenceGroup] = []
        self.prompts_read: list[SequenceGroup] = []
        self.plans: list[StepPlan] = []

    def add(self, request: Request) -> SequenceGroup:
        group = self.scheduler.add(request)
        self.groups.append(group)
        return group

    def step(self) -> Committed | None:
        """One step, or None when nothing could be planned."""
        plan = self.scheduler.plan(0.0)
        self.scheduler.check()
        if plan is None:
            return None
        self.plans.append(plan)
        done = self.scheduler.commit(plan, self.executor.execute(plan))
        self.settle(done)
        return done

    def step_in_parts(self, broken: str | None = None) -> bool:
        """A step that raises and is repeated chunk by chunk, as an engine does.

        A chunk of the request `broken` raises alone too, and the request is aborted. False when
        nothing could be planned.
        """
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return False
        self.executor.fail_next = True
        with suppress(InjectedFailure):
            self.executor.execute(plan)
        self.executor.execute(StepPlan((), plan.copies))
        results = [
            None if self._is_of(broken, chunk) else self._alone(chunk) for chunk in plan.chunks
        ]
        if broken is not None and None in results:
            self.scheduler.abort(broken)
        answers = [ChunkResult() if result is None else result for result in results]
        self.settle(self.scheduler.commit(plan, StepResult(answers)))
        return True

    def _is_of(self, request_id: str | None, chunk: Chunk) -> bool:
        sequence = self.scheduler.sequence(chunk.sequence_id)
        return sequence is not None and sequence.group.request.id == request_id

    def _alone(self, chunk: Chunk) -> ChunkResult:
        return self.executor.execute(StepPlan((chunk,))).chunks[0]

    def settle(self, done: Committed) -> None:
        """What an engine does with the outcome of a step."""
        self.prompts_read += done.prompts_read
        for group in done.prompts_read:
            if group.request.max_tokens == 0:
                self.scheduler.abort(group.request.id)
        for sequence, _ in done.sampled:
            is_over = sequence.num_output == sequence.group.request.max_tokens
            if is_over and sequence.status is not Status.FINISHED:
                self.scheduler.finish(sequence)
        self.scheduler.check()

    def run(self, num_steps_max: int = 10_000) -> int:
        """Steps until nothing is left to do; returns how many."""
        for num_steps in range(num_steps_max):
            if self.step() is None:
                assert not self.scheduler.has_work, "sequences are left, but nothing is planned"
                return num_steps
        raise AssertionError(f"not done after {num_steps_max} steps")

    def finish_all(self, *requests: Request) -> list[SequenceGroup]:
        """Add the requests, run to the end, and compare every token with the reference."""
        groups = [self.add(request) for request in requests]
        self.run()
        for group in groups:
            assert_is_complete(group, self.following)
        return groups


def assert_is_complete(group: SequenceGroup, following: Following = next_token) -> None:
    """All choices are there, finished, and hold exactly the tokens of the reference."""
    request = group.request
    assert [sequence.choice for sequence in group.sequences] == list(range(request.n))
    for sequence in group.sequences:
        assert sequence.status is Status.FINISHED
        assert sequence.output == reference_tokens(request, sequence.choice, following)
    if request.prompt_logprobs is not None:
        assert group.prompt_logprobs == reference_prompt_logprobs(request)


def only(group: SequenceGroup) -> Sequence:
    (sequence,) = group.sequences
    return sequence
