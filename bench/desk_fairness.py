"""Two tenants, one of them flooding ten times its share; and batch work under a flood.

While both tenants have requests waiting, their service must stay within the VTC bound,
2 · max(w_in · longest prompt, w_out · KV capacity); batch must get its floor.
"""

from dataclasses import dataclass
from random import Random

from kvota.core.errors import Outcome
from kvota.core.plan import Capacity
from kvota.core.request import Band
from kvota.desk.settings import DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.desk_door import desk_door
from kvota.sim.executor import StepCost
from kvota.sim.fairness import Fairness
from kvota.sim.node import NodeSettings
from kvota.sim.records import RequestRecord, WorldResult, quantile
from kvota.sim.workloads import flood, merged
from kvota.sim.world import DoorFactory, World, WorldSettings, open_door
from kvota.traffic.arrival import Arrival

KV_TOKENS, BLOCK_SIZE = 16_384, 16
PROMPT, OUTPUT, MAX_TOKENS = (100, 400), (50, 300), 512
DURATION_S = 120.0
FLOOR = 0.1
NODE = NodeSettings(
    capacity=Capacity(KV_TOKENS // BLOCK_SIZE, BLOCK_SIZE, bytes_per_block=0),
    cost=StepCost(base=0.020, per_decode=1e-4, per_prefill_token=1 / 20_000),
    limits=SchedulerLimits(max_running_requests=64),
)
DESK = DeskSettings(
    max_running_requests=64,
    max_waiting_queue=10_000,
    batch_floor=FLOOR,
    queue_timeout_s=600.0,
    request_timeout_s=900.0,
)
FAIR_RPS = 5.0  # about half of what the node can do


@dataclass(frozen=True, slots=True)
class Flood:
    """What the quiet tenant got, with and without the desk."""

    gap_max: float  # of weighted tokens, while both waited
    bound: float
    quiet_ttft_p95_s: float
    quiet_ttft_p95_without_desk_s: float


def two_tenants() -> Flood:
    """The quiet tenant asks for what it is due, the loud one for ten times as much."""
    fairness = Fairness(KV_TOKENS, PROMPT[1])
    arrivals = _pair(10 * FAIR_RPS, FAIR_RPS, Band.INTERACTIVE)
    with_desk = _run(arrivals, desk_door(DESK), fairness)
    without = _run(arrivals, open_door(NODE, num_waiting_max=100_000))
    return Flood(fairness.worst, fairness.bound, _quiet_p95(with_desk), _quiet_p95(without))


def batch_share() -> float:
    """Share of output tokens that batch gets while interactive requests flood the node."""
    arrivals = _pair(10 * FAIR_RPS, 2 * FAIR_RPS, Band.BATCH)
    history = [one for one in arrivals if one.at_s < 30]
    records = _run(arrivals, desk_door(DESK, history)).records
    tokens = {
        band: sum(one.output_tokens for one in records if _is_from(one, band)) for band in Band
    }
    return tokens[Band.BATCH] / sum(tokens.values())


def _is_from(record: RequestRecord, band: Band) -> bool:
    """It was let through while both bands had requests in line."""
    return (
        record.arrival.band is band
        and record.granted_at_s is not None
        and record.granted_at_s < DURATION_S
    )


def _pair(loud_rps: float, quiet_rps: float, quiet_band: Band) -> list[Arrival]:
    def stream(seed: int, tenant: str, rate_rps: float, band: Band) -> list[Arrival]:
        return list(
            flood(
                Random(seed), tenant=tenant, rate_rps=rate_rps, duration_s=DURATION_S,
                prompt=PROMPT, output=OUTPUT, max_tokens=MAX_TOKENS, band=band,
            )
        )  # fmt: skip

    return merged(
        iter(stream(1, "loud", loud_rps, Band.INTERACTIVE)),
        iter(stream(2, "quiet", quiet_rps, quiet_band)),
    )


def _run(
    arrivals: list[Arrival], door: DoorFactory, fairness: Fairness | None = None
) -> WorldResult:
    settings = WorldSettings(
        node=NODE, queue_timeout_s=600.0, request_timeout_s=900.0, proof_every=2_000
    )
    checkers = [fairness] if fairness is not None else []
    return World(arrivals, settings, seed=1, door=door, checkers=checkers).run()


def _quiet_p95(result: WorldResult) -> float:
    waits = [
        record.ttft_s if record.ttft_s is not None else float("inf")
        for record in result.records
        if record.arrival.tenant == "quiet" and record.outcome is not Outcome.REFUSED
    ]
    return quantile(waits, 0.95)
