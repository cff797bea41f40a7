"""A server in virtual time whose capacity is known: it batches, and batches cost time.

A token of every running request takes `base_s` and `per_running_s` more for each that runs. Beyond
`places` requests wait in a line of at most `line_max`; whoever comes after that is refused. A
request of more than `long_from` prompt tokens adds `per_long_s` to everybody's tokens.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvota.tools.load.asked import UNFINISHED, Asked, Seen
from kvota.tools.load.bench import Bench, Unwatched
from kvota.tools.load.gauges import Gauges
from kvota.tools.load.prompts import TokenIds
from kvota.tools.load.target import Target
from tests.tools.load.virtual_time import LoopClock


@dataclass
class SimServer:
    """Looks like a sender and like a metrics page."""

    base_s: float = 0.02
    per_running_s: float = 0.01
    places: int = 1000
    line_max: int = 1000
    long_from: int = 1000
    per_long_s: float = 0.0
    memory: Callable[[float], float] = lambda _: 1e9
    kv_lost: float = 0.0  # share of the KV memory that is not given back
    kv_touched: Callable[[float], float | None] = lambda _: None
    num_running: int = 0
    num_waiting: int = 0
    num_long: int = 0
    clock: LoopClock = field(default_factory=LoopClock)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _began_s: float | None = None

    async def send(
        self, asked: Asked, origin_s: float | None = None, until_s: float | None = None
    ) -> Seen:
        now = self.clock.now()
        origin = now if origin_s is None else origin_s
        due_s = origin + asked.scheduled_s
        tokens: list[float] = []
        code = None
        if self.num_running >= self.places and self.num_waiting >= self.line_max:
            code = "queue_full"
        else:
            try:
                async with asyncio.timeout(None if until_s is None else until_s - now):
                    await self._serve(asked, due_s, tokens)
            except TimeoutError:
                code = UNFINISHED
        return Seen(
            scheduled_s=asked.scheduled_s,
            sent_s=now - due_s,
            ended_s=self.clock.now() - due_s,
            first_token_s=tokens[0] if tokens else None,
            token_s=tokens,
            status=503 if code == "queue_full" else 200,
            code=code,
            retry_after_s=1.0 if code == "queue_full" else None,
            output_tokens=len(tokens),
            max_tokens=asked.max_tokens,
            lane=asked.lane,
        )

    async def look(self) -> Gauges:
        if self._began_s is None:
            self._began_s = self.clock.now()
        at_s = self.clock.now() - self._began_s
        kv = 0.02 * self.num_running + (self.kv_lost if at_s > 60 else 0.0)
        num_open = self.num_running + self.num_waiting
        return Gauges(self.memory(at_s), kv, num_open, self.kv_touched(at_s))

    async def _serve(self, asked: Asked, due_s: float, tokens: list[float]) -> None:
        await self._place()
        is_long = len(asked.prompt) > self.long_from
        self.num_long += is_long
        try:
            for _ in range(asked.max_tokens):
                await asyncio.sleep(self._token_s)
                tokens.append(self.clock.now() - due_s)
        finally:
            self.num_running -= 1
            self.num_long -= is_long
            self._freed.set()

    async def _place(self) -> None:
        self.num_waiting += 1
        try:
            while self.num_running >= self.places:
                self._freed.clear()
                await self._freed.wait()
        finally:
            self.num_waiting -= 1
        self.num_running += 1

    @property
    def _token_s(self) -> float:
        others = self.per_running_s * self.num_running
        return self.base_s + others + self.per_long_s * self.num_long


def bench_on(server: SimServer, **fields: Any) -> Bench:
    """A bench whose sender, page and clock are the simulation's."""
    target = Target(
        url="http://127.0.0.1:1", model="sim", is_chat=False, is_forced=True, has_usage=True,
        prompts=TokenIds(range(300, 400)), max_model_len=8192,
    )  # fmt: skip
    return Bench(target, server, server, server.clock, Unwatched(), seed=1, **fields)
