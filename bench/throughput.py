"""Output tokens per second: kvota over HTTP against openvino-genai in both ways, and itself.

"N at once" is what load testers mean by it: N clients, each sending one request after another
(`aiperf --concurrency`, `vllm bench serve --max-concurrency`). What counts is the time in which all
of them have one running (`lasting.py`).
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.client import (
    Answer,
    BenchFailed,
    complete_in_turn,
    complete_one_by_one,
    complete_together,
    completion_body,
    generated_tokens,
)
from bench.genai_process import GenaiProcess
from bench.lasting import Mark, rate, wanted_marks
from bench.server_process import RunningServer
from bench.workload import prompts

PROMPT_TOKENS = 64
REQUESTS_WANTED = 96  # in all
EACH_MIN, EACH_MAX = 3, 8


@dataclass(frozen=True, slots=True)
class Rates:
    """One number of clients at once; a value per round, in tokens per second."""

    concurrency: int
    kvota: Sequence[float]
    unguessed: Sequence[float]  # kvota without speculation
    genai: Sequence[float]  # in process
    genai_over_http: Sequence[float]
    first_token_ms: float  # kvota's median
    per_token_ms: float  # kvota's median

    @property
    def ratio(self) -> float:
        return _median_ratio(self.kvota, self.genai)

    @property
    def ratio_unguessed(self) -> float:
        return _median_ratio(self.unguessed, self.genai)

    @property
    def ratio_over_http(self) -> float:
        return _median_ratio(self.kvota, self.genai_over_http)


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the rounds' own ratios: all sides of a round see the same machine."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class Batching:
    """What running requests together gains, on kvota alone; without speculation unless said."""

    num_requests: int
    one_by_one: float
    together: float
    guesses: bool = False

    @property
    def gain(self) -> float:
        return self.together / self.one_by_one

    def line(self) -> str:
        return (
            f"{self.num_requests} requests together: {self.together:.0f} tokens/s, one at a time: "
            f"{self.one_by_one:.0f}, {self.gain:.1f} times faster"
            f"{' (both with speculation)' if self.guesses else ''}"
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_tokens` are generated after every prompt, whatever the model would like to say."""

    vocab_size: int
    num_tokens: int = 128
    requests_wanted: int = REQUESTS_WANTED

    def short(self) -> "Workload":
        """A few tokens, to warm up with."""
        return replace(self, num_tokens=8)

    def num_requests(self, num_clients: int) -> int:
        """Of all clients: each sends its second and third while the load lasts."""
        wanted = min(self.requests_wanted, EACH_MAX * num_clients)
        return max(wanted, EACH_MIN * num_clients)

    def prompts(self, num_prompts: int, seed: object) -> list[Sequence[int]]:
        return prompts(num_prompts, PROMPT_TOKENS, self.vocab_size, (self.num_tokens, seed))


@dataclass(frozen=True, slots=True)
class Contestants:
    """The same model four times: as kvota serves it, without speculation, and the yardstick in
    process and, as kvota is measured, over HTTP."""

    kvota: RunningServer
    unguessed: RunningServer
    genai: GenaiProcess
    genai_over_http: RunningServer


def compare(
    contestants: Contestants,
    workload: Workload,
    concurrency: int,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
) -> Rates:
    """Measure all four `rounds` times, the next of them going first in every round. New prompts
    every round, the same for both of kvota's and for both of openvino-genai's."""
    answers: list[Answer] = []

    def kvota(number: int) -> float:
        latest, tokens_per_s = loaded(contestants.kvota, "kvota", number)
        answers.extend(latest)
        return tokens_per_s

    def unguessed(number: int) -> float:
        return loaded(contestants.unguessed, "kvota", number)[1]

    def genai(number: int) -> float:
        own = new_prompts("genai", number)
        return contestants.genai.tokens_per_s(own, workload.num_tokens, concurrency)

    def genai_over_http(number: int) -> float:
        return loaded(contestants.genai_over_http, "genai", number)[1]

    def loaded(server: RunningServer, whose: str, number: int) -> tuple[list[Answer], float]:
        bodies = _bodies(server, workload, new_prompts(whose, number))
        latest, tokens_per_s = asyncio.run(under_load(server.port, bodies, concurrency))
        return _whole(latest, workload), tokens_per_s

    def new_prompts(whose: str, number: int) -> list[Sequence[int]]:
        num_prompts = workload.num_requests(concurrency)
        return workload.prompts(num_prompts, (whose, concurrency, number))

    measures = (kvota, genai, unguessed, genai_over_http)
    found: dict[Callable[[int], float], list[float]] = {measure: [] for measure in measures}
    for number in range(rounds):
        first = number % len(measures)
        for measure in measures[first:] + measures[:first]:
            found[measure].append(measure(number))
            tick()
    return Rates(
        concurrency,
        found[kvota],
        found[unguessed],
        found[genai],
        found[genai_over_http],
        first_token_ms=1000 * statistics.median(a.first_token_s for a in answers),
        per_token_ms=1000 * statistics.median(a.per_token_s for a in answers),
    )


def batching(
    server: RunningServer, workload: Workload, num_requests: int, *, guesses: bool
) -> Batching:
    """The same number of requests one after the other and all at once, with new prompts."""
    alone = _bodies(server, workload, workload.prompts(num_requests, "one by one"))
    one_by_one = _whole(asyncio.run(complete_one_by_one(server.port, alone)), workload)
    at_once = _bodies(server, workload, workload.prompts(num_requests, "together"))
    together = _whole(asyncio.run(complete_together(server.port, at_once)), workload)
    return Batching(num_requests, tokens_per_s(one_by_one), tokens_per_s(together), guesses)


async def under_load(
    port: int, bodies: Sequence[bytes], num_clients: int
) -> tuple[list[Answer], float]:
    """All answers, and the tokens per second while the load lasted, as the server counts them."""
    numbers = wanted_marks(num_clients, len(bodies))
    begun, over = asyncio.Event(), asyncio.Event()

    def sent() -> Iterator[bytes]:
        for number, body in enumerate(bodies, 1):
            for wanted, moment in zip(numbers, (begun, over), strict=True):
                if number == wanted:
                    moment.set()
            yield body

    async def mark(moment: asyncio.Event) -> Mark:
        await moment.wait()
        return Mark(await generated_tokens(port), time.perf_counter())

    answers, start, end = await asyncio.gather(
        complete_in_turn(port, sent(), num_clients), mark(begun), mark(over)
    )
    return answers, rate(start, end)


def tokens_per_s(answers: Sequence[Answer]) -> float:
    """All output tokens over the time from the first request sent to the last token read."""
    seconds = max(a.last_s for a in answers) - min(a.sent_s for a in answers)
    return sum(a.num_tokens for a in answers) / seconds


def _bodies(
    server: RunningServer, workload: Workload, own_prompts: Sequence[Sequence[int]]
) -> list[bytes]:
    return [completion_body(server.model, prompt, workload.num_tokens) for prompt in own_prompts]


def _whole(answers: list[Answer], workload: Workload) -> list[Answer]:
    """Nothing was cut short, and no prefix cache helped."""
    for answer in answers:
        if answer.num_tokens != workload.num_tokens or answer.num_prompt_tokens != PROMPT_TOKENS:
            raise BenchFailed(f"an answer of another length than asked for: {answer}")
        if answer.num_cached_tokens:
            raise BenchFailed(f"a prompt that should be new was cached: {answer}")
    return answers
