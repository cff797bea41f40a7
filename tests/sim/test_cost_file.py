import json
from pathlib import Path

import pytest

from kvota.core.errors import ConfigError
from kvota.sim.calibration import fit_step_cost
from kvota.sim.cost_file import STEPS_MAX, read_cost, write_cost
from kvota.telemetry.steps import StepRecord, StepTerms


def recorded(num: int) -> list[StepRecord]:
    return [
        StepRecord(StepTerms(0, 0.0, 1 + at % 8, 100 * (at % 5)), 0.01 * (1 + at % 3))
        for at in range(num)
    ]


def test_what_was_calibrated_is_read_again(tmp_path: Path) -> None:
    fit, file = fit_step_cost(recorded(100)), tmp_path / "cost.json"
    write_cost(fit, file)
    cost, jitter = read_cost(file)
    assert cost == fit.cost
    assert jitter is not None
    assert list(jitter.factors) == pytest.approx(list(fit.jitter.factors), rel=1e-3)


def test_a_long_recording_leaves_its_latest_steps(tmp_path: Path) -> None:
    fit, file = fit_step_cost(recorded(STEPS_MAX + 50)), tmp_path / "cost.json"
    write_cost(fit, file)
    _, jitter = read_cost(file)
    assert jitter is not None
    assert jitter.factors[0] == pytest.approx(fit.jitter.factors[50], rel=1e-3)
    assert len(jitter.factors) == STEPS_MAX


def test_a_cost_without_jitter_is_one(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text('{"base": 0.02}')
    cost, jitter = read_cost(file)
    assert (cost.base, cost.per_decode, jitter) == (0.02, 0.0, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "missing required field `base`"),
        ('{"base": 1, "jitter": {"expected": [1.0], "taken": []}}', "has 1 steps expected and 0"),
        ('{"base": 1, "jitter": {"expected": [0], "taken": [1]}}', "> 0"),
        ('{"base": 1, "jitter": {"expected": [], "taken": []}}', "has 0 steps expected"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is no step cost") as error:
        read_cost(file)
    assert said in error.value.message


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cost(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_cost(fit_step_cost(recorded(100)), tmp_path / "none" / "cost.json")


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    write_cost(fit_step_cost(recorded(100)), file)
    assert len(json.loads(file.read_text())["jitter"]["taken"]) == 100
