"""Random schedules over tiny pools, checked after every step and compared with a reference.

Whatever happens in between (preemption, sharing, forks, failed steps, colliding hashes), a request
that ends by itself must have exactly the tokens that follow from its prompt and parameters.
"""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvota.core.request import Band
from kvota.kv.prefix import BlockHash, sha256_block
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.sequence import Sequence, SequenceGroup, Status
from tests.support.kv_executor import Following, next_token, repeating_token
from tests.support.step_loop import StepLoop, assert_is_complete, new_request

NUM_SCHEDULES = 1_000
NUM_DRAIN_STEPS_MAX = 5_000
PATIENCE_STEPS = 400  # in which the first in rank must have got at least one token further


def constant_hash(parent: bytes, tokens: list[int]) -> bytes:
    return b"same"


def hash_of_4_bits(parent: bytes, tokens: list[int]) -> bytes:
    return bytes([sha256_block(parent, tokens)[0] % 16])


hashes: st.SearchStrategy[BlockHash] = st.sampled_from(
    [sha256_block, hash_of_4_bits, constant_hash]
)
limits = st.builds(
    SchedulerLimits,
    max_num_batched_tokens=st.integers(1, 24),
    max_running_requests=st.integers(1, 8),
    long_prefill_threshold=st.integers(1, 16),
    long_prefill_share=st.sampled_from([0.1, 0.5, 1.0]),
    max_prompt_logprob_tokens=st.integers(1, 6),
    min_run_tokens=st.integers(0, 5),
    max_consecutive_preemptions=st.integers(1, 3),
    watermark=st.sampled_from([0.0, 0.1, 0.4]),
    speculative_tokens=st.sampled_from([0, 1, 5]),
)
requests = st.fixed_dictionaries(
    {
        "shared": st.integers(0, 20),  # leading tokens of the text that many prompts begin with
        "own": st.lists(st.integers(0, 2), min_size=1, max_size=5),
        "max_tokens": st.integers(0, 12),
        "n": st.integers(1, 4),
        "seed": st.integers(0, 2),
        "cache_salt": st.sampled_from(["", "", "blue"]),
        "use_prefix_cache": st.sampled_from([True, True, False]),
        "band": st.sampled_from(Band),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
    }
)
SHARED_TEXT = [position % 3 for position in range(20)]


@settings(
    max_examples=NUM_SCHEDULES,
    stateful_step_count=25,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
class RandomSchedules(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 20),
        block_size=st.integers(1, 4),
        limits=limits,
        hash_block=hashes,
        following=st.sampled_from([next_token, repeating_token]),
        backlog=st.lists(requests, min_size=1, max_size=8),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        limits: SchedulerLimits,
        hash_block: BlockHash,
        following: Following,
        backlog: list[dict[str, Any]],
    ) -> None:
        self.loop = StepLoop(num_blocks, block_size, limits, hash_block, following)
        self.limits = limits
        self.cut_short: set[str] = set()  # requests that did not end by themselves
        self.num_added = 0
        for wanted in backlog:
            self.add_one(wanted)

    @rule(wanted=requests)
    def add(self, wanted: dict[str, Any]) -> None:
        self.add_one(wanted)

    def add_one(self, wanted: dict[str, Any]) -> None:
        fields = dict(wanted)
        prompt = SHARED_TEXT[: fields.pop("shared")] + fields.pop("own")
        num_slots = self.loop.num_blocks * self.loop.block_size
        prompt = prompt[-num_slots:]
        fields["max_tokens"] = min(fields["max_tokens"], num_slots - len(prompt) + 1)
        fields["n"] = min(fields["n"], self.limits.max_running_requests)
        self.num_added += 1
        self.loop.add(new_request(str(self.num_added), prompt, **fields))

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.loop.step()

    @rule()
    def step_that_is_repeated_in_parts(self) -> None:
        self.loop.step_in_parts()

    @precondition(lambda self: self.live_groups())
    @rule(index=st.integers(0, 99))
    def step_of_which_one_request_cannot_be_computed(self, index: int) -> None:
        groups = self.live_groups()
        group = groups[index % len(groups)]
        self.loop.step_in_parts(broken=group.request.id)
        if group.is_finished:
            self.cut_short.add(group.request.id)

    @precondition(lambda self: self.live_groups())
    @rule(index=st.integers(0, 99))
    def abort(self, index: int) -> None:
        self.cut(index)
        self.loop.scheduler.check()

    @precondition(lambda self: self.live_groups())
    @rule(index=st.integers(0, 99))
    def abort_while_the_step_runs(self, index: int) -> None:
        plan = self.loop.scheduler.plan(0.0)
        if plan is None:
            return
        result = self.loop.executor.execute(plan)
        self.cut(index)
        self.loop.settle(self.loop.scheduler.commit(plan, result))

    @precondition(lambda self: self.live_groups())
    @rule(index=st.integers(0, 99))
    def finish_one_choice(self, index: int) -> None:
        groups = self.live_groups()
        group = groups[index % len(groups)]
        live = [one for one in group.sequences if one.status is not Status.FINISHED]
        self.cut_short.add(group.request.id)
        self.loop.scheduler.finish(live[index % len(live)])
        self.loop.scheduler.check()

    @precondition(lambda self: self.live_groups())
    @rule(index=st.integers(0, 99))
    def pause(self, index: int) -> None:
        groups = self.live_groups()
        self.loop.scheduler.pause(groups[index % len(groups)].request.id)
        self.loop.scheduler.check()

    @precondition(lambda self: self.live_groups())
    @rule(index=st.integers(0, 99))
    def resume(self, index: int) -> None:
        groups = self.live_groups()
        self.loop.scheduler.resume(groups[index % len(groups)].request.id)
        self.loop.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.drain()
        for group in self.loop.groups:
            if group.request.id not in self.cut_short:
                assert_is_complete(group, self.loop.following)
                assert self.loop.prompts_read.count(group) == 1
        assert self.loop.scheduler.snapshot().cache.used == 0
        assert not self.loop.scheduler.has_work

    def drain(self) -> None:
        """Run to the end; the first in rank may never wait for long."""
        for group in self.live_groups():
            self.loop.scheduler.resume(group.request.id)
        first: Sequence | None = None
        reached = since = 0
        for number in range(NUM_DRAIN_STEPS_MAX):
            if self.loop.step() is None:
                return
            now_first = next(self.loop.scheduler.running(), None)
            if now_first is None:
                continue
            if now_first is not first or len(now_first.tokens) > reached:
                first, reached, since = now_first, len(now_first.tokens), number
            assert number - since < PATIENCE_STEPS, f"sequence {first} is stuck"
        raise AssertionError(f"not done after {NUM_DRAIN_STEPS_MAX} steps")

    def live_groups(self) -> list[SequenceGroup]:
        return [group for group in self.loop.groups if not group.is_finished]

    def cut(self, index: int) -> None:
        groups = self.live_groups()
        request_id = groups[index % len(groups)].request.id
        self.cut_short.add(request_id)
        self.loop.scheduler.abort(request_id)
        assert self.loop.scheduler.abort(request_id) is None


TestRandomSchedules = RandomSchedules.TestCase
