"""Short requests beside long ones: half the context window, one at a time and five at once.

Short requests come at a modest rate, three quarters of what could be served one by one, and a third
or less of what is served in batches. First they are alone. Then a long request is always in the
server, the next sent as soon as one has ended. Then five come at once, of which two may run, and
the short ones come until the last of the five has ended.

All of it is repeated, so that a slow minute of the machine is in all three, and pooled: three
repeats are some 250 short requests without, as many beside one long and more beside five, so two
or three are slower than the p99 (of one repeat it is the slowest). Within a repeat short requests
have the same lengths and moments in all three, since it is those that happen to come together that
are slow. All texts are fresh. The lone time of a long one is the median of one before each repeat.
It takes about 13 minutes.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.client import ask, complete, completion_body
from bench.desk_live_bench import Finding, LiveBench
from bench.desk_live_isolation_figures import HEADER, Phase, Repeat, findings
from bench.desk_live_load import LoadProcess
from bench.desk_live_mix import Ask, fresh_prompts, short_ones
from bench.server_process import RunningServer

LONG_CONCURRENCY = 2  # the server's default
NUM_QUEUED = 3
LONG_PROMPT, LONG_OUTPUT = 4_096, 64  # half of the default model's window of 8,192
FLAGS = (
    "--kv-memory", "1GiB", "--max-running-requests", "24",
    "--max-num-batched-tokens", "64", "--long-prefill-share", "0.18",
    "--queue-timeout-s", "200", "--request-timeout-s", "300",
)  # fmt: skip
UTILISATION = 3 / 4
NUM_REPEATS = 3
PHASE_S = 65.0
NUM_STRETCHES_MAX = 4  # of `PHASE_S` that five long ones may take
NUM_PROBES = 12
HANG_S = 310.0
LONE_AFTER_S = 5.0  # a long one that is alone has the whole step only some seconds after others
LONG_LEAD_S = 1.0  # a long request is being read before the first short one comes


def isolation(bench: LiveBench) -> Iterator[Finding]:
    """The row: lone times, table, targets."""
    num_many = LONG_CONCURRENCY + NUM_QUEUED
    alone, one = Phase("nothing"), Phase("one long at all times")
    five = Phase(f"{LONG_CONCURRENCY} long running, {NUM_QUEUED} in line", num_many)
    lone_s = []
    with bench.server(FLAGS) as server:
        runs = _Runs(bench, server)
        rate_rps = UTILISATION / runs.short_alone_s()
        for number in range(NUM_REPEATS):
            lone_s.append(runs.long_alone_s())
            short = ShortOnes(rate_rps, bench.scale * PHASE_S, number)
            asyncio.run(runs.short_ones(alone, short))
            asyncio.run(runs.beside_one(one, short))
            asyncio.run(runs.beside_many(five, short))
    bench.say(
        f"{rate_rps:.2f} short requests/s; {LONG_PROMPT:,} + {LONG_OUTPUT} tokens alone: "
        f"{', '.join(f'{one_s:.1f}' for one_s in lone_s)} s; {NUM_REPEATS} repeats, pooled\n"
    )
    bench.say(HEADER)
    for phase in (alone, one, five):
        bench.say(phase.line())
    bench.say("")
    yield from findings(median(lone_s), alone, one, five)


@dataclass(frozen=True, slots=True)
class ShortOnes:
    """The short requests of one repeat: of each stretch the same, whenever they are asked for."""

    rate_rps: float
    stretch_s: float
    number: int

    def asks(self, num_stretches: int = 1) -> list[Ask]:
        return [
            replace(one, due_s=one.due_s + stretch * self.stretch_s)
            for stretch in range(num_stretches)
            for one in short_ones(self.rate_rps, self.stretch_s, seed=10 * self.number + stretch)
        ]


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

    def long_alone_s(self) -> float:
        time.sleep(LONE_AFTER_S)
        return self._alone_s(Ask(0.0, LONG_PROMPT, LONG_OUTPUT, is_long=True))

    async def short_ones(self, phase: Phase, short: ShortOnes) -> None:
        """A repeat of short requests alone."""
        with self._load(phase, short.asks()) as load:
            phase.repeats.append(Repeat(await asyncio.to_thread(load.seen)))

    async def beside_one(self, phase: Phase, short: ShortOnes) -> None:
        """A repeat with one long request after another beside the short ones."""
        repeat, is_over = Repeat(), asyncio.Event()
        phase.repeats.append(repeat)
        long = asyncio.create_task(self._one_after_another(phase, is_over))
        await asyncio.sleep(LONG_LEAD_S)
        with self._load(phase, short.asks()) as load:
            repeat.short = await asyncio.to_thread(load.seen)
        is_over.set()
        await long

    async def beside_many(self, phase: Phase, short: ShortOnes) -> None:
        """A repeat with short requests for as long as any of the long ones, which came together,
        is there."""
        repeat = Repeat()
        phase.repeats.append(repeat)
        never = asyncio.Event()
        long = [asyncio.create_task(self._long(phase, never)) for _ in range(phase.num_together)]
        await asyncio.sleep(LONG_LEAD_S)
        with self._load(phase, short.asks(NUM_STRETCHES_MAX)) as load:
            until_s = max(await asyncio.gather(*long))
            load.send_no_more()
            seen = await asyncio.to_thread(load.seen)
        repeat.short = [one for one in seen if one.due_at_s < until_s]

    def _load(self, phase: Phase, asks: Sequence[Ask]) -> LoadProcess:
        seed = (phase.name, len(phase.repeats))
        return LoadProcess(self.bench.job(self.server, asks, HANG_S, seed))

    async def _one_after_another(self, phase: Phase, is_over: asyncio.Event) -> None:
        """The last one is left and not counted, unless it would be the repeat's only one."""
        long_s = phase.repeats[-1].long_s
        while not is_over.is_set() or not (long_s or phase.num_long_failed):
            await self._long(phase, is_over if long_s else asyncio.Event())

    async def _long(self, phase: Phase, is_over: asyncio.Event) -> float:
        """Ask once, until `is_over`. Returns when it ended."""
        asked = await ask(self.server.port, self._body(LONG_PROMPT, LONG_OUTPUT))
        answer = asked.answer
        if await asked.ended_or(is_over):
            if answer.is_whole:
                phase.repeats[-1].long_s.append(answer.ended_s - answer.sent_s)
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
