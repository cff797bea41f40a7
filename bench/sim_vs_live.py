"""How far the simulator is from the server it simulates, on traffic that neither has seen.

    python -m bench.sim_vs_live [--parts 3] [--replays 2] [--seconds 140] [--learn-seconds 30]
    python -m bench.sim_vs_live --parts 1 --seconds 20 --learn-seconds 15      does it run?

    1st replay   other traffic · part 1 · other traffic · part 2 · other traffic · part 3
    2nd replay   other traffic · part 1 · other traffic · part 2 · other traffic · part 3
                       │            │
                       │            └─▶ what clients saw, all replays pooled ──┐
                       └─▶ step costs, their jitter, time around a request     ├──▶ errors
                                        └──▶ the same parts, simulated ────────┘

The traffic is Azure's conversation trace, shortened and stretched for a small model on a CPU. A
shared machine is not the same at all times; so steps are learned before every judged part, from
traffic of its own, and the judged parts are replayed and pooled. Every part has a server of its
own, so no prompt is found in a prefix cache. Steps of judged parts are not learned from. The
simulator knows the node's KV memory from its metrics page, and is run with several seeds for what
is left to chance.

p99 is worth what lies beyond it. The three parts have 1,031 requests, so ten are beyond it, of
several bursts, each in both replays; one part of 365 had four, of three bursts.

The operating point is well below saturation, and is printed: near it, waits grow with every
percent that a step is off, and the comparison would be of that.

Takes about 20 minutes; run it while the machine has nothing else to do.
"""

import argparse
import asyncio
import os
import sys
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import numpy as np

from bench.machine import sentence, usable_threads
from bench.server_process import kvota_server
from bench.sim_vs_live_figures import (
    CONFIDENCE,
    Figure,
    Latency,
    Run,
    figures_of,
    interval,
    of_itself,
    percentiles,
    summary_of,
)
from kvota.core.errors import Outcome
from kvota.core.plan import Capacity
from kvota.desk.settings import DeskSettings
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, resolve
from kvota.sim.calibration import (
    MEAN_ERROR_MAX,
    P99_ERROR_MAX,
    Calibration,
    error_of,
    fit_step_cost,
    turns_s,
)
from kvota.sim.desk_door import desk_door
from kvota.sim.node import NodeSettings
from kvota.sim.records import RequestRecord
from kvota.sim.world import World, WorldSettings
from kvota.telemetry.steps import StepRecord, read_records
from kvota.tools.load.asked import Seen
from kvota.tools.load.measure import Slo
from kvota.tools.load.target import find_target
from kvota.tools.replay.plan import Source, plan_for, read
from kvota.tools.replay.run import replay
from kvota.tools.top.samples import Samples
from kvota.traffic.arrival import Arrival, Scaling

TRACE = Path("bench/traces/azure_conv_2023.csv.gz")
ANY = Slo(ttft_s=inf, tpot_s=inf)  # what counts here is when, not whether it is good
BEGIN_S = 120.0  # of the trace, which begins slowly
SEEDS = range(1, 17)
BUSY_MAX = 0.8  # of the engine's time; above, it is near saturation
EXIT_FAR = 1


@dataclass(frozen=True, slots=True)
class Live:
    """One part as it went."""

    arrivals: list[Arrival]
    window_s: float
    seen: list[Seen]
    steps: list[StepRecord]
    capacity: Capacity
    refusal: str | None

    @property
    def rate_rps(self) -> float:
        return len(self.arrivals) / self.window_s

    @property
    def busy_share(self) -> float:
        """Of the time until the last answer ended: a step was taken, or the next one prepared."""
        last_s = max((one.scheduled_s + one.ended_s for one in self.seen), default=0.0)
        return float(turns_s(self.steps).sum()) / max(self.window_s, last_s)


def lived(source: Source, model: Path) -> Live:
    """The part, once more where its figures were refused. Ends the program if they are again."""
    live = _lived_once(source, model)
    if live.refusal is not None:
        print(f"(replayed again: {live.refusal})", flush=True)
        live = _lived_once(source, model)
    if live.refusal is not None:
        sys.exit(f"No comparison: {live.refusal}")
    return live


def _lived_once(source: Source, model: Path) -> Live:
    """Start a server, replay the part, stop it, and read what its steps took."""
    recorded = read(source)
    with TemporaryDirectory() as folder:
        steps = Path(folder) / "steps.jsonl"
        with kvota_server(model, usable_threads(), ["--record-steps", str(steps)]) as server:
            url = f"http://127.0.0.1:{server.port}"
            seen, refusal = asyncio.run(_replayed(url, source))
            capacity = _capacity(url)
        with steps.open() as file:
            records = list(read_records(file))
    return Live(recorded.arrivals, recorded.window_s, seen, records, capacity, refusal)


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


def simulated(live: Live, fit: Calibration, seed: int) -> list[RequestRecord]:
    """The same arrivals at the same node, under a manual clock; by request."""
    desk = DeskSettings()
    node = NodeSettings(capacity=live.capacity, cost=fit.cost, jitter=fit.jitter)
    settings = WorldSettings(
        node=node,
        queue_timeout_s=desk.queue_timeout_s,
        request_timeout_s=desk.request_timeout_s,
        proof_every=500,
        leaps=True,
    )
    result = World(live.arrivals, settings, seed=seed, door=desk_door(desk)).run()
    return sorted(result.records, key=lambda record: record.number)


def made_runs(
    parts: Sequence[Live], fit: Calibration, around_s: float, seeds: Sequence[int] = SEEDS
) -> list[Run]:
    """One for each seed, of the requests of all parts."""
    return [
        [_latency_of(one, around_s) for live in parts for one in simulated(live, fit, seed)]
        for seed in seeds
    ]


def seen_run(parts: Sequence[Live]) -> Run:
    """What clients saw, in all parts."""
    return [
        Latency(one.first_token_s, one.token_s[-1], one.output_tokens)
        if one.is_whole and one.first_token_s is not None
        else None
        for live in parts
        for one in live.seen
    ]


def _latency_of(record: RequestRecord, around_s: float) -> Latency | None:
    if record.outcome is not Outcome.COMPLETED or record.ttft_s is None:
        return None
    last_s = record.token_at_s[-1] - record.arrival.at_s
    return Latency(record.ttft_s + around_s, last_s + around_s, record.output_tokens)


def learn_around_s(known: Sequence[Live], fit: Calibration, seeds: Sequence[int] = SEEDS) -> float:
    """Seconds that no turn of the engine holds: HTTP and the client, by the medians of the TTFT."""
    seen = _ttfts([seen_run(known)])
    made = _ttfts(made_runs(known, fit, 0.0, seeds))
    return max(median(seen) - median(made), 0.0)


def _ttfts(runs: Iterable[Run]) -> list[float]:
    return [one.ttft_s for run in runs for one in run if one is not None]


def judge(
    known: Sequence[Live], replays: Sequence[Sequence[Live]], seeds: Sequence[int] = SEEDS
) -> bool:
    """Compare, print, and say whether the clients' figures are near enough.

    Each of `replays` holds the same parts. Raises ValueError when too few steps were recorded.
    """
    fit = fit_step_cost([step for live in known for step in live.steps])
    around_s = learn_around_s(known, fit, seeds)
    print(
        f"learned from {len(fit.jitter.factors)} steps of {len(known)} parts: {fit.cost}, "
        f"{1000 * around_s:.2f} ms around a request"
    )
    figures = figures_of([*map(seen_run, replays)], made_runs(replays[0], fit, around_s, seeds))
    _print_compared(figures, replays, len(seeds))
    own, own_by_figure = of_itself(figures)
    _print_table(figures, own_by_figure)
    found = summary_of(figures)
    mean, at_p99 = interval(figures, np.random.default_rng(1))
    unseen = error_of(
        fit.cost, [step for parts in replays for live in parts for step in live.steps]
    )
    print(f"\nsteps of the judged parts, one by one: {unseen.line()}")
    print(
        f"simulated against live: mean error {found.mean:.1%} ({_range(mean)}), largest at p99 "
        f"{found.at_p99:.1%} ({_range(at_p99)}); {CONFIDENCE:.0%} bootstrap intervals"
    )
    print(
        f"half of the replays against the other half: mean {own.mean:.1%}, largest at p99 "
        f"{own.at_p99:.1%}"
    )
    is_near = found.mean < MEAN_ERROR_MAX and found.at_p99 < P99_ERROR_MAX
    if not is_near:
        print("Targets: mean below 9 %, p99 below 15 %.", file=sys.stderr)
    return is_near


def _print_compared(
    figures: Mapping[str, Figure], replays: Sequence[Sequence[Live]], num_seeds: int
) -> None:
    """Raises ValueError when there is nothing to compare."""
    num = figures["TTFT"].live.shape[1]
    print(
        f"compared: {num} of {sum(len(live.arrivals) for live in replays[0])} requests, which were "
        f"answered in full in all {len(replays)} replays and {num_seeds} simulations; "
        f"{num // 100} are beyond p99"
    )
    if not num:
        raise ValueError("no request was answered in full in all of them")


def _print_table(figures: Mapping[str, Figure], own: Mapping[str, list[float]]) -> None:
    print("\n| ms, live / simulated | p50 | p95 | p99 | simulated off | halves of live apart |")
    print("|---|---|---|---|---|---|")
    for name, figure in figures.items():
        pairs = zip(percentiles(figure.live), percentiles(figure.made), strict=True)
        cells = " | ".join(f"{1000 * one:.1f} / {1000 * other:.1f}" for one, other in pairs)
        print(f"| {name} | {cells} | {_shares(figure.errors())} | {_shares(own[name])} |")


def _shares(errors: Sequence[float]) -> str:
    return ", ".join(f"{error:.1%}" for error in errors)


def _range(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:.1%} to {bounds[1]:.1%}"


def _told(name: str, live: Live) -> Live:
    """The operating point of a part, printed."""
    print(
        f"{name}: {len(live.arrivals)} requests, {live.rate_rps:.2f}/s, the engine busy "
        f"{live.busy_share:.0%} of the time, {len(live.steps)} steps",
        flush=True,
    )
    return live


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the simulator with a live server.")
    parser.add_argument("--parts", type=int, default=3, help="of the trace, to be judged")
    parser.add_argument("--replays", type=int, default=2, help="of every part")
    parser.add_argument("--seconds", type=float, default=140.0, help="of a judged part, live")
    parser.add_argument("--learn-seconds", type=float, default=30.0, help="of what is before it")
    parser.add_argument("--time-scale", type=float, default=2.0)
    parser.add_argument("--length-scale", type=int, default=16)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    given = parser.parse_args()
    if given.parts < 1:
        parser.error("--parts: at least 1")
    if given.replays < 2:
        parser.error("--replays: at least 2, or there is nothing to compare the machine with")
    model = resolve(given.model, cache_dir_of(os.environ))
    scaling = Scaling(time=given.time_scale, length=given.length_scale)
    print(f"{model.name} on {sentence()}; time x{scaling.time:g}, lengths /{scaling.length}")
    known, replays = _lived_all(given, model, scaling)
    busy = fmean(live.busy_share for parts in replays for live in parts)
    rate_rps = fmean(live.rate_rps for live in replays[0])
    print(f"operating point: {rate_rps:.2f} requests/s, the engine busy {busy:.0%}")
    if busy > BUSY_MAX:
        print("That is near saturation; take a larger --time-scale.", file=sys.stderr)
    try:
        sys.exit(0 if judge(known, replays) else EXIT_FAR)
    except ValueError as error:
        sys.exit(f"No comparison: {error}")


def _lived_all(
    given: argparse.Namespace, model: Path, scaling: Scaling
) -> tuple[list[Live], list[list[Live]]]:
    """What is learned from, none of it twice; and the judged parts, by replay."""
    known: list[Live] = []
    replays: list[list[Live]] = []
    other, judged = sources(given, scaling)
    for replay_number in range(given.replays):
        replays.append([])
        for part_number, part in enumerate(judged):
            name = f"replay {replay_number + 1}, part {part_number + 1}"
            before = other[len(known)]
            known.append(_told(f"{name}, learned before it", lived(before, model)))
            replays[-1].append(_told(name, lived(part, model)))
    return known, replays


def sources(given: argparse.Namespace, scaling: Scaling) -> tuple[list[Source], list[Source]]:
    """Of the trace: what is learned from, one for each replay of each part; the judged parts."""
    learn_s, judged_s = given.learn_seconds / scaling.time, given.seconds / scaling.time
    num_known = given.replays * given.parts
    judged_from_s = BEGIN_S + num_known * learn_s

    def part(begin_s: float, length_s: float) -> Source:
        return Source(path=TRACE, scaling=scaling, from_s=begin_s, until_s=begin_s + length_s)

    other = [part(BEGIN_S + number * learn_s, learn_s) for number in range(num_known)]
    judged = [part(judged_from_s + number * judged_s, judged_s) for number in range(given.parts)]
    return other, judged


if __name__ == "__main__":
    main()
