"""What a desk says right after a time in which it had to refuse many."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest

from kvota.core.errors import Outcome
from kvota.core.plan import Capacity
from kvota.desk.settings import DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.costs import CPU_SMOLLM2
from kvota.sim.desk_door import desk_door
from kvota.sim.node import NodeSettings
from kvota.sim.records import RequestRecord
from kvota.sim.workloads import team_mix
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival

NODE = NodeSettings(
    capacity=Capacity(4_096, 32, 0),
    cost=CPU_SMOLLM2,
    limits=SchedulerLimits(max_num_batched_tokens=96, max_running_requests=24),
)
DESK = DeskSettings(
    max_running_requests=24,
    max_waiting_queue=64,
    long_request_threshold=1_000,
    first_token_timeout_s=3.0,
    long_first_token_timeout_s=20.0,
)
KNEE_RPS = 5.1
PHASES = ((1.1, 28.0), (1.6, 28.0), (0.0, 25.0), (0.5, 44.0))  # times the knee, seconds
CALM_FROM_S = 28.0 + 28.0 + 25.0


def arrivals(seed: int) -> Iterator[Arrival]:
    began_s = 0.0
    for number, (factor, seconds) in enumerate(PHASES):
        rng = Random(f"{seed} {number}")
        if factor:
            for one in team_mix(rng, rate_rps=factor * KNEE_RPS, duration_s=seconds):
                yield replace(one, at_s=one.at_s + began_s)
        began_s += seconds


def has_line(records: Sequence[RequestRecord], newcomer: RequestRecord) -> bool:
    """Whether anybody of the newcomer's kind waited when it came."""
    now = newcomer.arrival.at_s
    return any(
        one.arrival.at_s < now < (one.ended_at_s or now)
        and (one.granted_at_s is None or one.granted_at_s > now)
        for one in records
        if one.arrival.tenant == newcomer.arrival.tenant
    )


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 8])
def test_who_finds_no_line_is_not_refused_for_what_was_a_minute_ago(seed: int) -> None:
    settings = WorldSettings(node=NODE, proof_every=1_000)
    records = World(arrivals(seed), settings, seed=seed, door=desk_door(DESK)).run().records
    refused = [one for one in records if one.outcome is Outcome.REFUSED]
    assert any(one.arrival.at_s < CALM_FROM_S for one in refused), "there was no overload"
    calm = [one for one in refused if one.arrival.at_s >= CALM_FROM_S]
    assert all(has_line(records, one) for one in calm)
