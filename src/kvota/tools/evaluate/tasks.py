"""Task accuracy by lm-evaluation-harness, run as a client of both servers where it is installed.

It is a program of its own (`pip install "lm-eval[api]"`), started once for each side with the same
questions. Its samples tell for every question whether it was answered rightly, so the drop is
measured over the same questions, question by question. Standard tasks download their questions.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from kvota.tools.evaluate.estimate import Estimate
from kvota.tools.evaluate.served import Place
from kvota.tools.server import ServerUnusable

METRICS = ("acc", "exact_match")  # preferred; else the task's first
COMMAND = "lm_eval"
Results = Mapping[str, tuple[str, Mapping[str, float]]]  # task: metric, value by question


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """`tasks` empty: none are run. `limit`: only so many questions of each."""

    tasks: Sequence[str] = ()
    limit: int | None = None
    include: Path | None = None  # a folder with tasks of one's own
    command: str = COMMAND


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Shares of right answers; `drop` is the mean of the paired differences, positive is worse."""

    task: str
    metric: str
    num_questions: int
    baseline: float
    candidate: float
    drop: Estimate


def why_skipped(options: TaskOptions) -> str | None:
    """Why no tasks are run; None: they are."""
    if not options.tasks:
        return "no --tasks were given"
    if shutil.which(options.command) is None:
        return f'{options.command} is not installed (pip install "lm-eval[api]")'
    return None


async def run_tasks(options: TaskOptions, place: Place, folder: Path) -> Results:
    """All tasks against one server. Raises ServerUnusable with the program's last words."""
    assert place.model is not None, "the model was found before"
    process = await asyncio.create_subprocess_exec(
        *_command(options, place, folder),
        env={**os.environ, "OPENAI_API_KEY": place.api_key or "none", "TQDM_DISABLE": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode != 0:
        words = output.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise ServerUnusable(f"{options.command} failed at {place.url} and said: {words[-1]}")
    return read_samples(folder)


def _command(options: TaskOptions, place: Place, folder: Path) -> list[str]:
    server = f"model={place.model},base_url={place.url}/v1/completions"
    command = [
        options.command, "--model", "local-completions",
        "--model_args", f"{server},num_concurrent=4,tokenized_requests=True",
        "--tasks", ",".join(options.tasks), "--output_path", str(folder), "--log_samples",
    ]  # fmt: skip
    if options.limit is not None:
        command += ["--limit", str(options.limit)]
    if options.include is not None:
        command += ["--include_path", str(options.include)]
    return command


def read_samples(folder: Path) -> Results:
    """What lm_eval wrote: samples_TASK_DATE.jsonl, one question a line. Raises ServerUnusable."""
    found: dict[str, tuple[str, Mapping[str, float]]] = {}
    for path in sorted(folder.rglob("samples_*.jsonl")):
        task = path.stem.removeprefix("samples_").rsplit("_", 1)[0]
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if lines:
            metric = _metric(lines[0])
            own = [one for one in lines if one.get("filter") == lines[0].get("filter")]
            found[task] = (metric, {str(one["doc_id"]): float(one[metric]) for one in own})
    if not found:
        raise ServerUnusable(f"{COMMAND} ended well and wrote no samples to {folder}.")
    return found


def _metric(sample: Mapping[str, Any]) -> str:
    known = [str(one) for one in sample.get("metrics", METRICS)]
    return next((one for one in METRICS if one in known and one in sample), known[0])


def compare(baseline: Results, candidate: Results) -> list[TaskScore]:
    """Task by task, over the questions that both sides answered."""
    return [
        _score(task, metric, values, candidate[task][1])
        for task, (metric, values) in baseline.items()
        if task in candidate and values.keys() & candidate[task][1].keys()
    ]


def _score(
    task: str, metric: str, left: Mapping[str, float], right: Mapping[str, float]
) -> TaskScore:
    shared = sorted(left.keys() & right.keys())
    num = len(shared)
    before, after = (sum(side[one] for one in shared) / num for side in (left, right))
    drop = paired([left[one] - right[one] for one in shared])
    return TaskScore(task, metric, num, before, after, drop)


def paired(differences: Sequence[float]) -> Estimate:
    """The mean difference of answers that are right (1) or wrong (0), and its error.

    Few questions without a single difference do not prove that there is none, so the error is that
    of half a question more in each of the four cells right/wrong × right/wrong (Agresti and Min,
    Statistics in Medicine 24, 2005).
    """
    num, total = len(differences), sum(differences)
    squares = sum(one * one for one in differences) + 1
    error = sqrt(squares - total * total / (num + 2)) / (num + 2)
    return Estimate(total / num, error, num)


def pooled(scores: Sequence[TaskScore]) -> TaskScore:
    """All questions of all tasks as one task. The error of a sum of independent parts."""
    num = sum(one.num_questions for one in scores)
    shares = [one.num_questions / num for one in scores]
    parts = list(zip(shares, scores, strict=True))
    error = sum((share * one.drop.error) ** 2 for share, one in parts) ** 0.5
    mean = sum(share * one.drop.mean for share, one in parts)
    return TaskScore(
        "all tasks",
        ", ".join(dict.fromkeys(one.metric for one in scores)),
        num,
        sum(share * one.baseline for share, one in parts),
        sum(share * one.candidate for share, one in parts),
        Estimate(mean, error, num),
    )
