"""Nothing is lost by preemption, failure or abort, and every block comes back."""

import pytest

from kvota.core.errors import InvalidRequest
from kvota.core.request import Band
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.sequence import IllegalTransition, Status
from tests.support.step_loop import StepLoop, assert_is_complete, new_request, only

TEXT = list(range(1, 91))


# --- memory pressure --------------------------------------------------------------------------


@pytest.mark.parametrize("min_run_tokens", [0, 4, 100])
def test_a_preempted_request_neither_loses_nor_repeats_anything(min_run_tokens: int) -> None:
    limits = SchedulerLimits(min_run_tokens=min_run_tokens)
    loop = StepLoop(num_blocks=7, block_size=8, limits=limits)
    groups = loop.finish_all(
        new_request("a", TEXT[:18], 20), new_request("b", TEXT[30:48], 20, seed=3)
    )
    assert sum(group.num_preemptions for group in groups) >= 1
    assert only(groups[0]).num_preemptions == 0, "the older one is never the victim"
    snapshot = loop.scheduler.snapshot()
    assert (snapshot.cache.used, snapshot.preempted, snapshot.running) == (0, 0, 0)
    assert snapshot.preemptions == groups[1].num_preemptions


def test_fifty_long_outputs_finish_in_a_pool_for_two_with_bounded_preemptions() -> None:
    loop = StepLoop(num_blocks=20, block_size=4, limits=SchedulerLimits(min_run_tokens=4))
    requests = [new_request(str(i), [i, 1, 2], 36, seed=i) for i in range(50)]
    groups = loop.finish_all(*requests)
    assert sum(group.num_preemptions for group in groups) > 0
    assert max(group.num_preemptions for group in groups) <= 36 / 4 + 1


def test_one_that_grows_to_the_whole_pool_finishes_while_another_waits() -> None:
    loop = StepLoop(num_blocks=6, block_size=4, limits=SchedulerLimits(min_run_tokens=2))
    whole, other = new_request("whole", TEXT[:4], 21), new_request("other", TEXT[7:11], 9)
    loop.finish_all(whole, other)


def test_when_nobody_may_be_preempted_the_latest_is_forced_so_that_the_oldest_goes_on() -> None:
    limits = SchedulerLimits(min_run_tokens=1000, watermark=0.0)
    loop = StepLoop(num_blocks=4, block_size=4, limits=limits)
    old, new = loop.finish_all(new_request("old", TEXT[:6], 9), new_request("new", TEXT[20:26], 9))
    assert only(old).num_preemptions == 0
    assert only(new).num_preemptions == 1


def test_batch_gives_way_to_an_interactive_request_that_came_later() -> None:
    limits = SchedulerLimits(min_run_tokens=0, watermark=0.0)
    loop = StepLoop(num_blocks=6, block_size=4, limits=limits)
    batch, interactive = loop.finish_all(
        new_request("batch", TEXT[:8], 12, band=Band.BATCH), new_request("now", TEXT[20:28], 12)
    )
    assert only(batch).num_preemptions > 0
    assert only(interactive).num_preemptions == 0


def test_nobody_is_admitted_in_the_step_in_which_somebody_was_preempted() -> None:
    limits = SchedulerLimits(min_run_tokens=0, watermark=0.0)
    loop = StepLoop(num_blocks=6, block_size=4, limits=limits)
    growing = loop.add(new_request("growing", TEXT[:8], 8))
    victim = loop.add(new_request("victim", TEXT[20:34], 8, band=Band.BATCH))
    loop.step()
    late = loop.add(new_request("late", TEXT[50:53], 2))
    loop.step()
    assert only(victim).status is Status.PREEMPTED
    assert only(growing).num_output == 2
    assert only(late).status is Status.WAITING, "what was freed is there for those who run"
    loop.scheduler.abort("victim")  # which goes first otherwise, and needs more than is free
    loop.step()
    assert only(late).status is Status.RUNNING
    loop.run()


def test_a_new_one_is_admitted_only_when_a_watermark_stays_free_beside_others() -> None:
    limits = SchedulerLimits(watermark=0.5)
    loop = StepLoop(num_blocks=8, block_size=4, limits=limits)
    large = loop.add(new_request("large", TEXT[:24], 1))
    loop.step()
    assert large.is_finished, "alone it needs no watermark"
    first = loop.add(new_request("first", TEXT[30:38], 8))
    second = loop.add(new_request("second", TEXT[60:72], 2))
    loop.step()
    assert only(first).status is Status.RUNNING
    assert only(second).status is Status.WAITING
    loop.run()


def test_a_paused_request_gives_its_blocks_back_and_loses_nothing() -> None:
    loop = StepLoop()
    group = loop.add(new_request("a", TEXT[:10], 10, n=2))
    for _ in range(3):
        loop.step()
    assert loop.scheduler.pause("a")
    assert loop.scheduler.pause("a")
    assert not loop.scheduler.pause("nobody")
    loop.scheduler.check()
    assert loop.cache.snapshot().used == 0
    assert {sequence.status for sequence in group.sequences} == {Status.PREEMPTED}
    assert loop.step() is None, "it runs although it is paused"
    loop.scheduler.resume("a")
    loop.scheduler.resume("nobody")
    loop.run()
    assert_is_complete(group)
    assert loop.prompts_read == [group]
    assert loop.scheduler.snapshot().recomputed_tokens < 10, "most of it was still cached"


def test_a_request_may_be_paused_before_it_ever_ran_and_ended_while_it_is() -> None:
    loop = StepLoop()
    first, second = (loop.add(new_request(name, TEXT[:6], 4)) for name in "ab")
    for name in "ab":
        loop.scheduler.pause(name)
    assert loop.step() is None
    loop.scheduler.abort("a")
    loop.scheduler.resume("b")
    loop.run()
    assert first.is_finished
    assert_is_complete(second)


def test_a_request_paused_before_it_ran_goes_on_before_those_that_came_later() -> None:
    loop = StepLoop(limits=SchedulerLimits(max_running_requests=1))
    first, second = (loop.add(new_request(name, TEXT[:6], 4)) for name in "ab")
    loop.scheduler.pause("a")
    loop.scheduler.resume("a")
    loop.step()
    assert [only(group).status for group in (first, second)] == [Status.RUNNING, Status.WAITING]
    loop.run()


# --- endings ----------------------------------------------------------------------------------


def test_a_finished_sequence_gives_its_blocks_back_in_that_call() -> None:
    loop = StepLoop()
    group = loop.add(new_request("a", TEXT[:10], 10))
    loop.step()
    loop.scheduler.finish(only(group))
    assert loop.cache.snapshot().used == 0
    assert not loop.scheduler.has_work
    with pytest.raises(IllegalTransition):
        loop.scheduler.finish(only(group))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_abort_ends_every_choice_in_whatever_state(num_steps: int) -> None:
    limits = SchedulerLimits(max_num_batched_tokens=8)
    loop = StepLoop(limits=limits)
    bystander = loop.add(new_request("bystander", TEXT[5:9], 12))
    group = loop.add(new_request("a", TEXT[:20], 30, n=3))
    for _ in range(num_steps):
        loop.step()
    assert loop.scheduler.abort("a") is group
    loop.scheduler.check()
    assert group.is_finished
    assert loop.scheduler.group("a") is None
    assert loop.scheduler.abort("a") is None
    loop.run()
    assert_is_complete(bystander)


def test_requests_aborted_in_line_are_never_computed_and_leave_no_trace() -> None:
    loop = StepLoop(limits=SchedulerLimits(max_running_requests=1))
    running = loop.add(new_request("running", TEXT[:4], 8))
    loop.step()
    for number in range(3):
        loop.add(new_request(f"cut {number}", TEXT[10:30], 8))
    for number in range(3):
        loop.scheduler.abort(f"cut {number}")
    assert loop.scheduler.num_waiting == 0
    loop.run()
    assert_is_complete(running)
    assert loop.executor.num_tokens == 4 + 7


def test_a_step_that_is_repeated_in_parts_is_as_good_as_any() -> None:
    loop = StepLoop()
    wanted = [new_request("a", TEXT[:10], 12, n=3), new_request("b", TEXT[:9], 12)]
    groups = [loop.add(request) for request in wanted]
    for num_good_steps in range(4):
        for _ in range(num_good_steps):
            loop.step()
        assert loop.step_in_parts()
    loop.run()
    for group in groups:
        assert_is_complete(group)


def test_who_cannot_be_computed_is_aborted_and_the_others_of_the_step_go_on() -> None:
    loop = StepLoop()
    groups = [loop.add(new_request(name, TEXT[:10], 6, n=2)) for name in "abc"]
    for _ in range(3):
        loop.step()
    assert loop.step_in_parts(broken="b")
    assert loop.scheduler.group("b") is None
    loop.run()
    for group in (groups[0], groups[2]):
        assert_is_complete(group)
    assert loop.cache.snapshot().used == 0


def test_after_every_kind_of_ending_the_whole_pool_is_there_again() -> None:
    loop = StepLoop(num_blocks=12)
    for number in range(200):
        cut = loop.add(new_request(f"cut {number}", [number % 97, *TEXT[:9]], 20, n=2))
        loop.add(new_request(f"broken {number}", [*TEXT[:3], number % 97], 20))
        loop.add(new_request(f"good {number}", [*TEXT[:5], number % 97], 3))
        loop.step()
        loop.step_in_parts(broken=f"broken {number}")
        loop.step()
        loop.scheduler.abort(cut.request.id)
        loop.run()
        snapshot = loop.cache.snapshot()
        assert snapshot.used == 0
        assert snapshot.free + snapshot.cached == 12
    loop.finish_all(new_request("all of it", TEXT[:40], 9))


def test_a_draw_that_failed_appends_nothing() -> None:
    loop = StepLoop()
    group = loop.add(new_request("a", TEXT[:4], 8))
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    result = loop.executor.execute(plan)
    (answer,) = result.chunks
    broken = type(answer.sampled[0])(0, error=InvalidRequest("No token may follow."))
    done = loop.scheduler.commit(plan, type(result)([type(answer)([broken])]))
    assert done.sampled == [(only(group), broken)]
    assert only(group).output == []
    assert loop.scheduler.plan(0.0) is None, "it waits for the engine to end it"
    loop.scheduler.finish(only(group))
    loop.scheduler.check()
