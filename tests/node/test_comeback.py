"""Nobody is told a constant: what a drain has left and what a start took are measured."""

import subprocess
import sys

import pytest

from kvota.core.clock import ManualClock
from kvota.core.errors import Refusal
from kvota.node.comeback import Comeback
from kvota.node.ports import RunnerState

LOAD_S, DRAIN_S = 7.0, 20.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def comeback(clock: ManualClock) -> Comeback:
    return Comeback(clock, load_s=LOAD_S, drain_timeout_s=DRAIN_S)


def test_a_drain_has_to_end_and_the_next_process_to_load(
    comeback: Comeback, clock: ManualClock
) -> None:
    clock.advance(1000.0)
    comeback.drain_begins()
    told = []
    for passed_s in (0.0, 15.0, 5.0, 100.0):
        clock.advance(passed_s)
        told.append(comeback.refusal(RunnerState.DRAINING).retry_after_s)
    assert told == [27.0, 12.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("state", "said"), [(RunnerState.STARTING, "starting"), (RunnerState.DEAD, "ended")]
)
def test_an_engine_that_does_not_run_has_to_load(
    comeback: Comeback, state: RunnerState, said: str
) -> None:
    refusal = comeback.refusal(state)
    assert (refusal.reason, refusal.retry_after_s) == (Refusal.ENGINE_RESTARTING, LOAD_S)
    assert said in refusal.message


def test_the_age_of_a_process_counts_its_interpreter_and_imports() -> None:
    code = (
        "import time; from kvota.node.comeback import process_age_s as age;"
        "first = age(); time.sleep(0.2); print(first, age())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    first, second = map(float, out.split())
    assert first > 0.01
    assert second - first >= 0.19
