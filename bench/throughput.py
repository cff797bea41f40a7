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
    genai: Sequence[float]
    first_token_ms: float  # kvota's median
    per_token_ms: float  # kvota's median

    @property
    def ratio(self) -> float:
        """Median of the rounds' own ratios: both sides of a round see the same machine."""
        return statistics.median(k / g for k, g in zip(self.kvota, self.genai, strict=True))


@dataclass(frozen=True, slots=True)
class Batching:
    """What running requests together gains, on kvota alone."""

    num_requests: int
    one_by_one: float
    together: float

    @property
    def gain(self) -> float:
        return self.together / self.one_by_one

    def line(self) -> str:
        return (
            f"{self.num_requests} requests together: {self.together:.0f} tokens/s, one at a time: "
            f"{self.one_by_one:.0f}, {self.gain:.1f} times faster"
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


def compare(
    server: RunningServer,
    genai: GenaiProcess,
    workload: Workload,
    concurrency: int,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
) -> Rates:
    """Alternate the two `rounds` times, each going first every other round. New prompts always."""
    ours, theirs = [], []
    answers: list[Answer] = []

    def measure_ours(number: int) -> None:
        seed = ("kvota", concurrency, number)
        latest = _together(server, workload, workload.prompts(concurrency, seed))
        answers.extend(latest)
        ours.append(tokens_per_s(latest))

    def measure_theirs(number: int) -> None:
        seed = ("genai", concurrency, number)
        theirs.append(genai.tokens_per_s(workload.prompts(concurrency, seed), workload.num_tokens))

    for number in range(rounds):
        pair = [measure_ours, measure_theirs]
        for measure in pair if number % 2 == 0 else reversed(pair):
            measure(number)
            tick()
    return Rates(
        concurrency,
        ours,
        theirs,
        first_token_ms=1000 * statistics.median(a.first_token_s for a in answers),
        per_token_ms=1000 * statistics.median(a.per_token_s for a in answers),
    )


def batching(server: RunningServer, workload: Workload, num_requests: int) -> Batching:
    """The same number of requests one after the other and all at once, with new prompts."""
    alone = [_body(server, workload, p) for p in workload.prompts(num_requests, "one by one")]
    one_by_one = _whole(asyncio.run(complete_one_by_one(server.port, alone)), workload)
    together = _together(server, workload, workload.prompts(num_requests, "together"))
    return Batching(num_requests, tokens_per_s(one_by_one), tokens_per_s(together))


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
