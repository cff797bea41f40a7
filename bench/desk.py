"""The desk against other ways to admit, on real traffic, in simulation: `make bench-desk`.

python -m bench.desk [policies] [overload] [isolation] [fairness] [decision] [--scale S] …
python -m bench.desk [live-overload] [live-isolation] [live-refusals] [live-aborts] [--scale S]

Everything but the model is real: engine, scheduler, KV cache, desk. Tables are Markdown. Each
target is printed with what was measured and whether it was met.
"""

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product

from bench import desk_fairness, desk_isolation, desk_live, desk_overload, desk_policies
from bench.desk_decision import DECISION_US_MAX, decision_us
from bench.desk_policies import (
    COSTS,
    KNOWING,
    LOADS,
    OURS,
    SATURATED,
    WORKLOADS,
    Capacities,
    Job,
    Workload,
)
from bench.desk_rows import RETURNS_MAX, Returns, Row, returns, row

GOODPUT_OVER_RESERVE = {"conversation": 1.35, "reasoning": 2.5}
KV_BOUND_GAIN = 1.15  # twice the memory serves at least so many times as much


@dataclass(frozen=True, slots=True)
class Bench:
    pool: ProcessPoolExecutor
    scale: float  # of the number of requests in each run
    loads: Sequence[float]  # of capacity
    stretches: Sequence[int]  # of the recorded traffic, for judged rows


def target(is_met: bool, text: str) -> None:
    print(f"- {'met' if is_met else 'MISSED'}: {text}", flush=True)


def policies(bench: Bench) -> None:
    for workload in WORKLOADS.values():
        capacities = _capacities(bench, workload)
        _compare(bench, workload, capacities)
        _come_back(bench, workload, capacities)


def _capacities(bench: Bench, workload: Workload) -> dict[tuple[int, str], float]:
    """Requests per second by tokens of KV and cost; also with twice the most of them."""
    sizes = (*workload.kv_tokens, 2 * workload.kv_tokens[-1])
    keys = list(product(sizes, COSTS))
    found = bench.pool.map(partial(_capacity, workload), keys)
    return dict(zip(keys, found, strict=True))


def _capacity(workload: Workload, key: tuple[int, str]) -> float:
    return desk_policies.capacity_rps(workload, *key)


def _compare(bench: Bench, workload: Workload, capacities: Capacities) -> None:
    num_requests = int(bench.scale * workload.num_requests)
    rows: list[Row] = []
    jobs = desk_policies.jobs(workload, num_requests, capacities, bench.loads, bench.stretches)
    print(f"\n## {workload.name}\n\nGood: TTFT ≤ {workload.targets.ttft_s:g} s and TPOT ≤ "
          f"{workload.targets.tpot_s:g} s. {SATURATED} × capacity: means of "
          f"{len(bench.stretches)} runs of {num_requests} requests, each on another stretch of the "
          f"traffic; else one run of half as many. The first quarter of the time is not judged. "
          f"Lengths divided by {workload.length}.")  # fmt: skip
    for key, group in groupby(bench.pool.map(row, jobs), key=_table_of):
        kv_tokens, cost, load = key
        capacity, gain = capacities[kv_tokens, cost], _gain(capacities, kv_tokens, cost)
        print(f"\n{kv_tokens:,} tokens of KV, {cost} recomputation, {load:g} × capacity "
              f"({capacity:.2f} requests/s; with twice the KV {gain:.2f} × that)\n\n"
              f"{Row.HEADER}")  # fmt: skip
        for one in group:
            print(one.line(), flush=True)
            rows.append(one)
    print()
    _judge_policies(workload, rows, capacities)


def _table_of(one: Row) -> tuple[int, str, float]:
    return one.job.kv_tokens, one.job.cost, one.job.load


def _gain(capacities: Capacities, kv_tokens: int, cost: str) -> float:
    return capacities[2 * kv_tokens, cost] / capacities[kv_tokens, cost]


def _judge_policies(workload: Workload, rows: Iterable[Row], capacities: Capacities) -> None:
    """Saturated and KV-bound: at the highest load, where more memory would serve more."""
    kept = [one for one in rows if one.job.load == SATURATED]
    for key, group in groupby(kept, key=_table_of):
        kv_tokens, cost, _ = key
        gain, where = _gain(capacities, kv_tokens, cost), f"{kv_tokens:,} tokens, {cost}"
        if gain < KV_BOUND_GAIN:
            print(f"- not judged: {where}: not KV-bound, twice the KV gives {gain:.2f} ×")
            continue
        _judge_saturated(workload, where, {one.job.policy: one for one in group}, cost)


def _judge_saturated(workload: Workload, where: str, found: dict[str, Row], cost: str) -> None:
    ours, reserve, knowing = found[OURS], found["reserve"], found[KNOWING]
    others = [
        one for name, one in found.items() if not name.startswith("forecast") and name != KNOWING
    ]
    best = max(others, key=lambda one: one.goodput_rps)
    wanted = GOODPUT_OVER_RESERVE[workload.name]
    ratio = _times(ours, reserve)
    target(
        ratio >= wanted,
        f"{where}: goodput {ratio:.2f} × reserve (at least {wanted}; who knows all "
        f"lengths: {_times(knowing, reserve):.2f}, best other: {_times(best, reserve):.2f})",
    )
    against = ours.goodput_rps / best.goodput_rps
    least = 0.97 if cost == "cheap" else 1.0
    target(
        against >= least,
        f"{where}: goodput {against:.3f} × the best other, {best.job.policy} (at least {least})",
    )
    target(ours.preempted <= 0.015, f"{where}: {ours.preempted:.2%} preempted (at most 1.5 %)")
    if workload.name == "conversation":
        target(ours.kv_used >= 0.9, f"{where}: {ours.kv_used:.0%} of KV used (at least 90 %)")


def _times(one: Row, other: Row) -> float:
    return one.goodput_rps / other.goodput_rps if other.goodput_rps else float("inf")


def _come_back(bench: Bench, workload: Workload, capacities: Capacities) -> None:
    """Tight KV, saturated, and every refused client obeys Retry-After."""
    kv_tokens = workload.kv_tokens[0]
    jobs = [
        Job(
            workload=workload.name, policy=OURS, kv_tokens=kv_tokens, load=SATURATED, cost=cost,
            num_requests=int(bench.scale * workload.num_requests),
            capacity_rps=capacities[kv_tokens, cost], returns_max=RETURNS_MAX,
        )
        for cost in COSTS
    ]  # fmt: skip
    print(f"\nClients who come back after Retry-After, up to {RETURNS_MAX} times; {OURS}, "
          f"{SATURATED} × capacity\n\n{Returns.HEADER}")  # fmt: skip
    for one in bench.pool.map(returns, jobs):
        print(one.line(), flush=True)


def overload(bench: Bench) -> None:
    setups = desk_overload.SETUPS
    knees = list(bench.pool.map(desk_overload.knee_rps, setups))
    print("\n## Overload: the team mix, simulated on the cost of SmolLM2-135M on two cores\n")
    for setup, knee in zip(setups, knees, strict=True):
        print(f"- knee of “{setup.name}”: {knee:.2f} requests/s")
    print(f"\n{desk_overload.HEADER}")
    for setup, knee in zip(setups, knees, strict=True):
        run = partial(desk_overload.point, setup, knee=knee)
        points = list(bench.pool.map(run, desk_overload.FACTORS))
        for point in points:
            print(point.line(), flush=True)
        holds = desk_overload.holds_plateau(points)
        if setup.desk is not None:
            print(f"\n{setup.name}: goodput at 2× and 5× is{'' if holds else ' NOT'} at least 0.9 "
                  "of the knee's\n")  # fmt: skip


def isolation(bench: Bench) -> None:
    print("\n## Isolation, simulated on the cost of SmolLM2-135M on two cores\n")
    for line in desk_isolation.isolation(max(1, round(bench.scale * desk_isolation.NUM_SEEDS))):
        print(line, flush=True)


def fairness(bench: Bench) -> None:
    flood = bench.pool.submit(desk_fairness.two_tenants)
    batch = bench.pool.submit(desk_fairness.batch_share)
    print("\n## Fairness: one tenant floods ten times its share; batch under a flood\n")
    found = flood.result()
    target(
        found.gap_max <= found.bound,
        f"service of two waiting tenants differs by at most {found.gap_max:.0f} weighted tokens "
        f"(VTC bound {found.bound:.0f}); TTFT p95 of the quiet one {found.quiet_ttft_p95_s:.1f} s, "
        f"without a desk {found.quiet_ttft_p95_without_desk_s:.1f} s",
    )
    share, floor = batch.result(), desk_fairness.FLOOR
    target(share >= 0.95 * floor, f"batch gets {share:.1%} of the output (floor {floor:.0%})")


def decision(bench: Bench) -> None:
    print("\n## One grant decision with 256 running\n")
    found = decision_us()
    target(found < DECISION_US_MAX, f"{found:.0f} µs (at most {DECISION_US_MAX:.0f})")


def live(row: str, bench: Bench) -> None:
    desk_live.measure(row, bench.scale, target)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "policies": policies, "overload": overload, "isolation": isolation, "fairness": fairness,
    "decision": decision,
    **{row: partial(live, row) for row in desk_live.ROWS},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="The desk, simulated: tables in Markdown.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the requests in each run")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--stretches", type=int, default=desk_policies.STRETCHES, metavar="N",
                        help="of the traffic, for judged rows")  # fmt: skip
    asked = parser.parse_args()
    unknown = set(asked.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; known: {', '.join(SECTIONS)}")
    stretches = range(1, asked.stretches + 1)
    with ProcessPoolExecutor(asked.workers) as pool:
        for name in asked.sections or SECTIONS:
            SECTIONS[name](Bench(pool, asked.scale, sorted(asked.loads), stretches))


if __name__ == "__main__":
    main()
