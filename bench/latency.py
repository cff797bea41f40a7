"""Time to the first token: what HTTP and engine add to the model, and what a known prefix saves."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.client import complete, completion_body
from bench.loaded import step
from bench.server_process import RunningServer
from bench.workload import prompts
from kvota.model.executor import OpenVinoExecutor

SETTLE_S = 0.2
LONE_TOKENS = 64
PREFIX_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class LoneRequest:
    """Median milliseconds of a lone prompt: over HTTP, and the model's own step."""

    http_ms: float
    step_ms: float

    @property
    def ratio(self) -> float:
        return self.http_ms / self.step_ms

    def line(self) -> str:
        return (
            f"first token of a lone {LONE_TOKENS}-token prompt: {self.http_ms:.1f} ms over HTTP, "
            f"{self.step_ms:.1f} ms in the model, ratio {self.ratio:.2f}"
        )


@dataclass(frozen=True, slots=True)
class RepeatedPrefix:
    """Median milliseconds to the first token, prefix unknown and known."""

    cold_ms: float
    warm_ms: float

    @property
    def speedup(self) -> float:
        return self.cold_ms / self.warm_ms

    def line(self) -> str:
        return (
            f"first token after a {PREFIX_TOKENS:,}-token prefix: {self.cold_ms:.0f} ms new, "
            f"{self.warm_ms:.1f} ms repeated, {self.speedup:.1f} times sooner"
        )


def lone_request(
    server: RunningServer, executor: OpenVinoExecutor, vocab_size: int, rounds: int
) -> LoneRequest:
    """Alternate the two, so that a noisy machine disturbs both alike.

    Before each, the other side's compute threads get time to stop waiting actively for work. In
    the model, as in the server, the step before was one of a single token: a step of another shape
    than the last costs OpenVINO's kernels some 4 ms of preparation, wherever it is run.
    """
    over_http, in_model = [], []
    for number in range(rounds + 1):  # the first one warms up and is dropped
        http_prompt, own_prompt = prompts(2, LONE_TOKENS, vocab_size, ("lone", number))
        time.sleep(SETTLE_S)
        over_http.append(_first_token_s(server, http_prompt))
        step(executor, own_prompt[:1], LONE_TOKENS)
        time.sleep(SETTLE_S)
        start_s = time.perf_counter()
        step(executor, own_prompt)
        in_model.append(time.perf_counter() - start_s)
    return LoneRequest(_median_ms(over_http[1:]), _median_ms(in_model[1:]))


def repeated_prefix(server: RunningServer, vocab_size: int, rounds: int) -> RepeatedPrefix:
    """Each round sends a new prefix twice, with a different question after it."""
    cold, warm = [], []
    for number in range(rounds + 1):
        (prefix,) = prompts(1, PREFIX_TOKENS, vocab_size, ("prefix", number))
        first, second = prompts(2, 16, vocab_size, ("question", number))
        cold.append(_first_token_s(server, [*prefix, *first]))
        warm.append(_first_token_s(server, [*prefix, *second]))
    return RepeatedPrefix(_median_ms(cold[1:]), _median_ms(warm[1:]))


def _first_token_s(server: RunningServer, prompt: Sequence[int]) -> float:
    body = completion_body(server.model, prompt, 2)
    return asyncio.run(complete(server.port, body)).first_token_s


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1000
