from kvota.core.request import Band
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.preemption import VictimChoice
from kvota.scheduler.sequence import Sequence, SequenceGroup, Status
from tests.support.step_loop import new_request

STEP = 5


def runner(arrival: int, band: Band = Band.INTERACTIVE, num_run_tokens: int = 10) -> Sequence:
    group = SequenceGroup(
        request=new_request(str(arrival), [1], band=band), arrival=arrival, constraints=(None,)
    )
    return Sequence(
        id=arrival,
        group=group,
        choice=0,
        tokens=[1] * (1 + num_run_tokens),
        chain=None,
        draws=(),
        status=Status.RUNNING,
        num_tokens_at_start=1,
    )


def new_choice(min_run_tokens: int = 4, max_consecutive_preemptions: int = 2) -> VictimChoice:
    return VictimChoice(
        SchedulerLimits(
            min_run_tokens=min_run_tokens, max_consecutive_preemptions=max_consecutive_preemptions
        )
    )


def test_the_lowest_band_goes_first_then_the_latest_arrival() -> None:
    old, new = runner(0), runner(3)
    batch_old, batch_new = runner(1, Band.BATCH), runner(2, Band.BATCH)
    running = [old, new, batch_old, batch_new]
    choice = new_choice()
    assert choice.choose(running, old, STEP) is batch_new
    assert choice.choose(running[:3], old, STEP) is batch_old
    assert choice.choose(running[:2], old, STEP) is new


def test_nobody_before_the_one_in_need_is_taken_nor_itself() -> None:
    old, new = runner(0), runner(1)
    assert new_choice().choose([old, new], new, STEP) is None


def test_every_run_lasts_its_quantum() -> None:
    needy, ran_enough, fresh = runner(0), runner(1), runner(2, num_run_tokens=3)
    assert new_choice().choose([needy, ran_enough, fresh], needy, STEP) is ran_enough
    assert new_choice(min_run_tokens=3).choose([needy, ran_enough, fresh], needy, STEP) is fresh


def test_whoever_has_its_place_in_the_step_keeps_it() -> None:
    needy, planned = runner(0), runner(1)
    planned.planned_step = STEP
    assert new_choice().choose([needy, planned], needy, STEP) is None
    assert new_choice().choose([needy, planned], needy, STEP + 1) is planned


def test_the_same_one_is_not_taken_again_and_again() -> None:
    needy, other, last = runner(0), runner(1), runner(2)
    choice = new_choice(max_consecutive_preemptions=2)
    taken = []
    for _ in range(6):
        victim = choice.choose([needy, other, last], needy, STEP)
        assert victim is not None
        choice.record(victim)
        taken.append(victim.id)
    assert taken == [2, 2, 1, 2, 2, 1]


def test_when_only_the_last_victim_is_left_nobody_is_taken() -> None:
    needy, last = runner(0), runner(1)
    choice = new_choice(max_consecutive_preemptions=1)
    choice.record(last)
    assert choice.choose([needy, last], needy, STEP) is None
