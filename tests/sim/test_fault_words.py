import pytest

from kvota.core.errors import ConfigError
from kvota.sim.fault_words import plan_of, planned, told, word_of
from kvota.sim.faults import FaultPlan, Jump, SlowStep, StepError, Storm, Strike


def test_words_become_the_faults_they_say() -> None:
    words = (
        "slow_step@60:2.0", "executor_error@120", "executor_error@5:0.5", "abort_storm@30:0.5",
        "clock_jump@90:30", "slow_step@1e2:0",
    )  # fmt: skip
    assert plan_of(words) == FaultPlan(
        slow_steps=(SlowStep(60.0, 2.0), SlowStep(100.0, 0.0)),
        errors=(StepError(120.0, 0.0), StepError(5.0, 0.5)),
        storms=(Storm(30.0, 0.5),),
        jumps=(Jump(90.0, 30.0),),
    )
    assert plan_of(()) == FaultPlan()


def test_every_fault_has_a_word_that_means_it() -> None:
    plan = plan_of(("slow_step@60:2", "executor_error@1:0.5", "abort_storm@3:1", "clock_jump@9:30"))
    assert plan_of(map(word_of, planned(plan))) == plan
    assert [fault.at_s for fault in planned(plan)] == [1.0, 3.0, 9.0, 60.0]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("slow_step", "write executor_error@120"),
        ("power_cut@3:1", "write executor_error@120"),
        ("slow_step@60", "needs a number after a colon"),
        ("slow_step@soon:1", "'soon' is no number"),
        ("slow_step@1:nan", "nan must be 0 or more, and finite"),
        ("slow_step@-1:1", "-1 must be 0 or more"),
        ("abort_storm@1:1.5", "share must be in 0 to 1, got 1.5"),
        ("executor_error@1:2", "share must be in 0 to 1"),
        ("clock_jump@90:-30", "can stand still, but never goes back"),
    ],
)
def test_what_is_no_fault_is_refused_with_the_reason(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as told_so:
        plan_of(("abort_storm@30:0.5", word))
    assert f"--fault {word}:" in told_so.value.message


def test_a_report_tells_what_each_did_and_which_never_struck() -> None:
    plan = plan_of(("slow_step@60:2", "clock_jump@9:30", "slow_step@70:1"))
    struck = [Strike(plan.jumps[0], 9.01, "x"), Strike(plan.slow_steps[0], 62.5, "y")]
    assert told(plan, struck) == [
        "clock_jump@9:30: at 9.010 s x",
        "slow_step@60:2: at 62.500 s y",
        "slow_step@70:1: no step came after it",
    ]
