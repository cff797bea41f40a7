"""A steady load for a long time: does memory grow, do answers slow down, does KV come back?

The server's memory (but for KV blocks that were reserved at the start and are used for the first
time) and KV use are read from its metrics page every few seconds, the time to first
token at each request. `leak.trend` judges each series after its warm-up. When the load is over and
nothing is open, KV use must be what it was before.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kvota.tools.load.asked import Seen
from kvota.tools.load.bench import Bench, NothingServed, first_error, words_of
from kvota.tools.load.cut import Cut
from kvota.tools.load.gauges import Gauges
from kvota.tools.load.generator import Run
from kvota.tools.load.leak import Trend, trend
from kvota.tools.load.percentiles import Spread
from kvota.tools.load.schedule import Shape
from kvota.tools.load.sweep import measure_alone

LOOK_S = 5.0
LOOKS_MIN = 200  # in a short soak the looks are closer
UTILISATION = 0.5  # of what one request after another makes
DRAIN_S = 60.0
MEMORY_SHARE_MIN = 0.01  # growth of less is nobody's worry
MEMORY_BYTES_MIN = 8 * 2**20
TTFT_SHARE_MIN = 0.1
KV_SHARE_MIN = 0.01  # of the KV memory, still in use with nothing open

ReadMemory = Callable[[], float | None]
"""Bytes that the server's process holds, where its metrics page does not say."""


@dataclass(slots=True)
class Looks:
    """Series of (seconds, value).

    A KV cache that was reserved at the start becomes resident block by block, as blocks are used
    for the first time. That is no leak, so `memory_bytes` leaves those blocks out, where the
    server says how much they are.
    """

    memory_bytes: list[tuple[float, float]] = field(default_factory=list)
    kv_touched_bytes: list[tuple[float, float]] = field(default_factory=list)
    kv_share: list[tuple[float, float]] = field(default_factory=list)

    def add(self, at_s: float, seen: Gauges) -> None:
        if seen.memory_bytes is not None:
            self.memory_bytes.append((at_s, seen.memory_bytes - (seen.kv_touched_bytes or 0.0)))
        if seen.kv_touched_bytes is not None:
            self.kv_touched_bytes.append((at_s, seen.kv_touched_bytes))
        if seen.kv_share is not None:
            self.kv_share.append((at_s, seen.kv_share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """The result of the mode. None: the server does not say."""

    minutes: float
    rate_rps: float
    num_sent: int
    num_whole: int
    ttft: Spread
    ttft_points: Sequence[tuple[float, float]]
    looks: Looks
    memory_trend: Trend | None
    ttft_trend: Trend
    kv_before: float | None
    kv_after: float | None
    complaint: str | None
    num_failed: int = 0  # neither served nor refused
    first_error: str = ""
    cut: Cut | None = None  # why it was not longer

    @property
    def kv_first_used_bytes(self) -> float:
        """Of the reserved KV cache, what became resident during the load."""
        touched = self.looks.kv_touched_bytes
        return touched[-1][1] - touched[0][1] if touched else 0.0

    @property
    def is_kv_back(self) -> bool | None:
        if self.kv_before is None or self.kv_after is None:
            return None
        return self.kv_after - self.kv_before < KV_SHARE_MIN

    @property
    def is_good(self) -> bool:
        """Nothing is known to be wrong, and nothing that could be told is undecided."""
        trends = [one for one in (self.memory_trend, self.ttft_trend) if one is not None]
        is_fine = all(one.verdict.is_good for one in trends)
        is_whole = self.cut is None and self.num_failed == 0
        return self.complaint is None and is_whole and is_fine and self.is_kv_back is not False


async def soak(
    bench: Bench,
    shape: Shape,
    *,
    minutes: float,
    rate_rps: float | None = None,
    read_memory: ReadMemory = lambda: None,
) -> Soak:
    """Load for so long, then an idle moment. Raises NothingServed.

    Where it is cut, judged is what was seen until then.
    """
    bench.target.check_length(shape.prompt.most, shape.output.most)
    alone = await measure_alone(bench, shape)
    rate = rate_rps or UTILISATION / alone.total_s
    await bench.wait_idle()
    before = await bench.page.look()
    looks = Looks()
    run = await _load(bench, shape, rate, 60 * minutes, looks, read_memory)
    await bench.wait_idle()
    after = await bench.page.look()
    return _judged(minutes, rate, run, looks, before, after)


async def _load(
    bench: Bench, shape: Shape, rate: float, seconds: float, looks: Looks, read: ReadMemory
) -> Run:
    looking = asyncio.create_task(_look_on(bench, looks, min(LOOK_S, seconds / LOOKS_MIN), read))
    try:
        return await bench.offer("soak", shape, rate, seconds=seconds, drain_s=DRAIN_S, keeps=True)
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


async def _look_on(bench: Bench, looks: Looks, every_s: float, read: ReadMemory) -> None:
    """Until cancelled."""
    start_s = bench.clock.now()
    while True:
        gauges = await bench.page.look()
        own = read()
        if own is not None:
            gauges = replace(gauges, memory_bytes=own)
        looks.add(bench.clock.now() - start_s, gauges)
        await asyncio.sleep(every_s)


def _judged(
    minutes: float, rate: float, run: Run, looks: Looks, before: Gauges, after: Gauges
) -> Soak:
    points = [
        (one.scheduled_s, one.first_token_s)
        for one in run.seen
        if one.is_whole and one.first_token_s is not None
    ]
    ttft = Spread.of(value for _, value in points)
    if ttft is None:
        raise NothingServed(f"Not one request was served: {first_error(run)}")
    memory = looks.memory_bytes
    failed = [one for one in run.seen if _is_failed(one, run)]
    return Soak(
        minutes=minutes if run.interrupted_s is None else run.interrupted_s / 60,
        rate_rps=rate,
        num_sent=len(run.seen),
        num_whole=sum(one.is_whole for one in run.seen),
        ttft=ttft,
        ttft_points=points,
        looks=looks,
        memory_trend=trend(memory, memory_growth_min(memory)) if memory else None,
        ttft_trend=trend(points, TTFT_SHARE_MIN * ttft.p50),
        kv_before=before.kv_share,
        kv_after=after.kv_share,
        complaint=run.lag.complaint(ttft.p50, ttft.p99),
        num_failed=len(failed),
        first_error=words_of(failed[0]) if failed else "",
        cut=run.cut,
    )


def _is_failed(one: Seen, run: Run) -> bool:
    """Neither served, nor refused, nor given up when the run was cut."""
    is_given_up = one.is_unfinished and run.cut is not None
    return not (one.is_whole or one.is_refused or is_given_up)


def memory_growth_min(memory: Sequence[tuple[float, float]]) -> float:
    """Bytes: a hundredth of what is held, and at least 8 MiB."""
    return max(MEMORY_BYTES_MIN, MEMORY_SHARE_MIN * memory[-1][1])
