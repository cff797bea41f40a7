"""How fast the simulator is, and how much memory it takes.

    python -m bench.sim_speed [--requests 1000000] [--workers 2]

One hour of Azure's conversation trace on one node, with leaps and without (a part of it, for they
give the same answer); then so many requests of the same kind over a fleet behind the router, with
a desk, an engine and a KV cache for each replica. A million takes half an hour on two cores.
CPU times are of all processes together, so other work on the machine shows less in them.
"""

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from bench.machine import sentence, usable_threads
from kvota.cli_sim import EXAMPLE_COST
from kvota.desk.settings import DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.crew import Crew
from kvota.sim.desk_door import desk_door
from kvota.sim.fleet import Fleet, FleetResult
from kvota.sim.growth import grown
from kvota.sim.records import Targets, WorldResult
from kvota.sim.shard import NodesPlan
from kvota.sim.simulate import Simulation, judged_of, world_settings
from kvota.sim.world import World, WorldSettings
from kvota.tools.report.terminal import progress_bar
from kvota.traffic.arrival import Arrival

SIMULATION = Simulation(
    trace=Path("bench/traces/azure_conv_2023.csv.gz"),
    kv_tokens=40_000,
    cost=EXAMPLE_COST,
    limits=SchedulerLimits(max_num_batched_tokens=2048),
    desk=DeskSettings(),
)
TARGETS = Targets(ttft_s=10.0, tpot_s=0.2)
LOAD_PER_REPLICA = 0.7  # of the recorded one
NUM_COMPARED = 2_000  # requests with and without leaps


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by the clock, and of all cores."""

    wall_s: float
    cpu_s: float

    def line(self, num: int) -> str:
        return (
            f"{self.wall_s:,.1f} s ({self.cpu_s:,.1f} s of CPU, {1000 * self.cpu_s / num:.2f} ms a "
            f"request, {num / self.cpu_s:,.0f} requests/s and core)"
        )


class Meter:
    """Time since it was made. Child processes count once they have ended."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.monotonic(), _cpu_s()

    def spent(self) -> Spent:
        return Spent(time.monotonic() - self._wall_s, _cpu_s() - self._cpu_s)


def _cpu_s() -> float:
    each = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in each)


def peak_mib() -> tuple[float, float]:
    """Of this process, and of the largest child."""
    own, child = (
        resource.getrusage(who).ru_maxrss / 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own, child


def on_one_node(arrivals: Sequence[Arrival], settings: WorldSettings) -> WorldResult:
    return World(arrivals, settings, seed=1, door=desk_door(DeskSettings())).run()


def on_a_fleet(
    arrivals: Sequence[Arrival], num_replicas: int, settings: WorldSettings, workers: int
) -> FleetResult:
    plan = NodesPlan(settings=settings, door=desk_door(DeskSettings()), seed=1, targets=TARGETS)
    with progress_bar() as bar, Crew(workers) if workers > 1 else nullcontext() as crew:
        task = bar.add_task(f"{num_replicas} replicas", total=len(arrivals))
        fleet = Fleet(num_replicas, plan, crew=crew)
        return fleet.run(arrivals, on_arrived=lambda num: bar.update(task, completed=num))


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of the simulator.")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=usable_threads())
    given = parser.parse_args()
    print(sentence())
    _, hour = judged_of(SIMULATION)
    settings = world_settings(SIMULATION)
    compare(hour[:NUM_COMPARED], settings)
    meter = Meter()
    on_one_node(hour, settings)
    print(f"an hour, {len(hour):,} requests on one node: {meter.spent().line(len(hour))}")
    serve_fleet(hour, given.requests, settings, given.workers)


def compare(arrivals: Sequence[Arrival], settings: WorldSettings) -> None:
    """With leaps and without: the same result in less time."""
    keys = []
    for leaps in (True, False):
        meter = Meter()
        result = on_one_node(arrivals, replace(settings, leaps=leaps))
        keys.append(result.key)
        name = "with" if leaps else "without"
        print(f"{len(arrivals):,} requests {name} leaps: {meter.spent().line(len(arrivals))}")
    if keys[0] != keys[1]:
        sys.exit("Leaps change the result.")


def serve_fleet(
    hour: Sequence[Arrival], num_requests: int, settings: WorldSettings, workers: int
) -> None:
    factor = num_requests / len(hour)
    num_replicas = ceil(factor / LOAD_PER_REPLICA)
    meter = Meter()
    arrivals = grown(hour, factor, seed=1)
    result = on_a_fleet(arrivals, num_replicas, settings, workers)
    own, child = peak_mib()
    print(
        f"{len(arrivals):,} requests on {num_replicas} replicas, {workers} workers: "
        f"{meter.spent().line(len(arrivals))}; {own:,.0f} MiB, and {child:,.0f} MiB a worker; "
        f"{result.attainment:.1%} good, {result.num_refused:,} refused"
    )


if __name__ == "__main__":
    main()
