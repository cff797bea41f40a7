"""A server whose timing is known: it writes down when each request came and each token left.

    python -m bench.tester_vs_aiperf_server --port 8000

    request k   came ─ empty event ─ first token after 200, 250 … 400 ms, by k
                                   ─ each next 20 ms later, every eighth 60 ms: a stall
                                   ─ 40 ms after the last: usage, [DONE]

The empty event, the usage and the end are there to be passed over: none of them is a token. Who
counts one is off by more than 5 %. GET /told gives what was written down, on the clock that all
processes of a machine share, and forgets it.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import uvloop

from tests.support.fake_backend import (
    DONE,
    FakeBackend,
    Received,
    Wire,
    chunk,
    event,
    piece,
    usage_of,
)

FIRST_S = 0.2
FIRST_STEP_S = 0.05
NUM_FIRSTS = 5
GAP_S = 0.02
STALL_S = 0.06
STALL_EVERY = 8
USAGE_AFTER_S = 0.04


def token_moments(number: int, num_tokens: int) -> list[float]:
    """When the tokens of the `number`-th request leave, in seconds from its arrival."""
    moments = [FIRST_S + FIRST_STEP_S * (number % NUM_FIRSTS)]
    for at in range(1, num_tokens):
        moments.append(moments[-1] + (GAP_S if at % STALL_EVERY else STALL_S))
    return moments


@dataclass
class KnownTiming:
    """A script for FakeBackend. `told`: of each request when it came and when its tokens left."""

    told: list[tuple[float, list[float]]] = field(default_factory=list)
    num_asked: int = 0

    async def answer(self, asked: Received, wire: Wire) -> None:
        came_s = time.perf_counter()
        num_tokens = int(asked.json["max_tokens"])
        moments = token_moments(self.num_asked, num_tokens)
        self.num_asked += 1
        left_s: list[float] = []
        self.told.append((came_s, left_s))
        await wire.head()
        await wire.send(_text(asked.path, ""))
        for at, moment in enumerate(moments):
            await _sleep_until(came_s + moment)
            left_s.append(time.perf_counter())
            await wire.send(_text(asked.path, f" w{at}", is_last=at == num_tokens - 1))
        await _sleep_until(came_s + moments[-1] + USAGE_AFTER_S)
        num_prompt = len(asked.json["prompt"].split())
        await wire.send(event(chunk(asked.path, [], usage=usage_of(num_prompt, num_tokens))))
        await wire.send(DONE)
        await wire.end()

    async def tell(self, asked: Received, wire: Wire) -> None:
        told, self.told = self.told, []
        await wire.json(told)


def _text(path: str, text: str, *, is_last: bool = False) -> bytes:
    choice: dict[str, Any] = piece(path, text, 0, "length" if is_last else None)
    return event(chunk(path, [choice]))


async def _sleep_until(moment_s: float) -> None:
    await asyncio.sleep(max(0.0, moment_s - time.perf_counter()))


async def _serve(port: int) -> None:
    timing = KnownTiming()
    backend = FakeBackend()
    backend.keeps_received = False
    backend.script = timing.answer
    backend.overrides["/told"] = timing.tell
    await backend.listen(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(_serve(parser.parse_args().port))
