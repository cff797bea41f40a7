"""The judging of the comparison; the live part needs a quiet machine."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench import sim_vs_live
from bench.sim_vs_live import (
    Live,
    folds,
    judge,
    learn_around_s,
    made_runs,
    seen_run,
    simulated,
    sources,
)
from bench.sim_vs_live_figures import figures_of, summary_of
from kvota.core.plan import Capacity
from kvota.sim.calibration import Calibration, FitError, fit_step_cost
from kvota.sim.executor import StepCost
from kvota.sim.records import RequestRecord
from kvota.telemetry.steps import StepRecord, StepTerms
from kvota.tools.load.asked import Seen
from kvota.tools.replay.plan import Source, read
from kvota.traffic.arrival import Arrival, Scaling

SEEDS = range(1, 4)
COST = StepCost(base=0.01, per_decode=0.001, per_prefill_token=1e-4)
CAPACITY = Capacity(500, 16, bytes_per_block=0)
ARRIVALS = [
    Arrival(at_s=0.07 * at, prompt_tokens=20 + at, output_tokens=6, max_tokens=6)
    for at in range(30)
]


def steps_of(cost: StepCost, factors: Sequence[float] = (1.0,)) -> list[StepRecord]:
    """What a recorder would have written of all kinds of steps."""
    rng = Random(4)
    drawn = [
        StepTerms(prefill, prefill**2 / 2, decodes, decodes * 25)
        for prefill in (0, 0, 20, 35, 50)
        for decodes in range(1, 9)
    ]
    return [
        StepRecord(one, cost.seconds(one) * factors[at % len(factors)])
        for at, one in enumerate(rng.sample(drawn, len(drawn)) * 5)
    ]


EMPTY = Live(ARRIVALS, 2.1, [], steps_of(COST), CAPACITY, None)


def fit_of(cost: StepCost, factors: Sequence[float] = (1.0,)) -> Calibration:
    unknown = FitError(1, 0.0, 0.0, 0.0, 0.0)
    return Calibration(cost, unknown, unknown, [(1.0, one) for one in factors])


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
    return replace(EMPTY, seen=seen, steps=steps_of(fit.cost, fit.jitter.factors))


def test_the_simulator_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    live = live_of(fit_of(COST))
    assert judge([[live, live], [live, live]], SEEDS)
    said = capsys.readouterr().out
    assert "simulated against live: mean error 0.0% (0.0% to 0.0%), largest at p99 0.0%" in said
    assert "compared: 60 of 60 requests" in said


def test_time_around_requests_is_found_again() -> None:
    live = live_of(fit_of(COST), late_s=0.020)
    assert learn_around_s([[live]], fit_of(COST), SEEDS) == pytest.approx(0.020, rel=0.05)


def test_no_part_is_simulated_by_steps_of_its_own() -> None:
    replays = [
        [replace(EMPTY, window_s=10.0 * replay + part) for part in (1, 2, 3)] for replay in (1, 2)
    ]
    found = [
        ([live.window_s for live in fold.part], [live.window_s for p in fold.others for live in p])
        for fold in folds(replays)
    ]
    assert found == [
        ([11.0, 21.0], [12.0, 22.0, 13.0, 23.0]),
        ([12.0, 22.0], [11.0, 21.0, 13.0, 23.0]),
        ([13.0, 23.0], [11.0, 21.0, 12.0, 22.0]),
    ]


def test_parts_that_miss_in_opposite_directions_show_by_themselves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the same requests, each part is simulated at the other's speed: the pool is the same."""
    usual, slow = live_of(fit_of(COST)), live_of(fit_of(replace(COST, base=0.03)))
    judge([[usual, slow], [usual, slow]], SEEDS)
    said = capsys.readouterr().out
    assert "simulated against live: mean error 0.0%" in said
    assert float(said.split("each part by itself, at p50 and p95: mean error ")[1][:4]) > 50


def test_a_part_that_the_others_do_not_tell_of_shows(capsys: pytest.CaptureFixture[str]) -> None:
    usual, slow = live_of(fit_of(COST)), live_of(fit_of(replace(COST, base=0.03)))
    parts = [usual, usual, slow]
    assert not judge([parts, parts], SEEDS)
    told = capsys.readouterr()
    assert "Targets" in told.err
    assert "half of the replays against the other half: mean 0.0%, largest at p99 0.0%" in told.out


def test_what_is_slow_in_one_round_is_learned_in_it_too() -> None:
    """A machine that takes three halves as long in every second round, as noisy neighbours do."""
    calm, busy = (live_of(fit_of(COST, [factor])) for factor in (0.8, 1.2))
    learned = fit_step_cost([*calm.steps, *busy.steps])
    only_calm = fit_step_cost(calm.steps)
    live = [seen_run([calm]), seen_run([busy])]
    near, far = (
        summary_of(figures_of(live, made_runs([EMPTY], fit, 0.0, SEEDS)))
        for fit in (learned, only_calm)
    )
    assert near.mean < 0.6 * far.mean


def test_jitter_makes_the_slow_tail_that_a_mean_has_not() -> None:
    """One step in ten takes four times as long."""
    factors = [Random(3).choice((0.8, 0.8, 0.6, 0.7, 4.0)) for _ in range(997)]
    live = [seen_run([live_of(fit_of(COST, factors))])]
    plain, with_jitter = (
        figures_of(live, made_runs([EMPTY], fit_of(COST, each), 0.0, SEEDS))[
            "time per token"
        ].errors()
        for each in ((1.0,), factors)
    )
    assert plain[2] > 0.15
    assert with_jitter[2] < plain[2]


def test_only_answers_that_were_whole_in_all_runs_are_compared() -> None:
    live = live_of(fit_of(COST))
    broken = Seen(scheduled_s=0.0, sent_s=0.0, ended_s=1.0, code="queue_full")
    part = replace(live, seen=[broken, *live.seen[1:]])
    figures = figures_of(
        [seen_run([part]), seen_run([live])], made_runs([live], fit_of(COST), 0.0, SEEDS)
    )
    assert figures["TTFT"].live.shape == (2, 29)
    assert figures["TTFT"].made.shape == (len(SEEDS), 29)


def test_the_operating_point_is_how_busy_the_engine_was() -> None:
    steps = [StepRecord(StepTerms(0, 0.0, 1, 20), 0.010, gap=0.005)] * 70
    live = replace(EMPTY, steps=steps)
    assert live.busy_share == pytest.approx(70 * 0.015 / 2.1)
    assert live.rate_rps == pytest.approx(30 / 2.1)


def test_nothing_to_compare_is_said() -> None:
    broken = Seen(scheduled_s=0.0, sent_s=0.0, ended_s=1.0, code="queue_full")
    live = live_of(fit_of(COST))
    part = replace(live, seen=[broken] * 30)
    with pytest.raises(ValueError, match="no request was answered in full"):
        judge([[live, live], [part, part]], SEEDS)


def test_a_part_is_replayed_once_more_where_its_figures_were_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = replace(EMPTY, refusal="the generator was the bottleneck")
    tries = [late, EMPTY, late, late]
    monkeypatch.setattr(sim_vs_live, "_lived_once", lambda source, model: tries.pop(0))
    source = Source(path=Path("trace"))
    assert sim_vs_live.lived(source, Path("model")) is EMPTY
    with pytest.raises(SystemExit, match="the generator was the bottleneck"):
        sim_vs_live.lived(source, Path("model"))


def test_arrays_are_ordered_by_run_and_request() -> None:
    live = live_of(fit_of(COST))
    figure = figures_of([seen_run([live])], [seen_run([live])])["TTFT"]
    seen = [one.first_token_s for one in live.seen]
    assert np.allclose(figure.live[0], np.array(seen, dtype=float))


def test_requests_of_all_parts_are_compared_with_their_own_simulations() -> None:
    later = replace(EMPTY, arrivals=ARRIVALS[20:])
    slow, fast = live_of(fit_of(replace(COST, base=0.02))), live_of(fit_of(COST))
    seen = seen_run([slow, fast])
    assert seen == [*seen_run([slow]), *seen_run([fast])]
    made = made_runs([EMPTY, later], fit_of(COST), 0.0, SEEDS)
    assert [len(run) for run in made] == [40] * len(SEEDS)
    assert made[0][30:] == made_runs([later], fit_of(COST), 0.0, SEEDS)[0]


def test_no_second_of_the_trace_is_taken_twice() -> None:
    parts = sources(6, 70.0, Scaling(time=2.0, length=16))
    assert [one.until_s - one.from_s for one in parts] == [35.0] * 6
    assert all(one.until_s == other.from_s for one, other in pairwise(parts))


def test_p99_has_eleven_requests_beyond_it() -> None:
    parts = sources(6, 70.0, Scaling(time=2.0, length=16))
    assert sum(len(read(one).arrivals) for one in parts) == 1135
