"""Ways to admit, compared: goodput, preemption, KV used, and how honest the waits were.

Two workloads: Azure conversation, and a mix of reasoning clients (ServeGen). The output-length
histories are the end of the first 60 % of each; what is judged begins after it. Loads are multiples
of the capacity that the closed system has with `forecast z = 2`: everybody waits, nobody times out.

Recomputation is cheap where prompts are read at 20,000 tokens per second, dear at 5,000.
"""

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

from kvota.core.plan import Capacity
from kvota.desk.settings import Admission, DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.arrival import Arrival, Scaling, split
from kvota.sim.desk_door import desk_door
from kvota.sim.executor import StepCost
from kvota.sim.node import NodeSettings
from kvota.sim.records import Targets, WorldResult
from kvota.sim.servegen import read_clients, servegen_arrivals
from kvota.sim.traces import read_azure
from kvota.sim.world import World, WorldSettings

TRACES = Path(__file__).parent / "traces"
BLOCK_SIZE = 16
HISTORY = 3_000  # finished outputs that the desk has seen before it is judged
RUNNING_MAX = 256
WARM_UP_SHARE = 0.25  # of the judged arrivals' time: the pool fills
CHEAP = StepCost(base=0.020, per_decode=1e-4, per_prefill_token=1 / 20_000)
DEAR = replace(CHEAP, per_prefill_token=1 / 5_000)
COSTS = {"cheap": CHEAP, "dear": DEAR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    targets: Targets
    queue_timeout_s: float
    request_timeout_s: float
    kv_tokens: Sequence[int]  # tight … ample
    num_backlog: int  # requests that the capacity is measured with


CONVERSATION = Workload(
    name="conversation",
    targets=Targets(ttft_s=10.0, tpot_s=0.1),
    queue_timeout_s=30.0,
    request_timeout_s=120.0,
    kv_tokens=(20_000, 40_000, 80_000),
    num_backlog=800,
)
REASONING = Workload(
    name="reasoning",
    targets=Targets(ttft_s=30.0, tpot_s=0.1),
    queue_timeout_s=60.0,
    request_timeout_s=900.0,
    kv_tokens=(50_000, 100_000, 200_000),
    num_backlog=400,
)
WORKLOADS = {one.name: one for one in (CONVERSATION, REASONING)}

POLICIES: dict[str, dict[str, object]] = {
    "reserve": {"admission": Admission.RESERVE},
    "optimistic": {"admission": Admission.OPTIMISTIC},
    "quantile 0.6": {"admission": Admission.QUANTILE, "quantile": 0.6},
    "quantile 0.9": {"admission": Admission.QUANTILE, "quantile": 0.9},
    "running length": {"admission": Admission.RUNNING_LENGTH},
    "forecast z=1": {"admission": Admission.FORECAST, "risk": 1.0},
    "forecast z=2": {"admission": Admission.FORECAST, "risk": 2.0},
    "forecast z=3": {"admission": Admission.FORECAST, "risk": 3.0},
}
OURS = "forecast z=2"


@dataclass(frozen=True, slots=True)
class Job:
    """One run: everything that a row of the table is determined by."""

    workload: str
    policy: str
    kv_tokens: int
    load: float  # of capacity
    cost: str
    num_requests: int
    capacity_rps: float


@dataclass(frozen=True, slots=True)
class Row:
    job: Job
    goodput_rps: float
    completed_rps: float
    preempted: float
    recomputed_per_request: float
    kv_used: float
    eta_error: float | None  # median |told − true| / true of those told
    retry_error_s: float | None  # median |told − time until a newcomer was let in|

    def line(self) -> str:
        return (
            f"| {self.job.policy} | {self.goodput_rps:.2f} | {self.completed_rps:.2f} "
            f"| {self.preempted:.2%} | {self.recomputed_per_request:.0f} | {self.kv_used:.0%} "
            f"| {_or_dash(self.eta_error, '.0%')} | {_or_dash(self.retry_error_s, '.1f')} |"
        )


HEADER = (
    "| admission | goodput/s | completed/s | preempted | recomputed tokens per request | KV used "
    "| ETA error | Retry-After error, s |\n|---|---|---|---|---|---|---|---|"
)


def eta_error(result: WorldResult) -> float | None:
    """Median error of the wait that was told on joining the line, relative to the true one."""
    waits = [
        (error, record.granted_at_s - record.arrival.at_s)
        for record in result.records
        if record.granted_at_s is not None and (error := record.eta_error_s) is not None
    ]
    errors = [abs(error) / true_s for error, true_s in waits if true_s > 0.5]
    return statistics.median(errors) if errors else None


def retry_error_s(result: WorldResult) -> float | None:
    """Median distance of Retry-After from the first later moment at which somebody was let in."""
    let_in = [one.arrival.at_s for one in result.records if one.refusal is None]
    errors = []
    for record in result.records:
        if record.retry_after_s is not None:
            place = bisect_right(let_in, record.arrival.at_s)
            if place < len(let_in):
                errors.append(abs(record.retry_after_s - (let_in[place] - record.arrival.at_s)))
    return statistics.median(errors) if errors else None


@cache
def traffic(name: str) -> tuple[list[Arrival], list[Arrival]]:
    """(the end of what is learned from, what is judged) of a workload, at its own rate."""
    if name == CONVERSATION.name:
        arrivals = list(read_azure(TRACES / "azure_conv_2023.csv.gz", max_tokens=1024))
    else:
        clients = read_clients(TRACES / "servegen_r1_two_hours.jsonl.gz")
        arrivals = servegen_arrivals(
            clients, Random(1), start_s=50_400, end_s=57_600, max_tokens=8192
        )
        arrivals = [one for one in arrivals if one.prompt_tokens <= 20_000]
    known, judged = split(arrivals, 0.6)
    return known[-HISTORY:], judged


def capacity_rps(workload: Workload, kv_tokens: int, cost: str) -> float:
    """Completions per second of the closed system, in the middle of a backlog."""
    known, judged = traffic(workload.name)
    backlog = [replace(one, at_s=0.0) for one in judged[: workload.num_backlog]]
    desk = _desk(workload, OURS, len(backlog), patient=True)
    world = _world(workload, kv_tokens, cost, warm_up_s=0.0)
    endless = replace(world, queue_timeout_s=None, request_timeout_s=None)
    result = World(backlog, endless, seed=1, door=desk_door(desk, known)).run()
    ends = sorted(record.ended_at_s or 0.0 for record in result.records)
    first, last = int(0.2 * len(ends)), int(0.7 * len(ends))
    return (last - first) / (ends[last] - ends[first])


def run(job: Job) -> Row:
    workload = WORKLOADS[job.workload]
    known, judged = traffic(job.workload)
    chosen = judged[: job.num_requests]
    natural_rps = len(chosen) / chosen[-1].at_s
    scaling = Scaling(time=natural_rps / (job.load * job.capacity_rps))
    arrivals = list(scaling.apply(chosen))
    world = _world(workload, job.kv_tokens, job.cost, WARM_UP_SHARE * arrivals[-1].at_s)
    door = desk_door(_desk(workload, job.policy, 256), known)
    result = World(arrivals, replace(world, scaling=scaling), seed=1, door=door).run()
    return _row(job, result)


def jobs(
    workload: Workload,
    num_requests: int,
    capacities: dict[tuple[int, str], float],
    loads: Sequence[float],
) -> Iterator[Job]:
    """Every policy at every load, with cheap recomputation; with dear, at the highest."""
    for kv_tokens in workload.kv_tokens:
        for cost, these in (("cheap", loads), ("dear", (max(loads),))):
            for load in these:
                for policy in POLICIES:
                    yield Job(
                        workload.name, policy, kv_tokens, load, cost, num_requests,
                        capacities[kv_tokens, cost],
                    )  # fmt: skip


def _world(workload: Workload, kv_tokens: int, cost: str, warm_up_s: float) -> WorldSettings:
    node = NodeSettings(
        capacity=Capacity(kv_tokens // BLOCK_SIZE, BLOCK_SIZE, bytes_per_block=0),
        cost=COSTS[cost],
        limits=SchedulerLimits(max_num_batched_tokens=512, max_running_requests=RUNNING_MAX),
    )
    return WorldSettings(
        node=node,
        queue_timeout_s=workload.queue_timeout_s,
        request_timeout_s=workload.request_timeout_s,
        warm_up_s=warm_up_s,
        proof_every=1_000,
    )


def _desk(
    workload: Workload, policy: str, num_waiting_max: int, *, patient: bool = False
) -> DeskSettings:
    """Lanes wide and no pauses, so that admission alone is compared."""
    base = DeskSettings(
        max_running_requests=RUNNING_MAX,
        max_waiting_queue=num_waiting_max,
        long_request_concurrency=16,
        preemptions_max=0,
        queue_timeout_s=1e6 if patient else workload.queue_timeout_s,
        request_timeout_s=1e6 if patient else workload.request_timeout_s,
        first_token_timeout_s=None if patient else workload.targets.ttft_s,
    )
    return replace(base, **POLICIES[policy])  # type: ignore[arg-type]


def _row(job: Job, result: WorldResult) -> Row:
    num_ran = sum(record.queued_s is not None for record in result.records)
    return Row(
        job=job,
        goodput_rps=result.goodput_rps(WORKLOADS[job.workload].targets.is_met),
        completed_rps=result.completed_rps,
        preempted=result.preempted_share,
        recomputed_per_request=result.recomputed_tokens / max(num_ran, 1),
        kv_used=result.kv_used_mean,
        eta_error=eta_error(result),
        retry_error_s=retry_error_s(result),
    )


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
