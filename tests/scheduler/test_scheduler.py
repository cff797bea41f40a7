"""The scheduler's promises, one by one, over pools small enough to count on one's fingers."""

import gc
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from kvota.core.request import Band
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.long_share import OWED_MAX
from kvota.scheduler.sequence import SequenceGroup, Status
from tests.support.kv_executor import reference_tokens
from tests.support.step_loop import StepLoop, assert_is_complete, new_request, only

TEXT = list(range(1, 91))


def chunk_sizes(loop: StepLoop) -> dict[int, int]:
    """Of the last step: sequence id -> tokens computed."""
    return {chunk.sequence_id: len(chunk.token_ids) for chunk in loop.plans[-1].chunks}


def decoding(loop: StepLoop, *groups: SequenceGroup) -> None:
    """Step until all of them have sampled something."""
    while any(only(group).num_output == 0 for group in groups):
        assert loop.step() is not None


# --- one rule for prompts and decodes ---------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_a_prompt_read_in_chunks_gives_the_same_tokens(budget: int) -> None:
    loop = StepLoop(limits=SchedulerLimits(max_num_batched_tokens=budget))
    loop.finish_all(new_request("a", TEXT[:20]), new_request("b", TEXT[5:18], seed=1))
    assert all(plan.num_tokens <= budget for plan in loop.plans)


def test_decodes_go_first_then_prompts_in_progress_then_new_ones() -> None:
    loop = StepLoop(limits=SchedulerLimits(max_num_batched_tokens=16))
    first = loop.add(new_request("first", TEXT[:4], 20))
    decoding(loop, first)
    second = loop.add(new_request("second", TEXT[:30], use_prefix_cache=False))
    third = loop.add(new_request("third", TEXT[:10]))
    loop.step()
    assert chunk_sizes(loop) == {only(first).id: 1, only(second).id: 15}
    loop.step()
    assert chunk_sizes(loop) == {only(first).id: 1, only(second).id: 15}
    loop.step()
    assert list(chunk_sizes(loop)) == [only(first).id, only(second).id, only(third).id]


def test_a_request_for_no_tokens_only_reads_its_prompt() -> None:
    loop = StepLoop()
    (group,) = loop.finish_all(new_request("a", TEXT[:9], 0, prompt_logprobs=0))
    assert loop.prompts_read == [group]
    assert len(group.prompt_logprobs) == 8
    assert not loop.plans[0].chunks[0].draws


def test_nothing_to_do_is_no_plan() -> None:
    assert StepLoop().scheduler.plan(0.0) is None


def test_the_first_time_it_was_scheduled_is_kept() -> None:
    loop = StepLoop()
    group = loop.add(new_request("a", TEXT[:9]))
    assert group.first_scheduled_s is None
    for now in (5.0, 6.0):
        plan = loop.scheduler.plan(now)
        assert plan is not None
        loop.settle(loop.scheduler.commit(plan, loop.executor.execute(plan)))
    assert group.first_scheduled_s == 5.0


# --- long and short prompts -------------------------------------------------------------------


def test_a_long_prompt_neither_stalls_a_stream_nor_a_short_request_nor_starves() -> None:
    limits = SchedulerLimits(max_num_batched_tokens=16, long_prefill_threshold=16)
    loop = StepLoop(num_blocks=200, limits=limits)
    stream = loop.add(new_request("stream", TEXT[:5], 100))
    decoding(loop, stream)
    long = loop.add(new_request("long", TEXT[:20] * 16, 2))
    loop.step()
    assert chunk_sizes(loop)[only(long).id] == 7, "half of what the decode leaves"
    short = loop.add(new_request("short", TEXT[40:50], 1))
    before = only(stream).num_output
    loop.step()
    assert short.is_finished, "its prompt had the step for itself"
    assert only(long).id not in chunk_sizes(loop)
    loop.step()
    assert chunk_sizes(loop)[only(long).id] >= 14, "what was owed is paid back"
    assert only(stream).num_output == before + 2, "the stream never skips a step"
    assert not long.is_prompt_read
    loop.run()
    assert_is_complete(long)


def test_a_flood_of_short_prompts_holds_a_long_one_up_for_a_few_steps_and_no_more() -> None:
    limits = SchedulerLimits(
        max_num_batched_tokens=16, long_prefill_threshold=16, long_prefill_share=0.25
    )
    loop = StepLoop(num_blocks=400, limits=limits)
    long = loop.add(new_request("long", TEXT[:20] * 16, 2))
    loop.step()
    sizes = []
    num_owed_max = 4 * OWED_MAX  # parts of a quarter
    for number in range(num_owed_max + 20):
        for name in ("a", "b"):
            loop.add(new_request(f"{name}{number}", TEXT[40 + number : 55 + number], 1))
        loop.step()
        sizes.append(chunk_sizes(loop).get(only(long).id, 0))
    assert sizes[:num_owed_max] == [0] * num_owed_max
    assert all(size > 0 for size in sizes[num_owed_max:])


def test_short_prompts_that_come_at_once_are_read_as_if_no_long_one_were_there() -> None:
    """The last of twelve, which take as many steps: with a small share they once took more."""
    limits = SchedulerLimits(
        max_num_batched_tokens=16, long_prefill_threshold=16, long_prefill_share=0.18
    )
    num_steps = []
    for is_beside_long in (False, True):
        loop = StepLoop(num_blocks=400, limits=limits)
        if is_beside_long:
            loop.add(new_request("long", TEXT[:20] * 16, 2))
            loop.step()
        begun = len(loop.plans)
        short = [loop.add(new_request(f"{n}", [n, *TEXT[:15]], 1)) for n in range(12)]
        while not all(group.is_finished for group in short):
            loop.step()
        num_steps.append(len(loop.plans) - begun)
    assert num_steps == [12, 12]


def test_a_long_prompt_is_not_left_out_for_a_short_one_that_cannot_begin() -> None:
    limits = SchedulerLimits(
        max_num_batched_tokens=16, long_prefill_threshold=16, max_running_requests=1
    )
    loop = StepLoop(num_blocks=200, limits=limits)
    long = loop.add(new_request("long", TEXT[:20] * 16, 2))
    loop.step()
    loop.add(new_request("short", TEXT[40:50], 1))
    loop.step()
    assert chunk_sizes(loop)[only(long).id] > 0


def test_a_long_prompt_stays_long_to_its_last_chunk() -> None:
    """Its last tokens alone would be a short prompt, older than all who came meanwhile."""
    limits = SchedulerLimits(max_num_batched_tokens=16, long_prefill_threshold=32)
    loop = StepLoop(num_blocks=200, limits=limits)
    stream = loop.add(new_request("stream", TEXT[:5], 100))
    decoding(loop, stream)
    long = loop.add(new_request("long", TEXT[:70], 1, use_prefix_cache=False))
    loop.step()
    while not long.is_prompt_read:
        assert chunk_sizes(loop)[only(long).id] <= 7, "half of what the decode leaves"
        loop.step()


def test_what_the_prefix_cache_holds_of_a_prompt_does_not_make_it_long() -> None:
    limits = SchedulerLimits(max_num_batched_tokens=16, long_prefill_threshold=32)
    loop = StepLoop(num_blocks=200, limits=limits)
    loop.finish_all(new_request("first", TEXT[:80], 1))
    stream = loop.add(new_request("stream", TEXT[60:65], 100))
    decoding(loop, stream)
    again = loop.add(new_request("again", [*TEXT[:80], *TEXT[:12]], 1))
    loop.step()
    assert chunk_sizes(loop)[only(again).id] > 7, "more than a long prompt's half"


def test_short_requests_that_keep_coming_do_not_starve_a_long_one() -> None:
    limits = SchedulerLimits(
        max_num_batched_tokens=16, long_prefill_threshold=16, max_running_requests=100
    )
    loop = StepLoop(num_blocks=400, limits=limits)
    long = loop.add(new_request("long", TEXT, 1))
    for number in range(90):
        for copy in range(3):
            loop.add(new_request(f"{number}.{copy}", [number, copy, *TEXT[:8]], 2))
        loop.step()
        if long.is_prompt_read:
            return
    raise AssertionError("the long prompt was not read in 90 steps")


def test_alone_a_long_prompt_takes_the_whole_budget() -> None:
    limits = SchedulerLimits(max_num_batched_tokens=16, long_prefill_threshold=16)
    loop = StepLoop(limits=limits)
    long = loop.add(new_request("long", TEXT, 1))
    loop.step()
    assert chunk_sizes(loop) == {only(long).id: 16}


def test_a_long_prompt_that_waits_lets_short_ones_pass_while_another_long_one_reads() -> None:
    limits = SchedulerLimits(max_num_batched_tokens=16, long_prefill_threshold=16)
    loop = StepLoop(limits=limits)
    reading = loop.add(new_request("reading", TEXT, 1))
    waiting = loop.add(new_request("waiting", TEXT[1:], 1))
    short = loop.add(new_request("short", TEXT[50:56], 1))
    loop.step()
    assert only(reading).status is Status.RUNNING
    assert only(waiting).status is Status.WAITING
    assert short.is_finished
    loop.run()
    assert_is_complete(waiting)


def test_prompt_logprobs_are_limited_per_step_and_complete_on_a_repeat() -> None:
    limits = SchedulerLimits(max_prompt_logprob_tokens=5)
    loop = StepLoop(limits=limits)
    for repeat in range(2):
        loop.finish_all(new_request(f"r{repeat}", TEXT[:12], 2, prompt_logprobs=2))
    wanting = [c for plan in loop.plans for c in plan.chunks if c.prompt_logprobs is not None]
    assert [len(chunk.token_ids) for chunk in wanting] == [5, 5, 2] * 2


# --- more decodes than budget -----------------------------------------------------------------


def test_more_decodes_than_budget_take_turns_whatever_their_band() -> None:
    loop = StepLoop(limits=SchedulerLimits(max_num_batched_tokens=4))
    groups = [
        loop.add(new_request(band.name, TEXT[band : band + 2], 40, n=3, band=band)) for band in Band
    ]
    loop.step()
    for _ in range(12):
        loop.step()
        assert loop.plans[-1].num_tokens == 4
    assert [one.num_output for group in groups for one in group.sequences] == [1 + 8] * 6
    loop.run()


def test_prompts_in_progress_go_on_when_decodes_fill_the_budget() -> None:
    loop = StepLoop(limits=SchedulerLimits(max_num_batched_tokens=4))
    groups = [loop.add(new_request(str(i), [i], 40)) for i in range(3)]
    decoding(loop, *groups)
    late = loop.add(new_request("late", TEXT[:9], 2))
    loop.step()
    assert chunk_sizes(loop)[only(late).id] == 1
    more = loop.add(new_request("more", [80], 40))
    for _ in range(12):
        loop.step()
    assert late.is_prompt_read
    loop.run()
    assert_is_complete(more)


# --- n choices --------------------------------------------------------------------------------


def test_n_choices_read_the_prompt_once_and_share_its_blocks() -> None:
    loop = StepLoop()
    group = loop.add(new_request("a", TEXT[:10], 6, n=4))
    loop.step()
    assert len(loop.plans[0].chunks[0].draws) == 4
    assert loop.cache.snapshot().used == 3
    loop.step()
    assert len(loop.plans[1].copies) == 3, "the last of four writes in place"
    assert loop.cache.snapshot().used == 2 + 4
    loop.run()
    assert_is_complete(group)
    assert loop.executor.num_tokens == 10 + 4 * 5
    assert len({tuple(sequence.output) for sequence in group.sequences}) == 4


def test_n_choices_count_n_against_the_running_limit() -> None:
    loop = StepLoop(limits=SchedulerLimits(max_running_requests=4))
    one = loop.add(new_request("one", TEXT[:3], 20))
    three = loop.add(new_request("three", TEXT[:4], 20, n=3))
    two = loop.add(new_request("two", TEXT[:5], 20, n=2))
    for _ in range(3):
        loop.step()
        assert loop.scheduler.snapshot().running == 4
    assert [len(group.sequences) for group in (one, three, two)] == [1, 3, 1]
    loop.run()


# --- prefix cache -----------------------------------------------------------------------------


def test_cached_tokens_are_none_of_a_cold_prompt_and_whole_blocks_of_a_warm_one() -> None:
    loop = StepLoop(num_blocks=16, block_size=16)
    prompt = list(range(40))
    for number, expected in enumerate((0, 32, 32)):
        (group,) = loop.finish_all(new_request(str(number), prompt))
        assert group.cached_tokens == expected
    (group,) = loop.finish_all(new_request("off", prompt, use_prefix_cache=False))
    assert group.cached_tokens == 0


def test_eight_questions_over_one_text_equal_a_run_without_the_cache() -> None:
    loop = StepLoop(num_blocks=128)
    questions = [[*TEXT[:20], 91, number] for number in range(8)]
    one_by_one = [
        loop.finish_all(new_request(f"a{i}", prompt, 24))[0] for i, prompt in enumerate(questions)
    ]
    at_once = loop.finish_all(
        *(new_request(f"b{i}", prompt, 24) for i, prompt in enumerate(questions))
    )
    assert [group.cached_tokens for group in one_by_one] == [0] + [20] * 7
    assert [group.cached_tokens for group in at_once] == [20] * 8


@pytest.mark.parametrize("num_bytes", [0, 1, 32])
def test_two_hundred_prompts_whose_hashes_collide_get_their_own_answers(num_bytes: int) -> None:
    """D01"""

    def weak(parent: bytes, tokens: list[int]) -> bytes:
        return repr((parent, tokens)).encode()[-num_bytes:] if num_bytes else b""

    loop = StepLoop(num_blocks=256, block_size=4, hash_block=weak)
    for start in range(0, 200, 8):
        prompts = [[*TEXT[:4], n % 7, n, n, n, *TEXT[:5]] for n in range(start, start + 8)]
        loop.finish_all(*(new_request(str(prompt), prompt, 4) for prompt in prompts))


def test_output_is_cached_too_so_that_a_next_turn_finds_it() -> None:
    loop = StepLoop(block_size=4)
    (group,) = loop.finish_all(new_request("turn 1", TEXT[:8], 9))
    conversation = only(group).tokens
    (next_turn,) = loop.finish_all(new_request("turn 2", [*conversation, 7]))
    assert next_turn.cached_tokens == 16, "the last token of a turn is never computed"


# --- our own bugs are loud --------------------------------------------------------------------


def test_requests_that_could_never_run_are_a_bug_of_the_caller() -> None:
    loop = StepLoop(num_blocks=4, block_size=4, limits=SchedulerLimits(max_running_requests=2))
    with pytest.raises(AssertionError, match="17 positions can never fit 4 blocks"):
        loop.add(new_request("large", TEXT[:10], 8))
    with pytest.raises(AssertionError, match="n=3 can never run"):
        loop.add(new_request("many", TEXT[:2], 2, n=3))
    with pytest.raises(AssertionError, match="empty prompt"):
        loop.add(new_request("empty", []))
    loop.add(new_request("fits exactly", TEXT[:10], 7))
    with pytest.raises(AssertionError, match="already here"):
        loop.add(new_request("fits exactly", TEXT[:2]))
    loop.run()


def test_a_plan_is_answered_before_the_next_one() -> None:
    loop = StepLoop()
    loop.add(new_request("a", TEXT[:4]))
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    with pytest.raises(AssertionError, match="was not committed"):
        loop.scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="between steps"):
        loop.scheduler.pause("a")
    result = loop.executor.execute(plan)
    loop.scheduler.commit(plan, result)
    with pytest.raises(AssertionError, match="not the one in flight"):
        loop.scheduler.commit(plan, result)


# --- cost -------------------------------------------------------------------------------------


def count_calls(work: Callable[[], object]) -> int:
    """Python function calls and C calls made by `work`."""
    num_calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # finalizers of earlier tests are not part of the cost
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return num_calls


@pytest.mark.parametrize("blocked_by", ["running limit", "memory"])
def test_planning_costs_the_same_with_ten_and_with_ten_thousand_waiting(blocked_by: str) -> None:
    def calls_of_a_step(num_waiting: int) -> int:
        limit = 4 if blocked_by == "running limit" else 64
        loop = StepLoop(num_blocks=9, limits=SchedulerLimits(max_running_requests=limit))
        for number in range(4):
            loop.add(new_request(f"running {number}", [number, *TEXT[:4]], 20))
        loop.step()
        for number in range(num_waiting):
            loop.add(new_request(str(number), TEXT[10:16], 8))
        assert loop.scheduler.num_waiting == num_waiting
        return count_calls(lambda: loop.scheduler.plan(0.0))

    assert calls_of_a_step(10) == calls_of_a_step(10_000)


def test_leaving_a_line_of_ten_thousand_costs_the_same_as_leaving_a_line_of_ten() -> None:
    def calls_of_an_abort(num_waiting: int) -> int:
        loop = StepLoop()
        for number in range(num_waiting):
            loop.add(new_request(str(number), TEXT[:4]))
        return count_calls(lambda: loop.scheduler.abort(str(num_waiting // 2)))

    assert calls_of_an_abort(10) == calls_of_an_abort(10_000)


def test_a_prompt_that_waits_is_not_hashed_again_and_again() -> None:
    num_hashed = 0

    def counting(parent: bytes, tokens: list[int]) -> bytes:
        nonlocal num_hashed
        num_hashed += 1
        return repr((parent, tokens)).encode()

    loop = StepLoop(num_blocks=16, hash_block=counting)
    loop.add(new_request("running", TEXT[:16], 30))
    loop.step()
    loop.add(new_request("waiting", [*TEXT[:16], *TEXT[40:60]], 8))
    loop.step()
    before = num_hashed
    for _ in range(2):
        loop.step()
    assert num_hashed == before
    loop.run()


def test_the_reference_tells_prompts_seeds_and_choices_apart() -> None:
    base = reference_tokens(new_request("a", TEXT[:5]), 0)
    assert base != reference_tokens(new_request("a", TEXT[1:5]), 0)
    assert base != reference_tokens(new_request("a", TEXT[:5], seed=1), 0)
    assert base != reference_tokens(new_request("a", TEXT[:5]), 1)
