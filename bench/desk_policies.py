"""Ways to admit, compared on real traffic: workloads, policies, and one run of one of each.

Two workloads: Azure conversation, and a mix of reasoning clients (ServeGen). The output-length
histories are what came before; what is judged begins after the first 60 % of each. Loads are
multiples of the capacity that the closed system has with `forecast z = 2` on the first stretch of
what is judged: everybody waits, nobody times out.

Lengths are divided so that a run takes seconds: with `length` 8, a simulated token stands for 8, a
block for as many tokens as ever, and a step of the simulation for 8 steps. So memory, time and
speeds stay what they are, and only become coarser.

Recomputation is cheap where prompts are read at 20,000 tokens per second and what a preempted
request had computed is found in the prefix cache, unless others have needed the memory; it is dear
at 5,000 tokens per second and without such a cache.

Besides the policies that a server can have, one knows every length beforehand (`desk_knowing.py`):
what it does not reach, no guess of lengths does in this order of the line.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

from bench.desk_knowing import KnowingDoors, telling
from kvota.core.plan import Capacity
from kvota.desk.settings import Admission, DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.desk_door import desk_door
from kvota.sim.executor import StepCost
from kvota.sim.node import NodeSettings
from kvota.sim.records import Targets, WorldResult
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival, Scaling, split
from kvota.traffic.servegen import read_clients, servegen_arrivals
from kvota.traffic.traces import read_azure

TRACES = Path(__file__).parent / "traces"
BLOCK_SIZE = 16
HISTORY = 3_000  # finished outputs that the desk has seen before it is judged
RUNNING_MAX = 256
WAITING_MAX = 256
STEP_TOKENS = 512
WARM_UP_SHARE = 0.25  # of the judged arrivals' time: the pool fills


@dataclass(frozen=True, slots=True)
class Recomputing:
    """What reading a prompt, for the first time or again, costs."""

    tokens_per_s: float
    prefix_cache: bool


COSTS = {"cheap": Recomputing(20_000, True), "dear": Recomputing(5_000, False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    targets: Targets
    queue_timeout_s: float
    request_timeout_s: float
    kv_tokens: Sequence[int]  # tight … ample, each twice the one before
    num_requests: int  # of a run
    num_backlog: int  # requests that the capacity is measured with
    length: int  # what lengths are divided by


CONVERSATION = Workload(
    name="conversation",
    targets=Targets(ttft_s=10.0, tpot_s=0.1),
    queue_timeout_s=30.0,
    request_timeout_s=120.0,
    kv_tokens=(20_000, 40_000, 80_000),
    num_requests=1_600,
    num_backlog=800,
    length=2,
)
REASONING = Workload(
    name="reasoning",
    targets=Targets(ttft_s=30.0, tpot_s=0.1),
    queue_timeout_s=60.0,
    request_timeout_s=900.0,
    kv_tokens=(100_000, 200_000, 400_000),
    num_requests=1_600,
    num_backlog=1_000,
    length=8,
)
WORKLOADS = {one.name: one for one in (CONVERSATION, REASONING)}

POLICIES: dict[str, dict[str, object]] = {
    "reserve": {"admission": Admission.RESERVE},
    "optimistic": {"admission": Admission.OPTIMISTIC},
    "quantile 0.6": {"admission": Admission.QUANTILE, "quantile": 0.6},
    "running length": {"admission": Admission.RUNNING_LENGTH},
    "forecast z=1": {"admission": Admission.FORECAST, "risk": 1.0},
    "forecast z=2": {"admission": Admission.FORECAST, "risk": 2.0},
    "forecast z=3": {"admission": Admission.FORECAST, "risk": 3.0},
    "knows lengths": {},
}
OURS = "forecast z=2"
KNOWING = "knows lengths"  # for reference: it is no policy that a server can have


LOADS = (0.8, 1.0, 1.5)  # of capacity
SATURATED = LOADS[-1]
STRETCHES = 4  # of traffic that a judged row is the mean of: one alone is noisy


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: everything that its result is determined by."""

    workload: str
    policy: str
    kv_tokens: int
    load: float  # of capacity
    cost: str
    num_requests: int
    capacity_rps: float
    stretches: tuple[int, ...] = (1,)  # of the judged traffic, one run on each
    returns_max: int = 0  # how often a refused client comes back


Capacities = Mapping[tuple[int, str], float]  # by tokens of KV and cost


def jobs(
    workload: Workload,
    num_requests: int,
    capacities: Capacities,
    loads: Sequence[float],
    stretches: Sequence[int],
) -> Iterator[Job]:
    """Every policy at every load and cost; with ample KV, where all are alike, at the highest.

    Where most are served and nothing is judged, half as many requests of one stretch are enough.
    """
    for kv_tokens in workload.kv_tokens:
        is_ample = kv_tokens == workload.kv_tokens[-1]
        for cost in COSTS:
            for load in loads[-1:] if is_ample else loads:
                for policy in POLICIES:
                    yield Job(
                        workload=workload.name,
                        policy=policy,
                        kv_tokens=kv_tokens,
                        load=load,
                        cost=cost,
                        num_requests=num_requests if load == SATURATED else num_requests // 2,
                        capacity_rps=capacities[kv_tokens, cost],
                        stretches=tuple(stretches if load == SATURATED else stretches[:1]),
                    )


@cache
def traffic(name: str) -> tuple[list[Arrival], list[Arrival]]:
    """(what is learned from, what is judged) of a workload, at its own rate."""
    if name == CONVERSATION.name:
        arrivals = list(read_azure(TRACES / "azure_conv_2023.csv.gz", max_tokens=1024))
    else:
        clients = read_clients(TRACES / "servegen_r1_two_hours.jsonl.gz")
        arrivals = servegen_arrivals(
            clients, Random(1), start_s=50_400, end_s=57_600, max_tokens=8192
        )
        arrivals = [one for one in arrivals if one.prompt_tokens <= 20_000]
    return split(arrivals, 0.6)


def stretch(name: str, num_requests: int, seed: int) -> tuple[list[Arrival], list[Arrival]]:
    """(the last that ended before, `num_requests` of what is judged), another for each seed ≥ 1."""
    known, judged = traffic(name)
    start = (seed - 1) * num_requests
    chosen = judged[start : start + num_requests]
    if len(chosen) < num_requests:
        raise ValueError(f"{name} has {len(judged)} judged requests, not {seed} × {num_requests}")
    begin_s = chosen[0].at_s
    chosen = [replace(one, at_s=one.at_s - begin_s) for one in chosen]
    return (known + judged[:start])[-HISTORY:], chosen


def capacity_rps(workload: Workload, kv_tokens: int, cost: str) -> float:
    """Requests per second of the closed system: a backlog, until its line is empty.

    All of the mix has been let in by then, in whatever order; of what still runs, half is done.
    """
    known, backlog = stretch(workload.name, workload.num_backlog, 1)
    scaling = Scaling(length=workload.length)
    arrivals = [replace(one, at_s=0.0) for one in scaling.apply(backlog)]
    world = replace(_world(workload, kv_tokens, cost), queue_timeout_s=None, request_timeout_s=None)
    door = desk_door(_patient(_desk(workload, OURS), len(arrivals)), scaling.apply(known))
    records = World(arrivals, world, seed=1, door=door).run().records
    empty_s = max(record.granted_at_s or 0.0 for record in records)
    num_ended = sum(record.ended_at_s is not None and record.ended_at_s <= empty_s
                    for record in records)  # fmt: skip
    return (num_ended + len(records)) / 2 / empty_s


def run(job: Job, seed: int) -> WorldResult:
    """One of the job's stretches."""
    workload = WORKLOADS[job.workload]
    known, chosen = stretch(job.workload, job.num_requests, seed)
    natural_rps = len(chosen) / chosen[-1].at_s
    scaling = Scaling(time=natural_rps / (job.load * job.capacity_rps), length=workload.length)
    arrivals = list(scaling.apply(chosen))
    world = replace(
        _world(workload, job.kv_tokens, job.cost),
        warm_up_s=WARM_UP_SHARE * arrivals[-1].at_s,
        returns_max=job.returns_max,
        scaling=scaling,
    )
    desk = _desk(workload, job.policy)
    if job.policy == KNOWING:
        return World(telling(arrivals), world, seed=seed, door=KnowingDoors(desk)).run()
    door = desk_door(desk, Scaling(length=workload.length).apply(known))
    return World(arrivals, world, seed=seed, door=door).run()


def targets_of(workload: Workload) -> Targets:
    """A simulated token stands for several, and may take as long as all of them."""
    targets = workload.targets
    return replace(targets, tpot_s=targets.tpot_s * workload.length)


def _world(workload: Workload, kv_tokens: int, cost: str) -> WorldSettings:
    length, recomputing, plain = workload.length, COSTS[cost], SchedulerLimits()
    node = NodeSettings(
        capacity=Capacity(kv_tokens // BLOCK_SIZE, BLOCK_SIZE // length, bytes_per_block=0),
        cost=StepCost(
            base=0.020 * length,
            per_decode=1e-4 * length,
            per_prefill_token=length / recomputing.tokens_per_s,
        ),
        limits=SchedulerLimits(
            max_num_batched_tokens=STEP_TOKENS,  # of a step that stands for several, too
            max_running_requests=RUNNING_MAX,
            long_prefill_threshold=plain.long_prefill_threshold // length,
            min_run_tokens=plain.min_run_tokens // length,
        ),
        prefix_cache=recomputing.prefix_cache,
    )
    return WorldSettings(
        node=node,
        queue_timeout_s=workload.queue_timeout_s,
        request_timeout_s=workload.request_timeout_s,
        proof_every=10_000,
    )


def _desk(workload: Workload, policy: str) -> DeskSettings:
    """Many may be in the long lane and nobody is paused, so that admission alone is compared."""
    base = DeskSettings(
        max_running_requests=RUNNING_MAX,
        max_waiting_queue=WAITING_MAX,
        long_request_threshold=DeskSettings().long_request_threshold // workload.length,
        typical_output=DeskSettings().typical_output // workload.length,
        long_request_concurrency=16,
        preemptions_max=0,
        queue_timeout_s=workload.queue_timeout_s,
        request_timeout_s=workload.request_timeout_s,
        first_token_timeout_s=workload.targets.ttft_s,
    )
    return replace(base, **POLICIES[policy])  # type: ignore[arg-type]


def _patient(desk: DeskSettings, num_waiting_max: int) -> DeskSettings:
    return replace(
        desk,
        max_waiting_queue=num_waiting_max,
        queue_timeout_s=1e6,
        request_timeout_s=1e6,
        first_token_timeout_s=None,
    )
