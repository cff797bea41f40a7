import json
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvota.cli import app
from kvota.core.errors import ConfigError
from kvota.sim.checkers import OneEnding
from kvota.sim.records import RequestRecord
from kvota.traffic.arrival import Arrival
from kvota.traffic.writing import Target, write_traffic

RUN = CliRunner()
FAULTS = (
    "slow_step@1:2.5", "executor_error@2:0.5", "abort_storm@5:0.5", "clock_jump@6:3",
    "slow_step@999:1",
)  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "even.csv"
    arrivals = [
        Arrival(at_s=0.05 * at, prompt_tokens=30, output_tokens=60, max_tokens=60)
        for at in range(200)
    ]
    with path.open("wb") as file:
        write_traffic(arrivals, Target.AZURE, file)
    return path


def simulated(trace: Path, *flags: str) -> Result:
    return RUN.invoke(app, ["simulate", "--trace", str(trace), *flags])


def of_each(faults: tuple[str, ...]) -> list[str]:
    return [flag for fault in faults for flag in ("--fault", fault)]


def test_faults_of_every_kind_strike_when_they_are_told_to_and_are_reported(trace: Path) -> None:
    shown = simulated(trace, *of_each(FAULTS), "--json", str(trace.with_suffix(".json")))
    assert shown.exit_code == 0, shown.output
    lines = [line for line in shown.output.splitlines() if line.startswith("fault ")]
    for said in (
        "slow_step@1:2.5: at 3.", "a step took 2.5 s longer", "executor_error@2:0.5: at ",
        "abort_storm@5:0.5: at ", "open requests cancelled", "clock_jump@6:3: at ",
        "stood still for 3 s", "slow_step@999:1: no step came after it",
    ):  # fmt: skip
        assert any(said in line for line in lines), said
    figures = json.loads(trace.with_suffix(".json").read_text())
    assert [f"fault         {line}" for line in figures["faults"]] == lines
    assert figures["outcomes"]["engine_error"] >= 1
    assert figures["outcomes"]["client_closed"] >= 1
    assert sum(figures["outcomes"].values()) == 200


def test_a_run_with_faults_is_replayed_exactly_by_its_seed(trace: Path) -> None:
    flags = [*of_each(FAULTS), "--seed", "7"]
    assert simulated(trace, *flags).output == simulated(trace, *flags).output
    others = {simulated(trace, *of_each(FAULTS), "--seed", str(seed)).output for seed in range(3)}
    assert len(others) == 3, "the seed decides whom a storm cancels"


class Broken(OneEnding):
    """Finds that the 30th request to end had ended before."""

    def ended(self, record: RequestRecord, now: float) -> None:
        super().ended(record, now)
        if len(self._ended) == 30:
            raise AssertionError(f"#{record.number} ended twice, again at {now:.3f} s")


def test_what_breaks_says_the_command_that_breaks_in_the_same_place(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvota.sim.world.OneEnding", Broken)
    flags = ["simulate", "--trace", str(trace), "--fault", "abort_storm@5:0.5"]
    monkeypatch.setattr(sys, "argv", ["/some/where/kvota", *flags])
    first = RUN.invoke(app, flags)
    assert isinstance(first.exception, AssertionError)
    told, _, command = first.stderr.partition("\nsee it again with: ")
    assert told.startswith("It broke: #")
    again = shlex.split(command)
    assert again == ["kvota", *flags, "--seed", "1"]
    monkeypatch.setattr(sys, "argv", ["kvota", *again[1:]])
    second = RUN.invoke(app, again[1:])
    assert second.stderr == first.stderr


def test_faults_are_not_for_a_fleet(trace: Path) -> None:
    shown = simulated(trace, "--capacity", "--fault", "slow_step@1:2")
    assert isinstance(shown.exception, ConfigError)
    assert "--capacity" in shown.exception.message
