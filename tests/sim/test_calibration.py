from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.sim.calibration import error_of, fit_step_cost
from kvota.sim.executor import StepCost
from kvota.telemetry.steps import StepRecord, StepTerms

TRUE = StepCost(
    base=0.004, per_prefill_token=4e-4, per_attention=1e-7, per_decode=6e-4, per_context=2e-6,
    any_prefill=0.003,
)  # fmt: skip


def draw_terms(rng: Random) -> StepTerms:
    prefill = rng.choice((0, rng.randint(2, 512)))
    decodes = rng.randint(0 if prefill else 1, 64)
    return StepTerms(
        prefill, prefill * rng.uniform(prefill / 2, 4000), decodes, decodes * rng.randint(10, 3000)
    )


def records(cost: StepCost, number: int, noise: float = 0.0) -> list[StepRecord]:
    rng = Random(4)
    drawn = [draw_terms(rng) for _ in range(number)]
    return [
        StepRecord(terms, cost.seconds(terms) * (1 + rng.uniform(-noise, noise))) for terms in drawn
    ]


def test_exact_measurements_give_the_true_cost_back() -> None:
    found = fit_step_cost(records(TRUE, 200))
    for name in StepCost.__dataclass_fields__:
        assert getattr(found.cost, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert found.unseen.p99 < 1e-6
    assert found.is_good


def test_noise_shows_in_the_error_out_of_sample_and_no_more_than_itself() -> None:
    found = fit_step_cost(records(TRUE, 1000, noise=0.05))
    assert 0.01 < found.unseen.mean < 0.03
    assert found.unseen.p99 < 0.06
    assert found.unseen.num_steps == 400


def test_a_model_that_does_not_fit_is_not_called_good() -> None:
    strange = [
        StepRecord(one.terms, 0.01 if number % 2 else 0.03)
        for number, one in enumerate(records(TRUE, 200))
    ]
    assert not fit_step_cost(strange).is_good


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 1e-3), min_size=6, max_size=6), st.floats(0, 0.5))
def test_no_coefficient_is_ever_negative_and_none_fits_better_nearby(
    values: list[float], noise: float
) -> None:
    base, prefill, attention, decode, context, first = values
    cost = StepCost(
        base=base + 1e-3, per_prefill_token=prefill, per_attention=attention * 1e-4,
        per_decode=decode, per_context=context * 1e-4, any_prefill=first,
    )  # fmt: skip
    known = records(cost, 100, noise)
    found = fit_step_cost(known).cost
    fitted = known[:60]
    squared = sum((found.seconds(one.terms) / one.seconds - 1) ** 2 for one in fitted)
    for name in StepCost.__dataclass_fields__:
        value = getattr(found, name)
        assert value >= 0
        for factor in (0.99, 1.01):
            fields = {n: getattr(found, n) for n in StepCost.__dataclass_fields__}
            other = StepCost(**(fields | {name: value * factor}))
            moved = sum((other.seconds(one.terms) / one.seconds - 1) ** 2 for one in fitted)
            assert moved >= squared - 1e-9


def test_too_few_steps_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="record at least 20"):
        fit_step_cost(records(TRUE, 10))


def test_the_error_is_relative_to_what_was_measured() -> None:
    steps = [StepRecord(StepTerms(0, 0.0, 1, 0), 2.0), StepRecord(StepTerms(0, 0.0, 1, 0), 0.5)]
    error = error_of(StepCost(base=1.0), steps)
    assert error.mean == pytest.approx((0.5 + 1.0) / 2)
