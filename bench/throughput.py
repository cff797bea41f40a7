"""Output tokens per second: kvota over HTTP against openvino-genai in process, and itself."""

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.client import (
    Answer,
    BenchFailed,
    complete_one_by_one,
    complete_together,
    completion_body,
)
from bench.genai_process import GenaiProcess
from bench.server_process import RunningServer
from bench.workload import prompts

PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Rates:
    """One number of sequences at once; a value per round, in tokens per second."""

    concurrency: int
    kvota: Sequence[float]
    unguessed: Sequence[float]  # kvota without speculation
    genai: Sequence[float]
    first_token_ms: float  # kvota's median
    per_token_ms: float  # kvota's median

    @property
    def ratio(self) -> float:
        return _median_ratio(self.kvota, self.genai)

    @property
    def ratio_unguessed(self) -> float:
        return _median_ratio(self.unguessed, self.genai)


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

    def short(self) -> "Workload":
        """A few tokens, to warm up with."""
        return Workload(self.vocab_size, 8)

    def prompts(self, concurrency: int, seed: object) -> list[Sequence[int]]:
        return prompts(concurrency, PROMPT_TOKENS, self.vocab_size, (self.num_tokens, seed))


@dataclass(frozen=True, slots=True)
class Contestants:
    """The same model three times: as kvota serves it, without speculation, and the yardstick."""

    kvota: RunningServer
    unguessed: RunningServer
    genai: GenaiProcess


def compare(
    contestants: Contestants,
    workload: Workload,
    concurrency: int,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
) -> Rates:
    """Measure all three `rounds` times, each going first in its turn. New prompts every round,
    the same for both of kvota's."""
    ours: list[float] = []
    unguessed: list[float] = []
    theirs: list[float] = []
    answers: list[Answer] = []

    def measure_kvota(number: int) -> None:
        latest = measured(contestants.kvota, number)
        answers.extend(latest)
        ours.append(tokens_per_s(latest))

    def measure_unguessed(number: int) -> None:
        unguessed.append(tokens_per_s(measured(contestants.unguessed, number)))

    def measured(server: RunningServer, number: int) -> list[Answer]:
        seed = ("kvota", concurrency, number)
        return _together(server, workload, workload.prompts(concurrency, seed))

    def measure_genai(number: int) -> None:
        own = workload.prompts(concurrency, ("genai", concurrency, number))
        theirs.append(contestants.genai.tokens_per_s(own, workload.num_tokens))

    measures = [measure_kvota, measure_genai, measure_unguessed]
    for number in range(rounds):
        first = number % len(measures)
        for measure in measures[first:] + measures[:first]:
            measure(number)
            tick()
    return Rates(
        concurrency,
        ours,
        unguessed,
        theirs,
        first_token_ms=1000 * statistics.median(a.first_token_s for a in answers),
        per_token_ms=1000 * statistics.median(a.per_token_s for a in answers),
    )


def batching(
    server: RunningServer, workload: Workload, num_requests: int, *, guesses: bool
) -> Batching:
    """The same number of requests one after the other and all at once, with new prompts."""
    alone = [_body(server, workload, p) for p in workload.prompts(num_requests, "one by one")]
    one_by_one = _whole(asyncio.run(complete_one_by_one(server.port, alone)), workload)
    together = _together(server, workload, workload.prompts(num_requests, "together"))
    return Batching(num_requests, tokens_per_s(one_by_one), tokens_per_s(together), guesses)


def tokens_per_s(answers: Sequence[Answer]) -> float:
    """All output tokens over the time from the first request sent to the last token read."""
    seconds = max(a.last_s for a in answers) - min(a.sent_s for a in answers)
    return sum(a.num_tokens for a in answers) / seconds


def _together(
    server: RunningServer, workload: Workload, own_prompts: Sequence[Sequence[int]]
) -> list[Answer]:
    bodies = [_body(server, workload, prompt) for prompt in own_prompts]
    return _whole(asyncio.run(complete_together(server.port, bodies)), workload)


def _body(server: RunningServer, workload: Workload, prompt: Sequence[int]) -> bytes:
    return completion_body(server.model, prompt, workload.num_tokens)


def _whole(answers: list[Answer], workload: Workload) -> list[Answer]:
    """Nothing was cut short, and no prefix cache helped."""
    for answer in answers:
        if answer.num_tokens != workload.num_tokens or answer.num_prompt_tokens != PROMPT_TOKENS:
            raise BenchFailed(f"an answer of another length than asked for: {answer}")
        if answer.num_cached_tokens:
            raise BenchFailed(f"a prompt that should be new was cached: {answer}")
    return answers
