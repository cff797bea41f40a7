"""Short requests beside long ones, simulated: the workload of `desk_live_isolation`, many times.

A live run has some 250 short requests, so its p99 is its third worst. Here requests of the same
kind meet the same engine on the simulated clock, from as many seeds as are asked for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from bench.desk_live_isolation import (
    LONG_CONCURRENCY,
    LONG_LEAD_S,
    LONG_OUTPUT,
    LONG_PROMPT,
    NUM_PROBES,
    NUM_QUEUED,
    PHASE_S,
    UTILISATION,
)
from bench.desk_live_mix import Ask, short_ones
from kvota.core.errors import Outcome
from kvota.core.plan import Capacity
from kvota.desk.settings import DeskSettings
from kvota.scheduler.budget import SchedulerLimits
from kvota.sim.costs import CPU_SMOLLM2
from kvota.sim.desk_door import desk_door
from kvota.sim.node import NodeSettings
from kvota.sim.records import RequestRecord, quantile
from kvota.sim.world import World, WorldSettings
from kvota.traffic.arrival import Arrival

NUM_SEEDS = 8
NODE = NodeSettings(
    capacity=Capacity(1_600, 32, bytes_per_block=0),
    cost=CPU_SMOLLM2,
    limits=SchedulerLimits(
        max_num_batched_tokens=64, max_running_requests=24, long_prefill_share=0.18
    ),
)
DESK = DeskSettings(
    max_running_requests=24,
    long_request_concurrency=LONG_CONCURRENCY,
    queue_timeout_s=200.0,
    request_timeout_s=300.0,
)
SETTINGS = WorldSettings(
    node=NODE, queue_timeout_s=200.0, request_timeout_s=300.0, proof_every=1_000
)
HEADER = (
    "| beside the short ones | short requests | TTFT p50, ms | TTFT p99, ms | of without "
    "| the long take, of their lone times |\n|---|--:|--:|--:|--:|--:|"
)


@dataclass(slots=True)
class Beside:
    """Short ones beside `num_long` long ones, which came one after another or at once."""

    name: str
    num_long: int
    ttfts_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)  # of one, or until the last has ended

    def ttft_ms(self, share: float) -> float:
        return 1_000 * quantile(self.ttfts_s, share)

    def line(self, alone: "Beside", lone_s: float) -> str:
        slow = median(self.long_s) / (self.num_long * lone_s) if self.num_long else None
        return (
            f"| {self.name} | {len(self.ttfts_s)} | {self.ttft_ms(0.5):.0f} "
            f"| {self.ttft_ms(0.99):.0f} | {self.ttft_ms(0.99) / alone.ttft_ms(0.99):.2f} "
            f"| {'–' if slow is None else format(slow, '.2f')} |"
        )


def isolation(num_seeds: int = NUM_SEEDS) -> Iterator[str]:
    """The lines of the row."""
    rate_rps = UTILISATION / _short_alone_s()
    lone_s = _time_s(_run([_long(0.0)])[0])
    yield (
        f"{rate_rps:.2f} short requests/s from {num_seeds} seeds; {LONG_PROMPT:,} + {LONG_OUTPUT} "
        f"tokens alone: {lone_s:.1f} s\n\n{HEADER}"
    )
    num_many = LONG_CONCURRENCY + NUM_QUEUED
    alone, one = Beside("nothing", 0), Beside("one long at all times", 1)
    five = Beside(f"{LONG_CONCURRENCY} long running, {NUM_QUEUED} in line", num_many)
    for seed in range(num_seeds):
        short = partial(_short, rate_rps, seed)
        alone.ttfts_s += _ttfts(_run(short(0.0)))
        _beside_one(one, short(LONG_LEAD_S))
        _beside_many(five, short(LONG_LEAD_S))
    for found in (alone, one, five):
        yield found.line(alone, lone_s)


def _beside_one(one: Beside, short: Sequence[Arrival]) -> None:
    """A long one is always there: each comes when the one before it ends, found by running."""
    until_s = LONG_LEAD_S + PHASE_S
    long = [_long(0.0)]
    records: Sequence[RequestRecord] = ()
    while long[-1].at_s < until_s:
        records = _run([*long, *short])
        long.append(_long(max(_ended_s(record) for record in records if _is_long(record))))
    one.ttfts_s += _ttfts(records)
    times_s = [_time_s(record) for record in records if _is_long(record)]
    one.long_s += times_s[:-1] or times_s


def _beside_many(many: Beside, short: Sequence[Arrival]) -> None:
    records = _run([*(_long(0.001 * number) for number in range(many.num_long)), *short])
    until_s = max(_ended_s(record) for record in records if _is_long(record))
    many.ttfts_s += _ttfts([record for record in records if record.arrival.at_s < until_s])
    many.long_s.append(until_s)


def _run(arrivals: Sequence[Arrival]) -> Sequence[RequestRecord]:
    in_order = sorted(arrivals, key=lambda one: one.at_s)
    records = World(in_order, SETTINGS, seed=1, door=desk_door(DESK)).run().records
    assert all(record.outcome is Outcome.COMPLETED for record in records)
    return records


def _short(rate_rps: float, seed: int, from_s: float) -> list[Arrival]:
    return [_arrival(one, from_s + one.due_s) for one in short_ones(rate_rps, PHASE_S, seed)]


def _long(at_s: float) -> Arrival:
    return _arrival(Ask(at_s, LONG_PROMPT, LONG_OUTPUT, is_long=True), at_s)


def _arrival(one: Ask, at_s: float) -> Arrival:
    return Arrival(
        at_s=at_s,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        max_tokens=one.output_tokens,
        tenant="long" if one.is_long else "short",
    )


def _short_alone_s() -> float:
    """Mean time of a short request that is alone."""
    asks = short_ones(NUM_PROBES, 1.0, seed=5)
    return sum(_time_s(_run([_arrival(one, 0.0)])[0]) for one in asks) / len(asks)


def _is_long(record: RequestRecord) -> bool:
    return record.arrival.tenant == "long"


def _ttfts(records: Sequence[RequestRecord]) -> list[float]:
    short = [record for record in records if not _is_long(record)]
    return [record.ttft_s for record in short if record.ttft_s is not None]


def _ended_s(record: RequestRecord) -> float:
    assert record.ended_at_s is not None
    return record.ended_at_s


def _time_s(record: RequestRecord) -> float:
    return _ended_s(record) - record.arrival.at_s
