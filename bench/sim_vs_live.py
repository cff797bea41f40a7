"""How far the simulator is from the server it simulates, on traffic that it has not seen.

    python -m bench.sim_vs_live [--parts 6] [--replays 3] [--seconds 70]
    python -m bench.sim_vs_live --parts 2 --replays 2 --seconds 20          does it run?

    1st replay   part 1 · part 2 · part 3 · …        each part: a server of its own,
    2nd replay   part 1 · part 2 · part 3 · …        what clients saw, and what its steps took
    3rd replay   part 1 · part 2 · part 3 · …

    part 1 is simulated by the steps of parts 2, 3, …   ┐   all parts pooled, against what
    part 2 is simulated by the steps of parts 1, 3, …   ├─▶ clients saw, all replays pooled
    …                                                   ┘

No part is simulated from steps of its own, of any replay: this is cross-validation, one part left
out at a time (Stone 1974). What is learned are step costs, their jitter, and the time around a
request. It is learned at all times at which it is judged, and that is the point of it: a shared
machine is faster and slower by a quarter for minutes, so what is learned at other times tells of
another machine.

The traffic is Azure's conversation trace, shortened and stretched for a small model on a CPU. As
every part has a server of its own, no prompt is found in a prefix cache. The simulator knows the
node's KV memory from its metrics page, and is run with several seeds for what is left to chance.

p99 is worth what lies beyond it. The six parts have 1,135 requests, so eleven are beyond it,
of several bursts, each in every replay.

The server runs without speculation: the simulator knows how many tokens a request says, not which,
and cannot tell how often they would be guessed.

The operating point is well below saturation, and is printed: near it, waits grow with every
percent that a step is off, and the comparison would be of that.

Takes about 25 minutes; run it while the machine has nothing else to do.
"""

import argparse
import asyncio
import os
import sys
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import numpy as np

from bench.machine import sentence, usable_threads
from bench.server_process import UNGUESSED, kvota_server
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
    FitError,
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
NUM_AROUND_SEEDS = 4  # of those; a median over all other parts needs few
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
        flags = ["--record-steps", str(steps), *UNGUESSED]
        with kvota_server(model, usable_threads(), flags) as server:
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


@dataclass(frozen=True, slots=True)
class Fold:
    """A part and all others, from which it is simulated; of each part a Live for every replay."""

    part: Sequence[Live]
    others: Sequence[Sequence[Live]]


def folds(replays: Sequence[Sequence[Live]]) -> Iterator[Fold]:
    """For every part in turn. Each of `replays` holds the same parts, at least two."""
    parts = list(zip(*replays, strict=True))
    for number, part in enumerate(parts):
        yield Fold(part, [*parts[:number], *parts[number + 1 :]])


def learned(fold: Fold, seeds: Sequence[int] = SEEDS) -> tuple[Calibration, float]:
    """Step costs, and seconds around a request. Raises ValueError when there are too few steps."""
    fit = fit_step_cost([step for part in fold.others for live in part for step in live.steps])
    return fit, learn_around_s(fold.others, fit, seeds[:NUM_AROUND_SEEDS])


def learn_around_s(
    others: Sequence[Sequence[Live]], fit: Calibration, seeds: Sequence[int]
) -> float:
    """Seconds that no turn of the engine holds: HTTP and the client, by the medians of the TTFT."""
    seen = _ttfts(map(seen_run, others))
    made = _ttfts(made_runs([part[0] for part in others], fit, 0.0, seeds))
    return max(median(seen) - median(made), 0.0) if seen and made else 0.0


def _ttfts(runs: Iterable[Run]) -> list[float]:
    return [one.ttft_s for run in runs for one in run if one is not None]


def judge(replays: Sequence[Sequence[Live]], seeds: Sequence[int] = SEEDS) -> bool:
    """Compare, print, and say whether the clients' figures are near enough.

    Each of `replays` holds the same parts. Raises ValueError when too few steps were recorded.
    """
    made: list[list[Latency | None]] = [[] for _ in seeds]
    by_part: list[Mapping[str, Figure]] = []
    unseen: list[FitError] = []
    for number, fold in enumerate(folds(replays), 1):
        fit, around_s = learned(fold, seeds)
        print(
            f"part {number}, from {len(fit.turns)} steps of the others: {fit.cost}, "
            f"{1000 * around_s:.2f} ms around a request",
            flush=True,
        )
        of_part = made_runs(fold.part[:1], fit, around_s, seeds)
        for run, more in zip(made, of_part, strict=True):
            run.extend(more)
        by_part.append(figures_of([seen_run([live]) for live in fold.part], of_part))
        unseen.append(error_of(fit.cost, [step for live in fold.part for step in live.steps]))
    figures = figures_of([*map(seen_run, replays)], made)
    _print_compared(figures, replays, len(seeds))
    is_near = _judged(figures)
    _print_beside(by_part, unseen)
    return is_near


def _judged(figures: Mapping[str, Figure]) -> bool:
    own, own_by_figure = of_itself(figures)
    _print_table(figures, own_by_figure)
    found = summary_of(figures)
    mean, at_p99 = interval(figures, np.random.default_rng(1))
    print(
        f"\nsimulated against live: mean error {found.mean:.1%} ({_range(mean)}), largest at p99 "
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


def _print_beside(by_part: Sequence[Mapping[str, Figure]], unseen: Sequence[FitError]) -> None:
    """What the pool hides: parts that miss in opposite directions, and single steps."""
    errors = [
        fmean(error for figure in figures.values() for error in figure.errors()[:2])
        for figures in by_part
        if figures["TTFT"].live.size
    ]
    print(
        f"each part by itself, at p50 and p95: mean error {fmean(errors):.1%} "
        f"({_range((min(errors), max(errors)))})"
    )
    print(
        f"each step by itself: mean error {fmean(one.mean for one in unseen):.1%}, p99 "
        f"{fmean(one.p99 for one in unseen):.1%} (means over the parts)"
    )


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
    parser.add_argument("--parts", type=int, default=6, help="of the trace")
    parser.add_argument("--replays", type=int, default=3, help="of every part")
    parser.add_argument("--seconds", type=float, default=70.0, help="of a part, live")
    parser.add_argument("--time-scale", type=float, default=2.0)
    parser.add_argument("--length-scale", type=int, default=16)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    given = parser.parse_args()
    if given.parts < 2:
        parser.error("--parts: at least 2, as each is simulated by what the others tell")
    if given.replays < 2:
        parser.error("--replays: at least 2, or there is nothing to compare the machine with")
    model = resolve(given.model, cache_dir_of(os.environ))
    scaling = Scaling(time=given.time_scale, length=given.length_scale)
    print(f"{model.name} on {sentence()}; time x{scaling.time:g}, lengths /{scaling.length}")
    parts = sources(given.parts, given.seconds, scaling)
    replays = [
        [
            _told(f"replay {number}, part {at}", lived(part, model))
            for at, part in enumerate(parts, 1)
        ]
        for number in range(1, given.replays + 1)
    ]
    busy = fmean(live.busy_share for lives in replays for live in lives)
    rate_rps = fmean(live.rate_rps for live in replays[0])
    print(f"operating point: {rate_rps:.2f} requests/s, the engine busy {busy:.0%}")
    if busy > BUSY_MAX:
        print("That is near saturation; take a larger --time-scale.", file=sys.stderr)
    try:
        sys.exit(0 if judge(replays) else EXIT_FAR)
    except ValueError as error:
        sys.exit(f"No comparison: {error}")


def sources(num_parts: int, seconds: float, scaling: Scaling) -> list[Source]:
    """The parts of the trace, one after the other, each so many seconds long when replayed."""
    length_s = seconds / scaling.time
    begins_s = (BEGIN_S + number * length_s for number in range(num_parts))
    return [
        Source(path=TRACE, scaling=scaling, from_s=begin_s, until_s=begin_s + length_s)
        for begin_s in begins_s
    ]


if __name__ == "__main__":
    main()
