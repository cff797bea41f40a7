"""How far the simulator is from the server it simulates, on traffic that neither has seen.

    python -m bench.sim_vs_live [--seconds 50] [--time-scale 2] [--length-scale 16]

    part 1   replayed live          ─▶ step costs, and what passes between steps and around them
    part 2   replayed live          ─▶ what clients saw  ┐
             the same, simulated    ─▶ what they would   ┴─▶ errors

The traffic is Azure's conversation trace, shortened and stretched for a small model on a CPU; part
2 follows part 1. Steps are recorded by the server in both parts, and those of part 2 are only
judged. The simulator knows the node's KV memory from its metrics page. Takes about three minutes;
run it while the machine has nothing else to do.
"""

import argparse
import asyncio
import os
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.machine import sentence, usable_threads
from bench.server_process import kvota_server
from kvota.core.plan import Capacity
from kvota.desk.settings import DeskSettings
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, resolve
from kvota.sim.calibration import (
    MEAN_ERROR_MAX,
    P99_ERROR_MAX,
    FitError,
    error_of,
    fit_step_cost,
)
from kvota.sim.desk_door import desk_door
from kvota.sim.executor import StepCost
from kvota.sim.node import NodeSettings
from kvota.sim.records import RequestRecord
from kvota.sim.world import World, WorldSettings
from kvota.telemetry.steps import StepRecord, read_records
from kvota.tools.load.asked import Seen
from kvota.tools.load.measure import Slo
from kvota.tools.load.percentiles import percentile
from kvota.tools.load.target import find_target
from kvota.tools.replay.plan import Source, plan_for, read
from kvota.tools.replay.run import replay
from kvota.tools.top.samples import Samples
from kvota.traffic.arrival import Arrival, Scaling

TRACE = Path("bench/traces/azure_conv_2023.csv.gz")
ANY = Slo(ttft_s=inf, tpot_s=inf)  # what counts here is when, not whether it is good
BEGIN_S = 120.0  # of the trace, which begins slowly
SHARES = (0.5, 0.95, 0.99)
EXIT_FAR = 1


@dataclass(frozen=True, slots=True)
class Live:
    """One part as it went."""

    arrivals: list[Arrival]
    seen: list[Seen]
    steps: list[StepRecord]
    capacity: Capacity
    refusal: str | None


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds that no recorded step holds, learned from part 1."""

    between_steps: float
    around_request: float  # HTTP, tokenizing, the client


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one request, live or simulated. Seconds from when it was due."""

    ttft_s: float
    total_s: float
    num_tokens: int

    @property
    def per_token_s(self) -> float | None:
        return (self.total_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


def lived(source: Source, model: Path) -> Live:
    """Start a server, replay the part, stop it, and read what its steps took."""
    recorded = read(source)
    with TemporaryDirectory() as folder:
        steps = Path(folder) / "steps.jsonl"
        with kvota_server(model, usable_threads(), ["--record-steps", str(steps)]) as server:
            url = f"http://127.0.0.1:{server.port}"
            replayed = asyncio.run(_replayed(url, source))
            capacity = _capacity(url)
        with steps.open() as file:
            records = list(read_records(file))
    return Live(recorded.arrivals, replayed[0], records, capacity, replayed[1])


async def _replayed(url: str, source: Source) -> tuple[list[Seen], str | None]:
    target = await find_target(url, None)
    plan = plan_for(read(source), target)
    keys: dict[str, str | None] = {one.lane: None for one in plan.asked}
    result = await replay(plan, target, keys, ANY)
    return result.seen, result.refusal


def _capacity(url: str) -> Capacity:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        samples = Samples.parse(page.read().decode())
    num_blocks, block_size = (
        samples.label("vllm:cache_config_info", label) for label in ("num_gpu_blocks", "block_size")
    )
    if num_blocks is None or block_size is None:
        sys.exit(f"{url}/metrics does not say how much KV memory there is")
    return Capacity(int(num_blocks), int(block_size), bytes_per_block=0)


def simulated(live: Live, cost: StepCost) -> list[RequestRecord]:
    """The same arrivals at the same node, under a manual clock."""
    desk = DeskSettings()
    settings = WorldSettings(
        node=NodeSettings(capacity=live.capacity, cost=cost),
        queue_timeout_s=desk.queue_timeout_s,
        request_timeout_s=desk.request_timeout_s,
        proof_every=500,
    )
    result = World(live.arrivals, settings, seed=1, door=desk_door(desk)).run()
    return sorted(result.records, key=lambda record: record.number)


def learn_overheads(live: Live, cost: StepCost) -> Overheads:
    """What the simulator of part 1 lacks: first for each token, then for each request."""
    without = list(paired(live.seen, simulated(live, cost)))
    per_token = [
        seen.per_token_s - made.per_token_s
        for seen, made in without
        if seen.per_token_s is not None and made.per_token_s is not None
    ]
    between = max(median(per_token), 0.0)
    again = paired(live.seen, simulated(live, with_overhead(cost, between)))
    around = max(median(seen.ttft_s - made.ttft_s for seen, made in again), 0.0)
    return Overheads(between, around)


def with_overhead(cost: StepCost, seconds: float) -> StepCost:
    return replace(cost, base=cost.base + seconds)


def paired(
    seen: Sequence[Seen], made: Sequence[RequestRecord]
) -> Iterable[tuple[Latency, Latency]]:
    """Requests that were answered in full in both worlds."""
    for one, record in zip(seen, made, strict=True):
        is_made = record.ttft_s is not None and record.ended_at_s is not None
        if one.is_whole and one.first_token_s is not None and is_made:
            assert record.ttft_s is not None
            last_s = record.token_at_s[-1] - record.arrival.at_s
            yield (
                Latency(one.first_token_s, one.token_s[-1], one.output_tokens),
                Latency(record.ttft_s, last_s, record.output_tokens),
            )


def errors_at(live: Sequence[float], made: Sequence[float]) -> list[float]:
    """|simulated / live − 1| at p50, p95 and p99 of the two distributions."""
    true, guess = sorted(live), sorted(made)
    return [abs(percentile(guess, at) / percentile(true, at) - 1) for at in SHARES]


def compare(live: Live, made: Sequence[RequestRecord], around_s: float) -> dict[str, list[float]]:
    """Errors of each figure at each share. Prints the figures."""
    pairs = list(paired(live.seen, made))
    figures = {
        "TTFT": [(seen.ttft_s, one.ttft_s + around_s) for seen, one in pairs],
        "whole answer": [(seen.total_s, one.total_s + around_s) for seen, one in pairs],
        "time per token": [
            (seen.per_token_s, one.per_token_s)
            for seen, one in pairs
            if seen.per_token_s is not None and one.per_token_s is not None
        ],
    }
    found = {}
    print(f"\n{len(pairs)} of {len(live.seen)} requests were answered in full in both worlds.\n")
    print("| ms | p50 live / simulated | p95 | p99 | errors |\n|---|---|---|---|---|")
    for name, values in figures.items():
        true, guess = ([pair[at] for pair in values] for at in (0, 1))
        found[name] = errors_at(true, guess)
        print(_row(name, true, guess, found[name]))
    return found


def _row(name: str, true: list[float], guess: list[float], errors: list[float]) -> str:
    cells = [
        f"{1000 * percentile(sorted(true), at):.1f} / {1000 * percentile(sorted(guess), at):.1f}"
        for at in SHARES
    ]
    told = ", ".join(f"{error:.1%}" for error in errors)
    return f"| {name} | {' | '.join(cells)} | {told} |"


def is_near(steps: FitError, errors: dict[str, list[float]]) -> bool:
    """The targets: steps and clients' figures with a mean below 9 % and p99 below 15 %."""
    everything = [error for each in errors.values() for error in each]
    mean = sum(everything) / len(everything)
    at_p99 = max(each[-1] for each in errors.values())
    print(f"\nsteps of part 2, one by one: {steps.line()}")
    print(f"clients' figures: mean error {mean:.1%}, largest at p99 {at_p99:.1%}")
    is_good = mean < MEAN_ERROR_MAX and at_p99 < P99_ERROR_MAX
    return is_good and steps.mean < MEAN_ERROR_MAX and steps.p99 < P99_ERROR_MAX


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the simulator with a live server.")
    parser.add_argument("--seconds", type=float, default=50.0, help="of each part, live")
    parser.add_argument("--time-scale", type=float, default=2.0)
    parser.add_argument("--length-scale", type=int, default=16)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    given = parser.parse_args()
    model = resolve(given.model, cache_dir_of(os.environ))
    scaling = Scaling(time=given.time_scale, length=given.length_scale)
    part_s = given.seconds / given.time_scale
    parts = [
        Source(path=TRACE, scaling=scaling, from_s=begin_s, until_s=begin_s + part_s)
        for begin_s in (BEGIN_S, BEGIN_S + part_s)
    ]
    print(f"{model.name} on {sentence()}; time x{scaling.time:g}, lengths /{scaling.length}")
    known, judged = (lived(part, model) for part in parts)
    for live in (known, judged):
        if live.refusal is not None:
            sys.exit(f"No comparison: {live.refusal}")
    try:
        cost = fit_step_cost(known.steps).cost
    except ValueError as error:
        sys.exit(f"No comparison: {error}")
    overheads = learn_overheads(known, cost)
    print(
        f"learned from {len(known.seen)} requests and {len(known.steps)} steps: {cost}, "
        f"{1000 * overheads.between_steps:.2f} ms between steps, "
        f"{1000 * overheads.around_request:.2f} ms around a request"
    )
    made = simulated(judged, with_overhead(cost, overheads.between_steps))
    errors = compare(judged, made, overheads.around_request)
    if not is_near(error_of(cost, judged.steps), errors):
        print("Targets: mean below 9 %, p99 below 15 %.", file=sys.stderr)
        sys.exit(EXIT_FAR)


if __name__ == "__main__":
    main()
