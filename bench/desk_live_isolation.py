"""Short requests beside long ones: half the context window, one at a time and five at once.

Short requests come at a modest rate, three quarters of what could be served one by one, and a third
or less of what is served in batches. First and last they are alone. In between, a long request is
always in the server, the next sent as soon as one has ended; or five come at once, of which two may
run, and the short ones count until the last of the five has ended. All texts are fresh.
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
    "--kv-memory", "1GiB", "--max-running-requests", "24",
    "--max-num-batched-tokens", "64", "--long-prefill-share", "0.18",
    "--queue-timeout-s", "200", "--request-timeout-s", "300",
)  # fmt: skip
UTILISATION = 3 / 4
PHASE_S = 80.0
NUM_PROBES = 12
HANG_S = 310.0
LONE_AFTER_S = 5.0  # a long one that is alone has the whole step only some seconds after others
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
    is_together: bool = False  # all long ones were sent at once
    short: list[Seen] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)  # sent to end, of those that were served
    num_long_failed: int = 0

    @property
    def ttft_p99_s(self) -> float:
        return self.ttft_s(0.99)

    def ttft_s(self, share: float) -> float:
        return quantile([one.first_s for one in self.short if one.first_s is not None], share)

    @property
    def long_time_s(self) -> float:
        """Of one after another, the median; of those sent together, until the last had ended."""
        if not self.long_s:
            return float("inf")
        return max(self.long_s) if self.is_together else median(self.long_s)

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
        five = Phase(f"{LONG_CONCURRENCY} long running, {NUM_QUEUED} in line", is_together=True)
        asyncio.run(runs.short_ones(alone, rate_rps, PHASE_S / 2))
        asyncio.run(runs.beside_one(one, rate_rps))
        asyncio.run(runs.beside_many(five, rate_rps, LONG_CONCURRENCY + NUM_QUEUED))
        asyncio.run(runs.short_ones(alone, rate_rps, PHASE_S / 2))
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
        slow = phase.long_time_s / (num_shared * lone_s)
        whose = "a long one takes" if num_shared == 1 else "all of them take"
        yield Finding(
            slow <= LONG_RATIO_MAX,
            f"{phase.name}: {whose} {slow:.2f} × {num_shared} lone times (at most 2)",
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
        time.sleep(LONE_AFTER_S)
        return self._alone_s(Ask(0.0, LONG_PROMPT, LONG_OUTPUT, is_long=True))

    async def short_ones(self, phase: Phase, rate_rps: float, seconds: float) -> None:
        """Add what short requests see for some seconds to `phase`."""
        asks = short_ones(rate_rps, self.bench.scale * seconds, seed=len(phase.short))
        job = self.bench.job(self.server, asks, HANG_S, (phase.name, len(phase.short)))
        with LoadProcess(job) as load:
            phase.short += await asyncio.to_thread(load.seen)

    async def beside_one(self, phase: Phase, rate_rps: float) -> None:
        """Short requests, with one long request after another beside them."""
        is_over = asyncio.Event()
        long = asyncio.create_task(self._one_after_another(phase, is_over))
        await asyncio.sleep(LONG_LEAD_S)
        await self.short_ones(phase, rate_rps, PHASE_S)
        is_over.set()
        await long

    async def beside_many(self, phase: Phase, rate_rps: float, num_long: int) -> None:
        """Short requests, as long as any of `num_long` long ones that came together is there."""
        long = [asyncio.create_task(self._long(phase, asyncio.Event())) for _ in range(num_long)]
        await asyncio.sleep(LONG_LEAD_S)
        await self.short_ones(phase, rate_rps, PHASE_S)
        until_s = max(await asyncio.gather(*long))
        phase.short = [one for one in phase.short if one.due_at_s < until_s]

    async def _one_after_another(self, phase: Phase, is_over: asyncio.Event) -> None:
        """The last one is left and not counted, unless it would be the only one."""
        while not is_over.is_set() or not (phase.long_s or phase.num_long_failed):
            await self._long(phase, is_over if phase.long_s else asyncio.Event())

    async def _long(self, phase: Phase, is_over: asyncio.Event) -> float:
        """Ask once, until `is_over`. Returns when it ended."""
        asked = await ask(self.server.port, self._body(LONG_PROMPT, LONG_OUTPUT))
        answer = asked.answer
        if await asked.ended_or(is_over):
            if answer.is_whole:
                phase.long_s.append(answer.ended_s - answer.sent_s)
            else:
                phase.num_long_failed += 1
        return answer.ended_s

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
