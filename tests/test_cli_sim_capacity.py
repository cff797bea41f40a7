import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvota.cli import app
from kvota.core.errors import ConfigError
from kvota.traffic.arrival import Arrival
from kvota.traffic.writing import Target, write_traffic

RUN = CliRunner()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "even.csv"
    arrivals = [
        Arrival(at_s=0.1 * at, prompt_tokens=30, output_tokens=8, max_tokens=8) for at in range(20)
    ]
    with path.open("wb") as file:
        write_traffic(arrivals, Target.AZURE, file)
    return path


def test_a_curve_is_printed_and_written(trace: Path, tmp_path: Path) -> None:
    data, page = tmp_path / "curve.json", tmp_path / "curve.html"
    flags = [
        "--factors",
        "1,5000",
        "--pool",
        "2",
        "--goal",
        "0.9",
        "--max-running-requests",
        "2",
        "--ttft-s",
        "0.5",
    ]
    flags += ["--price", "2", "--json", str(data), "--html", str(page), "--max-tokens", "8"]
    result = RUN.invoke(app, ["simulate", "--trace", str(trace), "--capacity", *flags])
    assert result.exit_code == 0, result.output
    assert "whole" in result.stdout
    assert "a pool of 2 sustains" in result.stdout
    points = json.loads(data.read_text())["points"]
    assert [one["factor"] for one in points] == [1.0, 5000.0]
    assert points[0]["num_replicas"] <= 2
    assert points[1]["num_requests"] == 100_000
    assert "<svg" in page.read_text()


def test_one_simulated_node_leaves_its_figures_and_a_page_too(trace: Path, tmp_path: Path) -> None:
    data, page = tmp_path / "run.json", tmp_path / "run.html"
    flags = ["--max-tokens", "8", "--json", str(data), "--html", str(page)]
    result = RUN.invoke(app, ["simulate", "--trace", str(trace), *flags])
    assert result.exit_code == 0, result.output
    assert "goodput" in result.stdout
    found = json.loads(data.read_text())
    assert (found["requests"], found["outcomes"]["completed"]) == (20, 20)
    assert 0 < found["ttft"]["p50"] <= found["ttft"]["p99"]
    assert found["attainment"] == 1.0
    assert page.read_text().count("<svg") == 2
    assert "100.0% of 20 requests were good" in page.read_text()


@pytest.mark.parametrize("factors", ["1,many", "nan", "1,inf"])
def test_factors_that_are_no_numbers_are_told(factors: str, trace: Path) -> None:
    flags = ["simulate", "--trace", str(trace), "--capacity", "--factors", factors]
    assert isinstance(RUN.invoke(app, flags).exception, ConfigError)
