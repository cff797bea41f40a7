import pytest

from kvota.core.clock import ManualClock
from kvota.core.plan import Capacity, Chunk, Draw, StepPlan
from kvota.core.request import SamplingParams
from kvota.sim.executor import END, WORD, StepCost, StepCostExecutor
from kvota.telemetry.steps import StepTerms, terms_of

COST = StepCost(
    base=1.0, per_prefill_token=0.1, per_attention=0.01, per_decode=0.5, per_context=0.001,
    any_prefill=2.0,
)  # fmt: skip


def decode(position: int) -> Chunk:
    return Chunk(1, (9,), position, ())


def prefill(num_tokens: int, start: int) -> Chunk:
    return Chunk(2, tuple(range(num_tokens)), start, ())


def test_a_step_of_both_kinds_costs_the_sum_of_its_terms() -> None:
    plan = StepPlan([decode(99), decode(199), prefill(10, 30), prefill(4, 0)])
    assert terms_of(plan) == StepTerms(14, 10 * 35.0 + 4 * 2.0, 2, 300)
    by_hand = 1.0 + 0.1 * 14 + 0.01 * 358 + 0.5 * 2 + 0.001 * 300 + 2.0
    assert COST.seconds(terms_of(plan)) == pytest.approx(by_hand)


def test_a_step_without_prompts_has_no_prefill_part() -> None:
    assert COST.seconds(terms_of(StepPlan([decode(99)]))) == pytest.approx(1.0 + 0.5 + 0.1)


def test_the_clock_moves_by_what_the_step_costs() -> None:
    clock = ManualClock(5.0)
    executor = StepCostExecutor(Capacity(4, 4, 0), COST, clock)
    executor.execute(StepPlan([decode(99)]))
    executor.execute(StepPlan([decode(99)]))
    assert clock.now() == pytest.approx(5.0 + 2 * 1.6)
    assert executor.busy_s == pytest.approx(3.2)


def test_the_end_comes_as_soon_as_min_tokens_allows_it() -> None:
    executor = StepCostExecutor(Capacity(4, 4, 0), COST, ManualClock())
    tokens = [5, 6, 7]
    draw = Draw(SamplingParams(min_tokens=3), 0, tokens, 3)
    said = []
    for _ in range(3):
        chunk = Chunk(1, (tokens[-1],), len(tokens) - 1, (), (draw,))
        [answer] = executor.execute(StepPlan([chunk])).chunks
        said.append(answer.sampled[0].token)
        tokens.append(said[-1])
    assert said == [WORD, WORD, END]


def test_a_chunk_that_wants_no_token_gets_none() -> None:
    executor = StepCostExecutor(Capacity(4, 4, 0), COST, ManualClock())
    [answer] = executor.execute(StepPlan([prefill(8, 0)])).chunks
    assert answer.sampled == ()
