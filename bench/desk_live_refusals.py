"""Ten thousand refusals in a row by a full line: how fast each is, and what they leave in memory.

One place and a line of two are held by requests that decode for ever; everything else that comes,
at a steady rate, is refused with `queue_full`. Resident memory of the server is sampled meanwhile.
Its KV cache is as large as one request, and written once over before the first sample, because
memory that is touched for the first time would look like memory that grows.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.client import ask, complete, completion_body
from bench.desk_live_bench import Finding, LiveBench
from bench.desk_live_judge import LAG_P99_MAX_S
from bench.desk_live_load import LoadProcess, Seen
from bench.desk_live_metrics import resident_bytes, slope
from bench.desk_live_mix import Ask, fresh_prompts
from bench.server_process import RunningServer
from kvota.sim.records import quantile

FLAGS = (
    "--max-model-len", "2048", "--kv-memory", "45MiB", "--max-running-requests", "1",
    "--max-waiting-queue", "2", "--queue-timeout-s", "600", "--request-timeout-s", "600",
)  # fmt: skip
NUM_HOLDERS = 3  # the one that runs, and the line
HOLDER_PROMPT, HOLDER_OUTPUT = 16, 2_000
NUM_REFUSALS, NUM_FIRST = 10_000, 1_000  # the first ones are not judged: caches fill
RATE_RPS = 150.0
SAMPLE_EVERY_S = 0.5
LEAD_S = 3.0  # for the holders, and then the load generator, to be there
HANG_S = 300.0
REFUSAL_P99_MAX_S = 0.050
# What a forgotten request would keep, at the very least; allocators breathe by less than this.
BYTES_PER_REFUSAL_MAX = 200.0

HEADER = (
    "| requests | refused | let in | otherwise | refusal p50, ms | p99, ms | slowest, ms "
    "| resident before, MiB | after, MiB | bytes per refusal | lag p99, ms |\n"
    "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


@dataclass(frozen=True, slots=True)
class Flood:
    """What the clients saw, and (seconds, resident bytes) of the server meanwhile."""

    seen: Sequence[Seen]
    resident: Sequence[tuple[float, float]]
    rate_rps: float

    @property
    def ends(self) -> Counter[str]:
        return Counter(one.code or ("let in" if one.is_whole else "no answer") for one in self.seen)

    @property
    def bytes_per_refusal(self) -> float:
        return slope(self.resident) / self.rate_rps

    def refusal_s(self, share: float) -> float:
        return quantile([one.ended_s for one in self.seen if one.code == "queue_full"], share)

    @property
    def lag_p99_s(self) -> float:
        return quantile([one.lag_s for one in self.seen], 0.99)

    def line(self) -> str:
        ends, mib = self.ends, 2**20
        rest = ends.total() - ends["queue_full"] - ends["let in"]
        return (
            f"| {len(self.seen)} | {ends['queue_full']} | {ends['let in']} | {rest} "
            f"| {1000 * self.refusal_s(0.5):.1f} | {1000 * self.refusal_s(0.99):.1f} "
            f"| {1000 * self.refusal_s(1.0):.1f} | {self.resident[0][1] / mib:.1f} "
            f"| {self.resident[-1][1] / mib:.1f} | {self.bytes_per_refusal:.0f} "
            f"| {1000 * self.lag_p99_s:.1f} |"
        )


def refusals(bench: LiveBench) -> Iterator[Finding]:
    """The row: table, targets."""
    with bench.server(FLAGS) as server:
        found = asyncio.run(_Crowd(bench, server).flood())
    bench.say(f"{HEADER}\n{found.line()}\n")
    yield from findings(found)


def findings(found: Flood) -> Iterator[Finding]:
    """The targets of refusals."""
    worst_s = found.refusal_s(0.99)
    yield Finding(
        worst_s < REFUSAL_P99_MAX_S,
        f"refusals are answered within {1000 * worst_s:.1f} ms at p99 (under 50)",
    )
    each = found.bytes_per_refusal
    yield Finding(
        each <= BYTES_PER_REFUSAL_MAX,
        f"resident memory grows by {each:.0f} bytes per refusal "
        f"(at most {BYTES_PER_REFUSAL_MAX:.0f}: flat)",
    )
    strange = {code: num for code, num in found.ends.items() if code not in _EXPECTED}
    yield Finding(not strange, f"{sum(strange.values())} ended otherwise {strange or ''}")
    if found.lag_p99_s > LAG_P99_MAX_S:
        yield Finding(False, "the generator was late: these figures say nothing of the server")


_EXPECTED = frozenset({"queue_full", "let in"})


@dataclass(slots=True)
class _Crowd:
    """Holders that keep the line full, and everybody else."""

    bench: LiveBench
    server: RunningServer
    _num_texts: int = 0

    async def flood(self) -> Flood:
        """The first refusals are neither timed nor is memory sampled meanwhile."""
        await complete(self.server.port, self._body())  # touches all of the KV cache
        num_asks = NUM_FIRST + round(self.bench.scale * NUM_REFUSALS)
        asks = [Ask(number / RATE_RPS, 16, 1) for number in range(num_asks)]
        is_over = asyncio.Event()
        holders = [asyncio.create_task(self._hold(is_over)) for _ in range(NUM_HOLDERS)]
        await asyncio.sleep(LEAD_S)
        with LoadProcess(self.bench.job(self.server, asks, HANG_S, "flood")) as load:
            reading = asyncio.create_task(asyncio.to_thread(load.seen))
            resident = await self._sampled(num_asks / RATE_RPS)
            await asyncio.sleep(LEAD_S)
            is_over.set()  # whoever slipped into the line while a holder came back is served now
            seen = await reading
        await asyncio.gather(*holders)
        return Flood(seen[NUM_FIRST:], resident, RATE_RPS)

    async def _sampled(self, seconds: float) -> list[tuple[float, float]]:
        """(seconds, resident bytes) from when the first refusals are over."""
        await asyncio.sleep(LEAD_S + NUM_FIRST / RATE_RPS)
        until_s = time.monotonic() + seconds - NUM_FIRST / RATE_RPS
        found = []
        while time.monotonic() < until_s:
            found.append((time.monotonic(), float(resident_bytes(self.server.pid))))
            await asyncio.sleep(SAMPLE_EVERY_S)
        return found

    async def _hold(self, is_over: asyncio.Event) -> None:
        """Ask again and again, so that there is always one more than the line can take."""
        while not is_over.is_set():
            asked = await ask(self.server.port, self._body())
            if await asked.ended_or(is_over) and not asked.answer.is_whole:
                await asyncio.sleep(0.02)  # somebody else had taken the place

    def _body(self) -> bytes:
        self._num_texts += 1
        one = Ask(0.0, HOLDER_PROMPT, HOLDER_OUTPUT)
        prompt = fresh_prompts([one], self.bench.vocab_size, self._num_texts)[0]
        return completion_body(self.server.model, prompt, HOLDER_OUTPUT)
