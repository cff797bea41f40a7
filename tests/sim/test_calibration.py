from dataclasses import replace
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
    fitted = known
    expected = [found.seconds(one.terms) for one in fitted]

    def squared(cost: StepCost) -> float:
        pairs = zip(fitted, expected, strict=True)
        return sum(((one.seconds - cost.seconds(one.terms)) / wanted) ** 2 for one, wanted in pairs)

    scale = sum(one.seconds for one in fitted) / sum(expected)
    assert scale == pytest.approx(1)
    least = squared(found)
    for name in StepCost.__dataclass_fields__:
        value = getattr(found, name)
        assert value >= 0
        for factor in (0.8, 1.25):
            assert squared(replace(found, **{name: value * factor})) >= 0.98 * least - 1e-9


def skewed(rng: Random) -> float:
    """Mostly a little faster than the mean, which is 1, and now and then much slower."""
    return rng.lognormvariate(-0.08, 0.4)


def test_what_is_late_by_chance_does_not_make_predictions_low() -> None:
    """Waits are sums of turns: predicted and measured ones must agree."""
    rng = Random(9)
    known = [StepRecord(one.terms, one.seconds * skewed(rng)) for one in records(TRUE, 3000)]
    found = fit_step_cost(known)
    terms = [one.terms for one in known]
    told, true = (sum(map(cost.seconds, terms)) for cost in (found.cost, TRUE))
    assert told == pytest.approx(true, rel=0.03)
    for kind in (
        [one for one in terms if not one.prefill],
        [one for one in terms if not one.decodes],
    ):
        told, true = (sum(map(cost.seconds, kind)) for cost in (found.cost, TRUE))
        assert told == pytest.approx(true, rel=0.05)


def test_jitter_is_what_was_measured_over_what_is_predicted() -> None:
    known = records(TRUE, 1000, noise=0.05)
    found = fit_step_cost(known)
    factors = found.jitter.factors
    assert len(factors) == 1000
    assert sum(factors) / 1000 == pytest.approx(1, abs=0.01)
    made = found.cost.seconds(known[7].terms) * factors[7]
    assert made == pytest.approx(known[7].seconds)


def test_the_gap_between_steps_is_part_of_what_a_step_costs() -> None:
    """Where the engine may have waited, the usual gap counts."""
    known = [
        replace(one, gap=0.002 if at % 3 else None) for at, one in enumerate(records(TRUE, 300))
    ]
    found = fit_step_cost(known).cost
    assert found.base == pytest.approx(TRUE.base + 0.002, rel=1e-6)
    assert found.per_decode == pytest.approx(TRUE.per_decode, rel=1e-6)


def test_too_few_steps_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="record at least 20"):
        fit_step_cost(records(TRUE, 10))


def test_the_error_is_relative_to_what_was_measured() -> None:
    steps = [StepRecord(StepTerms(0, 0.0, 1, 0), 2.0), StepRecord(StepTerms(0, 0.0, 1, 0), 0.5)]
    error = error_of(StepCost(base=1.0), steps)
    assert error.mean == pytest.approx((0.5 + 1.0) / 2)
