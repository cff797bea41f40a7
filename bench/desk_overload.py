"""What happens past the knee: the team mix at 0.25 to 5 times what can be served well.

Goodput of a server that takes everything falls once it is offered too much, because all are served
late. The desk should hold it: 0.9 of the knee's goodput at twice and at five times the load. The
knee is the highest rate at which at least 90 % of all requests are good.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from kvota.core.plan import Capacity
from kvota.desk.settings import DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.costs import CPU_SMOLLM2
from kvota.sim.desk_door import desk_door
from kvota.sim.node import NodeSettings
from kvota.sim.records import WorldResult, quantile
from kvota.sim.workloads import is_good_for_team, team_mix
from kvota.sim.world import DoorFactory, World, WorldSettings, open_door

DURATION_S = 600.0
WARM_UP_S = 60.0
ATTAINMENT_MIN = 0.9
FACTORS = (0.5, 1.0, 2.0, 5.0)
NODE = NodeSettings(
    capacity=Capacity(4_096, 32, bytes_per_block=0),
    cost=CPU_SMOLLM2,
    limits=SchedulerLimits(max_num_batched_tokens=96, max_running_requests=24),
)
DESK = DeskSettings(
    max_running_requests=24,
    max_waiting_queue=64,
    long_request_threshold=1_000,
    long_request_concurrency=2,
    queue_timeout_s=30.0,
    request_timeout_s=120.0,
)


@dataclass(frozen=True, slots=True)
class Setup:
    """A way to meet overload."""

    name: str
    desk: DeskSettings | None
    says_patience: bool

    def door(self) -> DoorFactory:
        if self.desk is None:
            return open_door(NODE, num_waiting_max=1_000_000)
        return desk_door(self.desk)


SETUPS = (
    Setup("no desk: everything is taken", None, False),
    Setup("desk, a line of 256", replace(DESK, max_waiting_queue=256), False),
    Setup("desk, a line of 8", replace(DESK, max_waiting_queue=8), False),
    Setup("desk, first token within 3 s", replace(DESK, first_token_timeout_s=3.0), False),
    Setup("desk, first token within 20 s", replace(DESK, first_token_timeout_s=20.0), False),
    Setup(
        "desk, first token within 3 s, of a long prompt 20 s",
        replace(DESK, first_token_timeout_s=3.0, long_first_token_timeout_s=20.0),
        False,
    ),
    Setup("desk, clients say how long they wait", DESK, True),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One setup at one rate."""

    setup: str
    factor: float
    rate_rps: float
    goodput_rps: float
    attainment: float
    long_attainment: float
    refused: float
    short_ttft_p99_s: float

    def line(self) -> str:
        return (
            f"| {self.setup} | {self.factor:g}× | {self.rate_rps:.2f} | {self.goodput_rps:.2f} "
            f"| {self.attainment:.0%} | {self.long_attainment:.0%} | {self.refused:.0%} "
            f"| {self.short_ttft_p99_s:.1f} |"
        )


HEADER = (
    "| | offered / knee | offered/s | goodput/s | served well | of the long | refused "
    "| short: TTFT p99, s |\n"
    "|---|---|---|---|---|---|---|---|"
)


def knee_rps(setup: Setup, *, low: float = 0.1, high: float = 20.0, turns: int = 7) -> float:
    """The highest rate at which at least 90 % of all are good, by bisection."""
    for _ in range(turns):
        middle = (low + high) / 2
        if _run(setup, middle).attainment(is_good_for_team) >= ATTAINMENT_MIN:
            low = middle
        else:
            high = middle
    return low


def point(setup: Setup, factor: float, knee: float) -> Point:
    result = _run(setup, factor * knee)
    short = [
        record.ttft_s
        for record in result.records
        if record.arrival.tenant == "short" and record.ttft_s is not None
    ]
    long = [record for record in result.records if record.arrival.tenant == "long"]
    refused = sum(record.refusal is not None for record in result.records)
    return Point(
        setup.name,
        factor,
        factor * knee,
        result.goodput_rps(is_good_for_team),
        result.attainment(is_good_for_team),
        sum(map(is_good_for_team, long)) / len(long),
        refused / len(result.records),
        quantile(short, 0.99),
    )


def holds_plateau(points: Sequence[Point]) -> bool:
    """Goodput at 2× and 5× is at least 0.9 of that at 1×, for the points of one setup."""
    goodput = {one.factor: one.goodput_rps for one in points}
    return min(goodput[2.0], goodput[5.0]) >= 0.9 * goodput[1.0]


def _run(setup: Setup, rate_rps: float) -> WorldResult:
    arrivals = team_mix(
        Random(7), rate_rps=rate_rps, duration_s=DURATION_S, says_patience=setup.says_patience
    )
    with_desk = setup.desk is not None
    settings = WorldSettings(
        node=NODE,
        queue_timeout_s=DESK.queue_timeout_s if with_desk else None,
        request_timeout_s=DESK.request_timeout_s if with_desk else None,
        warm_up_s=WARM_UP_S,
        proof_every=500,
    )
    return World(arrivals, settings, seed=1, door=setup.door()).run()
