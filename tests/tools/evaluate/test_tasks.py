"""lm_eval is played by a script that writes what lm_eval 0.4.13 writes."""

import json
import sys
from math import sqrt
from pathlib import Path
from statistics import stdev

import pytest

from kvota.tools.evaluate.served import Place
from kvota.tools.evaluate.tasks import (
    TaskOptions,
    compare,
    paired,
    pooled,
    read_samples,
    run_tasks,
    why_skipped,
)
from kvota.tools.server import ServerUnusable

PLAYED = """#!{python}
import json, os, pathlib, sys
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path(args["--output_path"]) / "model"
folder.mkdir(parents=True)
(folder / "called.json").write_text(json.dumps([sys.argv[1:], os.environ["OPENAI_API_KEY"]]))
if "bad-model" in args["--model_args"]:
    sys.exit("ValueError: no such model")
for task in args["--tasks"].split(","):
    samples = [
        {{"doc_id": doc, "filter": "none", "metrics": ["acc", "acc_norm"], "acc": doc % 2}}
        for doc in range(10)
    ]
    lines = "".join(json.dumps(sample) + chr(10) for sample in samples)
    (folder / f"samples_{{task}}_2026-01-01T00-00-00.0.jsonl").write_text(lines)
"""


@pytest.fixture
def played(tmp_path: Path) -> str:
    path = tmp_path / "lm_eval"
    path.write_text(PLAYED.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def write(folder: Path, task: str, right: list[float], metric: str = "acc") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"doc_id": doc, "filter": "none", "metrics": [metric], metric: value})
        for doc, value in enumerate(right)
    ]
    (folder / f"samples_{task}_2026-01-01T00-00-00.000.jsonl").write_text("\n".join(lines))


async def test_it_is_run_as_a_client_with_the_key_in_its_environment(
    played: str, tmp_path: Path
) -> None:
    options = TaskOptions(("one", "two"), 10, tmp_path / "own", played)
    out = tmp_path / "out"
    results = await run_tasks(options, Place("http://127.0.0.1:1", "m", "secret"), out)
    assert results.keys() == {"one", "two"}
    assert results["one"] == ("acc", {str(doc): float(doc % 2) for doc in range(10)})
    arguments, key = json.loads((out / "model" / "called.json").read_text())
    assert key == "secret"
    assert "secret" not in " ".join(arguments)
    assert "base_url=http://127.0.0.1:1/v1/completions" in " ".join(arguments)
    assert arguments[-4:] == ["--limit", "10", "--include_path", str(tmp_path / "own")]


async def test_its_last_words_are_passed_on_when_it_fails(played: str, tmp_path: Path) -> None:
    options = TaskOptions(("one",), command=played)
    with pytest.raises(ServerUnusable, match="ValueError: no such model"):
        await run_tasks(options, Place("http://127.0.0.1:1", "bad-model"), tmp_path / "out")


def test_why_nothing_is_run_is_said() -> None:
    assert why_skipped(TaskOptions()) == "no --tasks were given"
    missing = why_skipped(TaskOptions(("one",), command="lm_eval_that_is_not_there"))
    assert missing is not None
    assert "is not installed" in missing


def test_answers_are_compared_question_by_question(tmp_path: Path) -> None:
    write(tmp_path / "a", "riddles", [1, 1, 0, 1])
    write(tmp_path / "b", "riddles", [1, 0, 0, 1])
    [found] = compare(read_samples(tmp_path / "a"), read_samples(tmp_path / "b"))
    assert (found.baseline, found.candidate) == (0.75, 0.5)
    assert found.drop.mean == 0.25
    assert found.drop.error == pytest.approx((2 - 1 / 6) ** 0.5 / 6)  # b = 1.5, c = 0.5, n = 6


def test_the_same_right_answers_to_few_questions_prove_little(tmp_path: Path) -> None:
    write(tmp_path / "a", "my_riddles", [1, 0, 0, 1], "exact_match")
    results = read_samples(tmp_path / "a")
    [found] = compare(results, results)
    assert (found.task, found.metric) == ("my_riddles", "exact_match")
    assert found.drop.mean == 0
    assert found.drop.error == pytest.approx(1 / 6)


def test_the_error_of_many_questions_is_the_plain_one() -> None:
    differences = [1.0] * 60 + [-1.0] * 40 + [0.0] * 900
    found = paired(differences)
    assert found.mean == pytest.approx(0.02)
    assert found.error == pytest.approx(stdev(differences) / sqrt(1000), rel=0.01)


def test_tasks_are_pooled_by_their_questions(tmp_path: Path) -> None:
    write(tmp_path / "a", "long", [1] * 30)
    write(tmp_path / "a", "short", [1] * 10)
    write(tmp_path / "b", "long", [1] * 30)
    write(tmp_path / "b", "short", [0] * 10)
    whole = pooled(compare(read_samples(tmp_path / "a"), read_samples(tmp_path / "b")))
    assert whole.num_questions == 40
    assert (whole.baseline, whole.candidate, whole.drop.mean) == (1, 0.75, 0.25)


def test_a_run_without_samples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServerUnusable, match="wrote no samples"):
        read_samples(tmp_path)
