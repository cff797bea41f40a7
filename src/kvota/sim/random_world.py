"""Small worlds, each drawn whole from one seed: machine, limits, traffic, faults.

A world that breaks an invariant is replayed, exactly, by

    python -m kvota.sim.random_world SEED
"""

import sys
from dataclasses import replace
from random import Random

from kvota.core.plan import Capacity
from kvota.core.request import Band
from kvota.desk.settings import Admission, DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.desk_door import desk_door
from kvota.sim.executor import StepCost
from kvota.sim.faults import draw_faults
from kvota.sim.node import NodeSettings
from kvota.sim.records import WorldResult
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival

NUM_ARRIVALS_MAX = 40


class WorldBroken(AssertionError):
    """An invariant does not hold in a seeded world; the message says how to see it again."""


def run_random_world(seed: int) -> WorldResult:
    """Raises WorldBroken when an invariant breaks."""
    try:
        return draw_world(seed).run()
    except AssertionError as broken:
        raise WorldBroken(
            f"{broken}\nsee it again with: python -m kvota.sim.random_world {seed}"
        ) from broken


def draw_world(seed: int, **fields: object) -> World:
    """`fields` of WorldSettings are replaced after all has been drawn."""
    rng = Random(f"random world {seed}")
    block_size = rng.choice((1, 4, 16, 32))
    capacity = Capacity(rng.randint(6, 48), block_size, bytes_per_block=0)
    limits = _limits(rng)
    duration_s = rng.uniform(0.3, 6.0)
    node = NodeSettings(
        capacity=capacity, cost=_cost(rng), limits=limits, prefix_cache=rng.random() < 0.7
    )
    settings = WorldSettings(
        node=node,
        queue_timeout_s=rng.choice((None, rng.uniform(0.2, 10))),
        request_timeout_s=rng.choice((None, rng.uniform(0.5, 30))),
        faults=draw_faults(rng, duration_s),
    )
    arrivals = _arrivals(rng, capacity, limits, duration_s)
    door = desk_door(_desk(rng, limits)) if rng.random() < 0.8 else None
    return World(arrivals, replace(settings, **fields), seed=seed, door=door)  # type: ignore[arg-type]


def _desk(rng: Random, limits: SchedulerLimits) -> DeskSettings:
    queue_timeout_s = rng.uniform(0.2, 10)
    return DeskSettings(
        admission=rng.choice(list(Admission)),
        risk=rng.choice((0.0, 1.0, 3.0)),
        max_running_requests=limits.max_running_requests,
        max_waiting_queue=rng.choice((0, 4, 100)),
        long_request_threshold=rng.choice((20, 4000)),
        long_request_concurrency=min(rng.choice((1, 2)), limits.max_running_requests),
        long_kv_share=rng.uniform(0.1, 1.0),
        batch_floor=rng.choice((0.0, 0.1, 0.5)),
        tenant_weights={"tenant-0": rng.choice((1.0, 5.0))},
        queue_timeout_s=queue_timeout_s,
        request_timeout_s=queue_timeout_s + rng.uniform(0, 30),
        first_token_timeout_s=rng.choice((None, queue_timeout_s)),
        long_first_token_timeout_s=rng.choice((None, queue_timeout_s)),
        preempt_after_s=rng.choice((0.0, 0.5, 2.0)),
        preempt_min_run_s=rng.choice((0.0, 0.5)),
        preemptions_max=rng.choice((0, 1, 3)),
    )


def _limits(rng: Random) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_batched_tokens=rng.choice((1, 8, 64, 512)),
        max_running_requests=rng.choice((1, 3, 8, 64)),
        long_prefill_threshold=rng.choice((8, 64, 512)),
        min_run_tokens=rng.choice((0, 1, 16)),
        watermark=rng.choice((0.0, 0.05)),
    )


def _cost(rng: Random) -> StepCost:
    return StepCost(
        base=rng.uniform(0.0005, 0.02),
        per_prefill_token=rng.uniform(0, 0.001),
        per_attention=rng.uniform(0, 1e-6),
        per_decode=rng.uniform(0, 0.001),
        per_context=rng.uniform(0, 1e-6),
        any_prefill=rng.uniform(0, 0.001),
    )


def _arrivals(
    rng: Random, capacity: Capacity, limits: SchedulerLimits, duration_s: float
) -> list[Arrival]:
    times = sorted(rng.uniform(0, duration_s) for _ in range(rng.randint(1, NUM_ARRIVALS_MAX)))
    num_tenants = rng.randint(1, 3)
    return [_arrival(rng, at_s, capacity, limits, num_tenants) for at_s in times]


def _arrival(
    rng: Random, at_s: float, capacity: Capacity, limits: SchedulerLimits, num_tenants: int
) -> Arrival:
    """A request that could run alone: prompt and output fit the pool."""
    size = capacity.num_blocks * capacity.block_size
    n = min(rng.choice((1, 1, 1, 2, 3)), limits.max_running_requests)
    prompt = rng.randint(1, max(1, size // (5 * n)))
    room = size // n - prompt - 2 * capacity.block_size
    max_tokens = rng.randint(1, max(1, min(room, 80)))
    return Arrival(
        at_s=at_s,
        prompt_tokens=prompt,
        output_tokens=rng.randint(1, max_tokens),
        max_tokens=max_tokens,
        n=n,
        tenant=f"tenant-{rng.randrange(num_tenants)}",
        band=rng.choice(list(Band)),
        prefix=tuple(range(rng.randint(0, 3))),
        prefix_block=rng.choice((capacity.block_size, 7)),
    )


def main() -> None:
    result = run_random_world(int(sys.argv[1]))
    print(f"seed {result.seed}: {result.outcomes}, {result.num_steps} steps, all as it must be")


if __name__ == "__main__":
    main()
