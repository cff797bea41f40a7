"""The speed tables of README, measured in one run on one machine.

    make bench                                   everything, about half an hour
    python -m bench.speed --quick                every row once with little work: does it run?
    python -m bench.speed --rows speed,quality   only these

kvota is measured over HTTP with client, server and engine on the same cores; openvino-genai in
its own process without HTTP, and behind a thin HTTP server, which is like for like. Every client
sends one request after another. Rounds alternate between all and the table shows medians of the
rounds' ratios, because a shared machine changes its speed by more than they differ.
"""

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.bookkeeping import bookkeeping
from bench.genai_process import genai_over_http, genai_process
from bench.latency import lone_request, repeated_prefix
from bench.loaded import load
from bench.machine import machine, sentence, usable_threads
from bench.quality import quality
from bench.server_process import UNGUESSED, RunningServer, kvota_server
from bench.throughput import Contestants, Rates, Workload, batching, compare
from bench.waste import waste
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, resolve
from kvota.model.source import open_source
from kvota.model.weights import WeightFormat

ROWS = ("speed", "batching", "latency", "prefix", "bookkeeping", "waste", "quality")
RESULTS = Path("bench-results")
KV_MEMORY = "1GiB"  # far more than 64 short sequences need; the same on every machine


@dataclass(slots=True)
class Bench:
    """What is measured, on what, and what came out so far."""

    model: Path
    vocab_size: int
    threads: int
    weights: str
    genai_python: Path
    rounds: int
    concurrency: tuple[int, ...]
    workload: Workload
    is_quick: bool
    console: Console
    results: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def server(self, *, guesses: bool = True) -> Iterator[RunningServer]:
        flags = ["--weights", self.weights, "--kv-memory", KV_MEMORY]
        if not guesses:
            flags += UNGUESSED
        with kvota_server(self.model, self.threads, flags) as server:
            yield server

    def keep(self, row: str, *found: Any) -> None:
        """Print each finding's line, and keep its numbers for the results file."""
        self.results[row] = [dataclasses.asdict(finding) for finding in found]
        for finding in found:
            self.console.print(f"- {finding.line()}", highlight=False, soft_wrap=True)


def speed(bench: Bench) -> None:
    with (
        bench.server() as server,
        bench.server(guesses=False) as unguessed,
        genai_process(bench.genai_python, bench.model, bench.threads) as genai,
        genai_over_http(bench.genai_python, bench.model, bench.threads) as over_http,
        _progress(bench) as tick,
    ):
        contestants = Contestants(server, unguessed, genai, over_http)
        compare(contestants, bench.workload.short(), 1, 1)  # warms all up
        rates = [
            compare(contestants, bench.workload, number, bench.rounds, tick)
            for number in bench.concurrency
        ]
    bench.results["speed"] = [
        dataclasses.asdict(r)
        | {
            "ratio": r.ratio,
            "ratio_unguessed": r.ratio_unguessed,
            "ratio_over_http": r.ratio_over_http,
        }
        for r in rates
    ]
    bench.console.print(table(rates), highlight=False, soft_wrap=True)


def table(rates: list[Rates]) -> str:
    """A Markdown table, one line per number of clients."""
    lines = [
        "| at once | kvota tokens/s | without speculation | openvino-genai in process | "
        "openvino-genai over HTTP | ratio to in process | without speculation | "
        "ratio to over HTTP | kvota TTFT | per token |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in rates:
        rounds = (r.kvota, r.unguessed, r.genai, r.genai_over_http)
        per_s = " | ".join(f"{statistics.median(values):.0f}" for values in rounds)
        ratios = f"{r.ratio:.2f} | {r.ratio_unguessed:.2f} | {r.ratio_over_http:.2f}"
        lines.append(
            f"| {r.concurrency} | {per_s} | {ratios} | "
            f"{r.first_token_ms:.0f} ms | {r.per_token_ms:.0f} ms |"
        )
    return "\n".join(lines)


def batching_row(bench: Bench) -> None:
    """What batching gains is told without speculation, which gains most for one request alone."""
    num_requests = 4 if bench.is_quick else 32
    found = []
    for guesses in (False, True):
        with bench.server(guesses=guesses) as server:
            found.append(batching(server, bench.workload, num_requests, guesses=guesses))
    bench.keep("batching", *found)


def latency_row(bench: Bench) -> None:
    _, executor = load(bench.model, bench.threads, weights=bench.weights)
    with bench.server() as server:
        rounds = 3 if bench.is_quick else 21
        bench.keep("latency", lone_request(server, executor, bench.vocab_size, rounds))


def prefix_row(bench: Bench) -> None:
    with bench.server() as server:
        rounds = 1 if bench.is_quick else 7
        bench.keep("prefix", repeated_prefix(server, bench.vocab_size, rounds))


def bookkeeping_row(bench: Bench) -> None:
    steps = 20 if bench.is_quick else 200
    cases = ((64, 0), (256, 0), (64, 10_000), (256, 10_000))
    bench.keep("bookkeeping", *(bookkeeping(*case, num_steps=steps) for case in cases))


def waste_row(bench: Bench) -> None:
    bench.keep("waste", waste(limit=100 if bench.is_quick else None))


def quality_row(bench: Bench) -> None:
    limit = 100 if bench.is_quick else None
    bench.keep("quality", quality(bench.model, bench.threads, bench.weights, limit))


MEASURE: dict[str, Callable[[Bench], None]] = {
    "speed": speed,
    "batching": batching_row,
    "latency": latency_row,
    "prefix": prefix_row,
    "bookkeeping": bookkeeping_row,
    "waste": waste_row,
    "quality": quality_row,
}


@contextmanager
def _progress(bench: Bench) -> Iterator[Callable[[], None]]:
    """A bar over all measurements of the speed table; calling what it yields moves it on."""
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=bench.console, transient=True) as progress:
        measures = bench.rounds * len(dataclasses.fields(Contestants))
        task = progress.add_task("", total=measures * len(bench.concurrency))
        yield lambda: progress.advance(task)


def main() -> None:
    bench, rows = _from_arguments()
    bench.console.print(f"{bench.model.name} on {sentence()}\n", highlight=False, soft_wrap=True)
    for row in rows:
        MEASURE[row](bench)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / time.strftime("speed-%Y%m%d-%H%M%S.json")
    content = {"machine": machine(), "model": bench.model.name, "weights": bench.weights}
    path.write_text(json.dumps(content | {"rows": bench.results}, indent=1) + "\n")
    bench.console.print(f"\nAll numbers: {path}", highlight=False)


def _from_arguments() -> tuple[Bench, list[str]]:
    parser = argparse.ArgumentParser(description="Measure kvota's speed on this machine.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a known name or a GGUF file")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {','.join(ROWS)}")
    parser.add_argument("--threads", type=int, default=usable_threads())
    parser.add_argument("--weights", choices=list(WeightFormat), default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", default="1,4,16,32,64")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per request")
    parser.add_argument("--genai-python", type=Path, default=Path(".venv-bench/bin/python"))
    parser.add_argument("--quick", action="store_true", help="one round of 16 tokens, 1 and 4")
    given = parser.parse_args()
    rows = given.rows.split(",")
    if unknown := set(rows) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    model = resolve(given.model, cache_dir_of(os.environ))
    vocab_size = open_source(model).architecture.vocab_size
    concurrency = (1, 4) if given.quick else tuple(map(int, given.concurrency.split(",")))
    bench = Bench(
        model=model,
        vocab_size=vocab_size,
        threads=given.threads,
        weights=given.weights,
        genai_python=given.genai_python,
        rounds=1 if given.quick else given.rounds,
        concurrency=concurrency,
        workload=(
            Workload(vocab_size, 16, requests_wanted=0)
            if given.quick
            else Workload(vocab_size, given.tokens)
        ),
        is_quick=given.quick,
        console=Console(),
    )
    return bench, rows


if __name__ == "__main__":
    main()
