"""The arithmetic of the comparison; the live part needs a quiet machine."""

import pytest

from bench.sim_vs_live import (
    Latency,
    Live,
    compare,
    errors_at,
    is_near,
    learn_overheads,
    paired,
    simulated,
    with_overhead,
)
from kvota.core.plan import Capacity
from kvota.sim.calibration import FitError
from kvota.sim.executor import StepCost
from kvota.sim.records import RequestRecord
from kvota.tools.load.asked import Seen
from kvota.traffic.arrival import Arrival

COST = StepCost(base=0.01, per_decode=0.001, per_prefill_token=1e-4)
CAPACITY = Capacity(500, 16, bytes_per_block=0)
ARRIVALS = [
    Arrival(at_s=0.07 * at, prompt_tokens=20 + at, output_tokens=6, max_tokens=6)
    for at in range(30)
]


def as_seen(record: RequestRecord, late_s: float) -> Seen:
    """What a client would have seen, had it lived in the simulated world."""
    due_s = record.arrival.at_s
    times = [at - due_s + late_s for at in record.token_at_s]
    return Seen(
        scheduled_s=due_s, sent_s=0.0, ended_s=times[-1], first_token_s=times[0], token_s=times,
        status=200, output_tokens=record.output_tokens,
    )  # fmt: skip


def live_of(cost: StepCost, late_s: float = 0.0) -> Live:
    """A part whose truth is the simulator itself at another cost."""
    empty = Live(ARRIVALS, [], [], CAPACITY, None)
    seen = [as_seen(record, late_s) for record in simulated(empty, cost)]
    return Live(ARRIVALS, seen, [], CAPACITY, None)


def test_the_simulator_agrees_with_itself() -> None:
    live = live_of(COST)
    errors = compare(live, simulated(live, COST), around_s=0.0)
    assert all(error == pytest.approx(0, abs=1e-9) for each in errors.values() for error in each)


def test_time_between_steps_and_around_requests_is_found_again() -> None:
    live = live_of(with_overhead(COST, 0.004), late_s=0.020)
    found = learn_overheads(live, COST)
    assert found.between_steps == pytest.approx(0.004, rel=0.25)
    assert found.around_request == pytest.approx(0.020, rel=0.25)


def test_a_wrong_cost_shows() -> None:
    live = live_of(COST)
    slow = simulated(live, StepCost(base=0.02, per_decode=0.001, per_prefill_token=1e-4))
    errors = compare(live, slow, around_s=0.0)
    assert min(errors["time per token"]) > 0.3
    assert not is_near(FitError(9, 0.01, 0.01, 0.01, 0.01), errors)


def test_only_whole_answers_are_compared() -> None:
    live = live_of(COST)
    broken = Seen(scheduled_s=0.0, sent_s=0.0, ended_s=1.0, code="queue_full")
    pairs = list(paired([broken, *live.seen[1:]], simulated(live, COST)))
    assert len(pairs) == len(ARRIVALS) - 1


def test_errors_are_shares_of_the_live_figure() -> None:
    assert errors_at([1.0] * 100, [1.1] * 100) == pytest.approx([0.1] * 3)
    assert errors_at([2.0], [1.0]) == [0.5] * 3


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    assert Latency(0.1, 0.1, 1).per_token_s is None
    assert Latency(0.1, 0.5, 5).per_token_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("steps_p99", "figure", "expected"),
    [(0.1, 0.05, True), (0.2, 0.05, False), (0.1, 0.16, False)],
)
def test_the_targets_are_for_steps_and_for_clients(
    steps_p99: float, figure: float, expected: bool
) -> None:
    steps = FitError(100, 0.05, 0.04, 0.09, steps_p99)
    assert is_near(steps, {"TTFT": [0.01, 0.02, figure]}) is expected
