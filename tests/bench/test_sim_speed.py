"""The measuring itself; what it measures is for a quiet machine."""

import pytest

from bench.sim_speed import SIMULATION, Spent, compare, serve_fleet
from kvota.sim.simulate import world_settings
from kvota.traffic.arrival import Arrival

HOUR = [
    Arrival(at_s=0.5 * at, prompt_tokens=50, output_tokens=8, max_tokens=20) for at in range(40)
]


def test_a_line_says_what_a_request_costs() -> None:
    line = Spent(wall_s=30.0, cpu_s=50.0).line(10_000)
    assert line == "30.0 s (50.0 s of CPU, 5.00 ms a request, 200 requests/s and core)"


def test_both_ways_are_timed_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    compare(HOUR, world_settings(SIMULATION))
    with_leaps, without = capsys.readouterr().out.splitlines()
    assert with_leaps.startswith("40 requests with leaps: ")
    assert without.startswith("40 requests without leaps: ")


def test_a_fleet_is_as_large_as_its_load(capsys: pytest.CaptureFixture[str]) -> None:
    serve_fleet(HOUR, 80, world_settings(SIMULATION), workers=1)
    told = capsys.readouterr().out
    assert told.startswith("80 requests on 3 replicas, 1 workers: ")
    assert "100.0% good, 0 refused" in told
