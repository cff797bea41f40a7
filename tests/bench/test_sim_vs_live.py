"""The arithmetic of the comparison; the live part needs a quiet machine."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from bench.sim_vs_live import (
    Latency,
    Live,
    errors_at,
    figures,
    judge,
    learn_around_s,
    made_latencies,
    seen_latencies,
    simulated,
    summary,
)
from kvota.core.plan import Capacity
from kvota.sim.calibration import Calibration, FitError
from kvota.sim.executor import StepCost
from kvota.sim.records import RequestRecord
from kvota.telemetry.steps import StepRecord, StepTerms
from kvota.tools.load.asked import Seen
from kvota.traffic.arrival import Arrival

COST = StepCost(base=0.01, per_decode=0.001, per_prefill_token=1e-4)
CAPACITY = Capacity(500, 16, bytes_per_block=0)
ARRIVALS = [
    Arrival(at_s=0.07 * at, prompt_tokens=20 + at, output_tokens=6, max_tokens=6)
    for at in range(30)
]
STEPS = [StepRecord(StepTerms(0, 0.0, 1, 20), 0.011)]
EMPTY = Live(ARRIVALS, [], STEPS, CAPACITY, None)


def fit_of(cost: StepCost, jitter: Sequence[float] = ()) -> Calibration:
    unknown = FitError(1, 0.0, 0.0, 0.0, 0.0)
    return Calibration(cost, unknown, unknown, jitter)


def as_seen(record: RequestRecord, late_s: float) -> Seen:
    """What a client would have seen, had it lived in the simulated world."""
    due_s = record.arrival.at_s
    times = [at - due_s + late_s for at in record.token_at_s]
    return Seen(
        scheduled_s=due_s, sent_s=0.0, ended_s=times[-1], first_token_s=times[0], token_s=times,
        status=200, output_tokens=record.output_tokens,
    )  # fmt: skip


def live_of(fit: Calibration, late_s: float = 0.0, seed: int = 99) -> Live:
    """A part whose truth is the simulator itself."""
    seen = [as_seen(record, late_s) for record in simulated(EMPTY, fit, seed)]
    return replace(EMPTY, seen=seen)


def test_the_simulator_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    live, fit = live_of(fit_of(COST)), fit_of(COST)
    assert judge(live, live, live, fit)
    assert "mean error 0.0%, largest at p99 0.0%" in capsys.readouterr().out


def test_time_around_requests_is_found_again() -> None:
    live = live_of(fit_of(COST), late_s=0.020)
    assert learn_around_s(live, fit_of(COST)) == pytest.approx(0.020, rel=0.05)


def test_a_wrong_cost_shows(capsys: pytest.CaptureFixture[str]) -> None:
    live, slow = live_of(fit_of(COST)), fit_of(replace(COST, base=0.02))
    assert not judge(live, live, live, slow)
    told = capsys.readouterr()
    assert "Targets" in told.err
    assert "live against itself:    mean error 0.0%" in told.out


def test_jitter_makes_the_slow_tail_that_a_mean_has_not() -> None:
    """One step in ten takes four times as long."""
    jitter = [Random(3).choice((0.8, 0.8, 0.6, 0.7, 4.0)) for _ in range(997)]
    live = figures(seen_latencies(live_of(fit_of(COST, jitter))))["time per token"]
    plain, with_jitter = (
        figures(made_latencies(EMPTY_SEEN, fit_of(COST, each), 0.0))["time per token"]
        for each in ((), jitter)
    )
    assert errors_at(live, plain)[2] > 0.15
    assert errors_at(live, with_jitter)[2] < errors_at(live, plain)[2]


def test_only_whole_answers_are_compared() -> None:
    live = live_of(fit_of(COST))
    broken = Seen(scheduled_s=0.0, sent_s=0.0, ended_s=1.0, code="queue_full")
    part = replace(live, seen=[broken, *live.seen[1:]])
    assert seen_latencies(part)[0] is None
    whole = made_latencies(live, fit_of(COST), 0.0)
    made = made_latencies(part, fit_of(COST), 0.0)
    assert len(whole) - len(made) == len(whole) // len(ARRIVALS)


def test_errors_are_shares_of_the_live_figure() -> None:
    assert errors_at([1.0] * 100, [1.1] * 100) == pytest.approx([0.1] * 3)
    assert errors_at([2.0], [1.0]) == [0.5] * 3


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    assert Latency(0.1, 0.1, 1).per_token_s is None
    assert Latency(0.1, 0.5, 5).per_token_s == pytest.approx(0.1)


def test_the_summary_is_of_all_errors_and_of_those_at_p99() -> None:
    errors = [0.01, 0.02, 0.12, 0.30, 0.02, 0.07]
    mean, at_p99 = summary(errors)
    assert mean == pytest.approx(0.09)
    assert at_p99 == 0.12


EMPTY_SEEN = live_of(fit_of(COST))
