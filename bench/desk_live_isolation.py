"""Short requests beside long ones: half the context window, one at a time and five at once.

Short requests come at a modest rate, a third of what they could be served at one by one. First and
last they are alone; in between as many long requests as are wanted are in the server at all times,
each of fresh text and half the context window, the next sent as soon as one has ended.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.client import ask, complete, completion_body
from bench.desk_live_bench import Finding, LiveBench
from bench.desk_live_judge import LAG_P99_MAX_S
from bench.desk_live_load import LoadProcess, Seen
from bench.desk_live_mix import Ask, fresh_prompts, short_ones
from bench.server_process import RunningServer
from kvota.sim.records import quantile

LONG_CONCURRENCY = 2  # the server's default
NUM_QUEUED = 3
LONG_PROMPT, LONG_OUTPUT = 4_096, 64  # half of the default model's window of 8,192
FLAGS = (
    "--kv-memory", "1GiB", "--max-num-batched-tokens", "96",
    "--queue-timeout-s", "200", "--request-timeout-s", "300",
)  # fmt: skip
UTILISATION = 1 / 3
PHASE_S = 60.0
NUM_PROBES = 12
HANG_S = 310.0
LONG_LEAD_S = 1.0  # a long request is being read before the first short one comes
TTFT_RATIO_MAX = 1.5
LONG_RATIO_MAX = 2.0

HEADER = (
    "| beside the short ones | short requests | not served | TTFT p50, ms | TTFT p99, ms "
    "| long ended | median, s | slowest, s | lag p99, ms |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


@dataclass(slots=True)
class Phase:
    """What was seen with a number of long requests beside the short ones."""

    name: str
    short: list[Seen] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)  # sent to end, of those that were served
    num_long_failed: int = 0

    @property
    def ttft_p99_s(self) -> float:
        return self.ttft_s(0.99)

    def ttft_s(self, share: float) -> float:
        return quantile([one.first_s for one in self.short if one.first_s is not None], share)

    @property
    def num_lost(self) -> int:
        return sum(not one.is_whole for one in self.short)

    @property
    def lag_p99_s(self) -> float:
        return quantile([one.lag_s for one in self.short], 0.99)

    def line(self) -> str:
        long = self.long_s
        times = f"{median(long):.1f} | {max(long):.1f}" if long else "– | –"
        return (
            f"| {self.name} | {len(self.short)} | {self.num_lost} | {1000 * self.ttft_s(0.5):.0f} "
            f"| {1000 * self.ttft_p99_s:.0f} | {len(long)} | {times} "
            f"| {1000 * self.lag_p99_s:.1f} |"
        )


def isolation(bench: LiveBench) -> Iterator[Finding]:
    """The row: lone times, table, targets."""
    with bench.server(FLAGS) as server:
        runs = _Runs(bench, server)
        rate_rps = UTILISATION / runs.short_alone_s()
        lone_s = [runs.long_alone_s(number) for number in range(2)]
        bench.say(f"{rate_rps:.2f} short requests/s; {LONG_PROMPT:,} + {LONG_OUTPUT} tokens alone: "
                  f"{median(lone_s):.1f} s\n")  # fmt: skip
        alone, one = Phase("nothing"), Phase("one long at all times")
        five = Phase(f"{LONG_CONCURRENCY} long running, {NUM_QUEUED} in line")
        runs.measure(alone, rate_rps, PHASE_S / 2, num_long=0)
        runs.measure(one, rate_rps, PHASE_S, num_long=1)
        runs.measure(five, rate_rps, PHASE_S, num_long=LONG_CONCURRENCY + NUM_QUEUED)
        runs.measure(alone, rate_rps, PHASE_S / 2, num_long=0)
    bench.say(HEADER)
    for phase in (alone, one, five):
        bench.say(phase.line())
    bench.say("")
    yield from findings(median(lone_s), alone, one, five)


def findings(lone_s: float, alone: Phase, one: Phase, five: Phase) -> Iterator[Finding]:
    """The targets of isolation."""
    num_long = LONG_CONCURRENCY + NUM_QUEUED
    for phase, num_shared in ((one, 1), (five, num_long)):
        ratio = phase.ttft_p99_s / alone.ttft_p99_s if alone.ttft_p99_s else float("inf")
        yield Finding(
            ratio <= TTFT_RATIO_MAX,
            f"{phase.name}: p99 TTFT of the short ones {ratio:.2f} × without (at most 1.5)",
        )
        slow = median(phase.long_s) / (num_shared * lone_s) if phase.long_s else float("inf")
        alike = "its lone time" if num_shared == 1 else f"{num_shared} lone times in a row"
        yield Finding(
            slow <= LONG_RATIO_MAX,
            f"{phase.name}: a long one takes {slow:.2f} × {alike} (at most 2)",
        )
    num_lost = sum(one.num_lost + one.num_long_failed for one in (alone, one, five))
    yield Finding(num_lost == 0, f"{num_lost} requests were not served (0)")
    if max(phase.lag_p99_s for phase in (alone, one, five)) > LAG_P99_MAX_S:
        yield Finding(False, "the generator was late: these figures say nothing of the server")


@dataclass(slots=True)
class _Runs:
    """Measurements on one server; every text is new."""

    bench: LiveBench
    server: RunningServer
    _num_texts: int = 0

    def short_alone_s(self) -> float:
        """Mean time of a short request that is alone."""
        asks = short_ones(NUM_PROBES, 1.0, seed=5)
        return sum(self._alone_s(one) for one in asks) / len(asks)

    def long_alone_s(self, number: int) -> float:
        return self._alone_s(Ask(0.0, LONG_PROMPT, LONG_OUTPUT, is_long=True))

    def measure(self, phase: Phase, rate_rps: float, seconds: float, num_long: int) -> None:
        """Add to `phase` what short requests see for some seconds beside `num_long` long ones."""
        asyncio.run(self._measure(phase, rate_rps, self.bench.scale * seconds, num_long))

    async def _measure(self, phase: Phase, rate_rps: float, seconds: float, num_long: int) -> None:
        is_over = asyncio.Event()
        long = [asyncio.create_task(self._keep_long(phase, is_over)) for _ in range(num_long)]
        if long:
            await asyncio.sleep(LONG_LEAD_S)
        asks = short_ones(rate_rps, seconds, seed=len(phase.short))
        job = self.bench.job(self.server, asks, HANG_S, (phase.name, len(phase.short)))
        with LoadProcess(job) as load:
            phase.short += await asyncio.to_thread(load.seen)
        is_over.set()
        await asyncio.gather(*long)

    async def _keep_long(self, phase: Phase, is_over: asyncio.Event) -> None:
        """One long request after another until `is_over`; the last one is left, not counted."""
        while not is_over.is_set():
            asked = await ask(self.server.port, self._body(LONG_PROMPT, LONG_OUTPUT))
            if not await asked.ended_or(is_over):
                return
            if asked.answer.is_whole:
                phase.long_s.append(asked.answer.ended_s - asked.answer.sent_s)
            else:
                phase.num_long_failed += 1
                await asyncio.sleep(0.1)

    def _alone_s(self, one: Ask) -> float:
        body = self._body(one.prompt_tokens, one.output_tokens)
        started_s = time.perf_counter()
        asyncio.run(complete(self.server.port, body))
        return time.perf_counter() - started_s

    def _body(self, prompt_tokens: int, output_tokens: int) -> bytes:
        self._num_texts += 1
        one = Ask(0.0, prompt_tokens, output_tokens)
        prompt: Sequence[int] = fresh_prompts([one], self.bench.vocab_size, self._num_texts)[0]
        return completion_body(self.server.model, prompt, output_tokens)
