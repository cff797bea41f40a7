import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.scheduler.budget import SchedulerLimits, StepBudget


def new_budget(num_tokens: int = 100, **limits: int | float) -> StepBudget:
    fields = {"long_prefill_threshold": 20, "long_prefill_share": 0.5, **limits}
    return StepBudget(SchedulerLimits(max_num_batched_tokens=num_tokens, **fields))  # type: ignore[arg-type]


def test_a_lone_long_prompt_may_take_everything() -> None:
    budget = new_budget()
    budget.open_prompts(has_long=True, share=1.0)
    assert budget.room(500, is_long=True, wants_logprobs=False) == 100


def test_beside_others_long_prompts_share_their_share() -> None:
    budget = new_budget()
    budget.open_prompts(has_long=True, share=0.5)
    assert budget.room(500, is_long=True, wants_logprobs=False) == 50
    budget.take(50, is_long=True, wants_logprobs=False)
    assert budget.room(500, is_long=True, wants_logprobs=False) == 0
    assert budget.room(20, is_long=False, wants_logprobs=False) == 20
    assert budget.left_for_new == 50, "once it is served nothing more is kept for it"


def test_short_prompts_leave_something_for_a_long_one_that_comes_after() -> None:
    budget = new_budget(16)
    budget.open_prompts(has_long=True, share=0.5)
    assert budget.room(20, is_long=False, wants_logprobs=False) == 14
    budget.take(14, is_long=False, wants_logprobs=False)
    assert budget.room(20, is_long=False, wants_logprobs=False) == 0
    assert budget.left_for_new == 0
    assert budget.room(500, is_long=True, wants_logprobs=False) == 2


def test_decodes_leave_something_for_prompts_in_progress() -> None:
    assert new_budget(64).decodes_max(has_prompts=False) == 64
    assert new_budget(64).decodes_max(has_prompts=True) == 56
    assert new_budget(1).decodes_max(has_prompts=True) == 0


def test_prompts_whose_logprobs_are_wanted_are_limited_together() -> None:
    budget = new_budget(max_prompt_logprob_tokens=12)
    budget.open_prompts(has_long=False, share=0.5)
    assert budget.room(10, is_long=False, wants_logprobs=True) == 10
    budget.take(10, is_long=False, wants_logprobs=True)
    assert budget.room(10, is_long=False, wants_logprobs=True) == 2
    assert budget.room(10, is_long=False, wants_logprobs=False) == 10


@given(
    num_tokens=st.integers(1, 64),
    num_decodes=st.integers(0, 64),
    prompts=st.lists(st.integers(1, 80), min_size=1, max_size=8),
    share=st.floats(0.01, 1),
)
def test_the_budget_is_never_exceeded_and_the_first_long_prompt_always_gets_something(
    num_tokens: int, num_decodes: int, prompts: list[int], share: float
) -> None:
    budget = new_budget(num_tokens)
    budget.left -= min(num_decodes, budget.decodes_max(has_prompts=True))
    after_decodes = budget.left
    long = [prompt for prompt in prompts if budget.is_long(prompt)]
    budget.open_prompts(has_long=bool(long), share=share)
    given_to: list[tuple[int, int]] = []
    for prompt in prompts:
        is_long = budget.is_long(prompt)
        room = budget.room(prompt, is_long=is_long, wants_logprobs=False)
        budget.take(room, is_long=is_long, wants_logprobs=False)
        given_to.append((prompt, room))
    assert budget.left >= 0
    assert sum(room for _, room in given_to) + budget.left == after_decodes
    rooms_of_long = [room for prompt, room in given_to if budget.is_long(prompt)]
    assert sum(rooms_of_long) <= max(1, int(share * after_decodes))
    if long:
        assert rooms_of_long[0] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_batched_tokens": 0},
        {"max_running_requests": 0},
        {"long_prefill_threshold": 0},
        {"long_prefill_share": 0.0},
        {"long_prefill_share": 1.5},
        {"max_prompt_logprob_tokens": 0},
        {"min_run_tokens": -1},
        {"max_consecutive_preemptions": 0},
        {"watermark": 1.0},
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_by_its_name(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        SchedulerLimits(**wrong)  # type: ignore[arg-type]
