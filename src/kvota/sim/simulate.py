"""`kvota simulate`: a trace, a machine and a policy in; what clients would have seen out."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from kvota.core.errors import ConfigError
from kvota.core.plan import Capacity
from kvota.desk.settings import DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.desk_door import desk_door
from kvota.sim.executor import StepCost
from kvota.sim.fault_words import told
from kvota.sim.faults import FaultPlan
from kvota.sim.jitter import Jitter
from kvota.sim.node import NodeSettings
from kvota.sim.records import Targets, WorldResult, quantile
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival, Scaling, split
from kvota.traffic.opening import open_traffic

PROOF_EVERY = 500  # steps; the counts are checked at every step
NO_FAULTS = FaultPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Everything that decides a simulated run. The history is not served, only learned from."""

    trace: Path
    kv_tokens: int
    cost: StepCost
    jitter: Jitter | None = None  # of the steps; None: each takes what it costs
    block_size: int = 16
    max_tokens: int = 1024  # what clients allow; no trace says it
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    desk: DeskSettings | None = field(default_factory=DeskSettings)  # None: no desk
    scaling: Scaling = field(default_factory=Scaling)
    seed: int = 1
    num_requests_max: int | None = None
    history_share: float = 0.0  # of the trace, taken from its beginning
    prefix_cache: bool = True
    faults: FaultPlan = field(default_factory=FaultPlan)
    poisson_rps: float = 5.0  # for traces without times
    from_s: float = 0.0  # of a day, for traces of client populations
    until_s: float = 86_400.0


def simulate(asked: Simulation) -> WorldResult:
    """Run it. Raises TraceError or ConfigError when it cannot begin."""
    history, judged = judged_of(asked)
    door = desk_door(asked.desk, history) if asked.desk else None
    return World(judged, world_settings(asked), seed=asked.seed, door=door).run()


def judged_of(asked: Simulation) -> tuple[list[Arrival], list[Arrival]]:
    """The requests to learn from, and those to serve. Raises ConfigError when there is none."""
    try:
        arrivals = list(islice(asked.scaling.apply(read_trace(asked)), asked.num_requests_max))
    except ValueError as error:
        raise ConfigError(f"{asked.trace}: {error}.") from None
    if not arrivals:
        raise ConfigError(f"{asked.trace}: no request lies in what was asked for")
    return split(arrivals, asked.history_share)


def world_settings(asked: Simulation) -> WorldSettings:
    capacity = Capacity(asked.kv_tokens // asked.block_size, asked.block_size, bytes_per_block=0)
    node = NodeSettings(
        capacity=capacity,
        cost=asked.cost,
        jitter=asked.jitter,
        limits=asked.limits,
        prefix_cache=asked.prefix_cache,
    )
    desk = asked.desk
    return WorldSettings(
        node=node,
        queue_timeout_s=desk.queue_timeout_s if desk else None,
        request_timeout_s=desk.request_timeout_s if desk else None,
        proof_every=PROOF_EVERY,
        leaps=True,
        faults=asked.faults,
        scaling=asked.scaling,
    )


def read_trace(asked: Simulation) -> Iterable[Arrival]:
    """The arrivals of a trace of any known format."""
    traffic = open_traffic(
        asked.trace,
        max_tokens=asked.max_tokens,
        seed=asked.seed,
        poisson_rps=asked.poisson_rps,
        from_s=asked.from_s,
        until_s=asked.until_s,
    )
    return traffic.arrivals


def report(result: WorldResult, targets: Targets, faults: FaultPlan = NO_FAULTS) -> str:
    """What came out, for people. `faults`: those that were planned."""
    records, scaling = result.records, result.scaling
    ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
    tpots = [record.tpot_s for record in records if len(record.token_at_s) > 1]
    stalls = [record.slowest_gaps_s for record in records if len(record.token_at_s) > 1]
    outcomes = ", ".join(f"{name} {number}" for name, number in result.outcomes.items())
    good = result.goodput_rps(targets.is_met)
    return "\n".join(
        (
            f"requests      {len(records)} in {result.span_s:.0f} s of arrivals: {outcomes}",
            f"scaling       time x{scaling.time:g}, lengths /{scaling.length}; seed {result.seed}",
            f"goodput       {good:.3f} requests/s with TTFT <= {targets.ttft_s:g} s and "
            f"TPOT <= {targets.tpot_s:g} s ({result.attainment(targets.is_met):.1%} of all)",
            f"completed     {result.completed_rps:.3f} requests/s",
            f"TTFT          {_three(ttfts)}",
            f"TPOT          {_three(tpots)}",
            f"longest 10 %  {_three(stalls)} (mean of the longest tenth of a request's gaps)",
            f"KV used       {result.kv_used_mean:.1%} on average",
            f"preempted     {result.preempted_share:.2%} of requests, "
            f"{result.recomputed_tokens} tokens computed again",
            f"ETA           wrong by {_three([abs(error) for error in result.eta_errors_s])}",
            f"steps         {result.num_steps}; all invariants proved {result.num_checks} times",
            *(f"fault         {line}" for line in told(faults, result.struck)),
        )
    )


def _three(values: list[float]) -> str:
    p50, p95, p99 = (quantile(values, share) for share in (0.5, 0.95, 0.99))
    return f"p50 {p50:.3f} s, p95 {p95:.3f} s, p99 {p99:.3f} s"
