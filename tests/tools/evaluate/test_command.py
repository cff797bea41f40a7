"""`kvota evaluate` from flags to files, against whole nodes on real ports."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvota.cli import app
from kvota.core.errors import ConfigError
from kvota.tools.evaluate.result import Served, require_good
from tests.support.live_node import LiveNode, live_node
from tests.support.stage import says

BODY = "The lines of this text are read by both servers, word after word.\n" * 24


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[LiveNode, LiveNode]]:
    """The same model twice, but that the second always says something of its own."""
    with live_node() as first, live_node() as second:
        second.stage.play = says("something of its own")
        yield first, second


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "own.txt"
    path.write_text(BODY)
    return path


def run(nodes: tuple[LiveNode, LiveNode], text: Path, *flags: str) -> Result:
    places = [f"tiny@http://127.0.0.1:{node.port}" for node in nodes]
    out = ("--out", str(text.parent / "evaluate"), "--text", str(text), "--max-tokens", "4")
    return CliRunner().invoke(app, ["evaluate", *places, *out, *flags])


def test_a_good_version_ends_with_zero_and_a_file_that_proves_it(
    nodes: tuple[LiveNode, LiveNode], text: Path
) -> None:
    answer = run(nodes, text)
    assert answer.exit_code == 0, answer.output
    assert "Good: the candidate is as good as the baseline" in answer.output
    assert "Tasks skipped: no --tasks were given." in answer.output
    result = require_good(
        text.parent / "evaluate.json", candidate=Served("v2", "tiny"), now_s=time.time()
    )
    assert result.baseline.url.endswith(str(nodes[0].port))
    page = (text.parent / "evaluate.html").read_text()
    assert "KL(baseline ‖ candidate) is a lower bound" in page
    assert "<svg" in page


def test_a_version_that_answers_otherwise_ends_with_one(
    nodes: tuple[LiveNode, LiveNode], text: Path
) -> None:
    answer = run(nodes, text, "--min-agreement", "0.9")
    assert answer.exit_code == 1, answer.output
    assert "Worse:" in answer.output
    found = json.loads((text.parent / "evaluate.json").read_text())
    assert found["verdict"] == "worse"
    assert found["baseline_with_itself"]["whole"]["mean"] == 1


def test_what_cannot_be_judged_ends_with_two(nodes: tuple[LiveNode, LiveNode], text: Path) -> None:
    answer = run(nodes, text, "--tasks", "riddles", "--lm-eval", "lm_eval_that_is_not_there")
    assert answer.exit_code == 2, answer.output
    assert "lm_eval_that_is_not_there is not installed" in answer.output


def test_the_key_is_never_shown(nodes: tuple[LiveNode, LiveNode], text: Path) -> None:
    answer = run(nodes, text, "--api-key", "sk-very-secret")
    files = [path.read_text() for path in text.parent.glob("evaluate.*")]
    assert len(files) == 2
    assert all("sk-very-secret" not in shown for shown in (answer.output, *files))


def test_one_version_is_not_compared_with_itself() -> None:
    answer = CliRunner().invoke(app, ["evaluate", "m", "m"])
    assert isinstance(answer.exception, ConfigError)
