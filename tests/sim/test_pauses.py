"""Pauses in a whole node: they help where memory is held, and do not thrash where all is full."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvota.core.errors import Outcome
from kvota.core.plan import Capacity
from kvota.core.request import Band
from kvota.desk.settings import DeskSettings
from kvota.desk.tally import Tally
from kvota.kv.cache import KVCache
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.desk_door import DeskDoor, desk_door
from kvota.sim.executor import StepCost
from kvota.sim.node import NodeSettings
from kvota.sim.records import WorldResult, quantile
from kvota.sim.workloads import flood, merged
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival

DURATION_S = 80.0
COST = StepCost(base=0.02, per_prefill_token=0.00005, per_decode=0.0001)


@dataclass(frozen=True, slots=True)
class Run:
    result: WorldResult
    tally: Tally

    def ttft_s(self, tenant: str, share: float) -> float:
        ttfts = [one.ttft_s for one in self.result.records if one.arrival.tenant == tenant]
        return quantile([ttft for ttft in ttfts if ttft is not None], share)

    def num_completed(self, tenant: str) -> int:
        done = [one for one in self.result.records if one.outcome is Outcome.COMPLETED]
        return sum(one.arrival.tenant == tenant for one in done)

    @property
    def completed_tokens(self) -> int:
        done = [one for one in self.result.records if one.outcome is Outcome.COMPLETED]
        return sum(one.arrival.prompt_tokens + one.output_tokens for one in done)

    @property
    def recomputed_share(self) -> float:
        ran = [one for one in self.result.records if one.token_at_s]
        computed = sum(one.arrival.prompt_tokens + one.output_tokens for one in ran)
        return self.result.recomputed_tokens / computed


def run(arrivals: Sequence[Arrival], kv_tokens: int, **desk: Any) -> Run:
    node = NodeSettings(
        capacity=Capacity(kv_tokens // 16, 16, bytes_per_block=0),
        cost=COST,
        limits=SchedulerLimits(max_running_requests=64),
        prefix_cache=False,  # what is given up is lost
    )
    doors: list[DeskDoor] = []

    def door(cache: KVCache) -> DeskDoor:
        doors.append(desk_door(DeskSettings(**desk))(cache))
        return doors[0]

    world = World(arrivals, WorldSettings(node=node, proof_every=500), seed=1, door=door)
    return Run(world.run(), doors[0].desk.snapshot().tally)


def chat(rate_rps: float, seed: int = 2) -> Iterator[Arrival]:
    return flood(
        Random(seed), tenant="chat", rate_rps=rate_rps, duration_s=DURATION_S,
        prompt=(200, 1_500), output=(50, 300), max_tokens=1_024,
    )  # fmt: skip


def long_prompts() -> Iterator[Arrival]:
    return flood(
        Random(3), tenant="long", rate_rps=0.3, duration_s=DURATION_S,
        prompt=(4_500, 8_000), output=(100, 400), max_tokens=1_024,
    )  # fmt: skip


def batch(seed: int) -> Iterator[Arrival]:
    return flood(
        Random(seed), tenant="batch", rate_rps=2.0, duration_s=DURATION_S, band=Band.BATCH,
        prompt=(200, 800), output=(800, 1_500), max_tokens=1_500,
    )  # fmt: skip


def test_a_saturated_node_does_not_pause_long_requests_over_and_over() -> None:
    """With twice as many short ones as can be served, pausing long ones only computes twice."""
    arrivals = merged(chat(10.0), long_prompts())
    ours, never = run(arrivals, 40_000), run(arrivals, 40_000, preemptions_max=0)
    num_long = sum(one.arrival.tenant == "long" for one in ours.result.records)
    assert ours.tally.repeated_pauses <= 0.05 * num_long
    assert ours.recomputed_share <= 0.1
    assert ours.completed_tokens >= 0.95 * never.completed_tokens
    for tenant in ("chat", "long"):  # one long request more or less is worth seven chats
        assert ours.num_completed(tenant) >= 0.9 * never.num_completed(tenant), tenant


def test_chats_do_not_wait_for_batch_work_that_holds_all_memory() -> None:
    ours, never = [], []
    for seed in range(2, 5):  # the slowest few chats of one load depend on a pause more or less
        arrivals = merged(chat(1.0, seed), batch(seed + 2))
        ours.append(run(arrivals, 20_000))
        never.append(run(arrivals, 20_000, preemptions_max=0))
    assert all(one.tally.pauses > 0 for one in ours)
    assert _half_wait_s(ours) <= 0.7 * _half_wait_s(never)
    assert _num_batch(ours) >= 0.8 * _num_batch(never)


def _half_wait_s(runs: list[Run]) -> float:
    return sum(one.ttft_s("chat", 0.5) for one in runs)


def _num_batch(runs: list[Run]) -> int:
    return sum(one.num_completed("batch") for one in runs)
