"""Backends that do what real ones do on their worst days, chosen by a seeded chance.

Every answer of a backend is drawn from `MISCHIEF`: most are good, the rest break in one of the ways
that a socket, a server or an engine can break. While it is `is_calm`, all are good. `num_active`
says how many answers it is still working on, which is what a gateway has to bring to zero.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random
from typing import Final

from tests.support.fake_backend import (
    FakeBackend,
    Received,
    Script,
    Wire,
    begins,
    fails,
    hangs_up,
    never_answers,
    num_choices,
    ordinary_events,
    says,
    whole_answer,
)

TOKENS_MAX: Final = 24
PAUSE_MAX_S: Final = 0.01  # between two tokens
PORT_TRIES: Final = 200
PORT_TRY_EVERY_S: Final = 0.05
MISCHIEF: Final = (  # weight, what
    (300, "answer"),
    (4, "hang up"),
    (3, "never answer"),
    (3, "cut"),
    (3, "reset"),
    (3, "stall"),
    (3, "error 500"),
    (3, "full"),
    (2, "garbage"),
    (2, "error event"),
    (2, "no end"),
)
_ERROR: Final = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'


class ChaoticBackend:
    """One fake backend and the chance that rules it. Use it as its FakeBackend is used."""

    def __init__(self, name: str, chance: Random) -> None:
        self.name = name
        self.fake = FakeBackend()
        self.fake.keeps_received = False
        self.fake.script = self._answer
        self.is_calm = False
        self.is_down = False
        self.num_active = 0
        self.num_kills = 0
        self._chance = chance

    @property
    def url(self) -> str:
        return self.fake.url

    async def start(self) -> None:
        await self.fake.listen()

    async def stop(self) -> None:
        if not self.is_down:
            await self.fake.stop()

    async def kill(self, away_s: float) -> None:
        """Cut everything, be nobody for a while, and come back on the same port."""
        self.is_down = True
        self.num_kills += 1
        port = self.fake.port
        try:
            await self.fake.stop()
            await asyncio.sleep(away_s)
        finally:
            await self._listen_again(port)
            self.is_down = False

    async def _listen_again(self, port: int) -> None:
        """Somebody's outgoing connection may sit on the port for a moment. Raises OSError if it
        does not leave."""
        for _ in range(PORT_TRIES - 1):
            with contextlib.suppress(OSError):
                return await self.fake.listen(port)
            await asyncio.sleep(PORT_TRY_EVERY_S)
        await self.fake.listen(port)

    async def be_ill(self, for_s: float) -> None:
        """Its health page says so for a while; it goes on answering."""
        self.fake.gauges.is_healthy = False
        try:
            await asyncio.sleep(for_s)
        finally:
            self.fake.gauges.is_healthy = True

    async def _answer(self, asked: Received, wire: Wire) -> None:
        self.num_active += 1
        try:
            await self._choose()(asked, wire)
        finally:
            self.num_active -= 1

    def _choose(self) -> Script:
        if self.is_calm:
            return self._good
        weights, kinds = zip(*MISCHIEF, strict=True)
        kind = self._chance.choices(kinds, weights)[0]
        at = self._chance.randint(0, 12)
        return {
            "answer": self._good,
            "hang up": hangs_up,
            "never answer": never_answers,
            "cut": begins(at, lambda wire: wire.drop()),
            "reset": begins(at, lambda wire: wire.reset()),
            "stall": begins(at, lambda wire: wire.stall()),
            "error 500": fails(500),
            "full": fails(503, headers={"retry-after": "1"}),
            "garbage": says(b"data: {not json\n\n"),
            "error event": begins(at, _says_error),
            "no end": begins(at, lambda wire: wire.end()),
        }[kind]

    async def _good(self, asked: Received, wire: Wire) -> None:
        """An ordinary answer; a stream's tokens are not quite evenly spaced."""
        wanted = asked.json
        budget = wanted.get("max_completion_tokens") or wanted.get("max_tokens") or TOKENS_MAX
        num_tokens = min(self._chance.randint(1, TOKENS_MAX), budget)
        pause_s = self._chance.random() * PAUSE_MAX_S
        choices = num_choices(wanted)
        if not wanted.get("stream"):
            await wire.json(whole_answer(asked.path, num_tokens, choices))
            return
        has_usage = bool((wanted.get("stream_options") or {}).get("include_usage"))
        await wire.head()
        for event in ordinary_events(asked.path, num_tokens, choices, has_usage):
            await wire.pause(pause_s)
            if wire.is_gone.is_set():
                return
            await wire.send(event)
        await wire.end()


async def _says_error(wire: Wire) -> None:
    await wire.send(_ERROR)
    await wire.end()


class Monkey:
    """Kills backends and makes them ill, one trouble after another, until cancelled."""

    def __init__(self, backends: list[ChaoticBackend], chance: Random, every_s: float) -> None:
        self._backends = backends
        self._chance = chance
        self._every_s = every_s

    async def run(self) -> None:
        async with asyncio.TaskGroup() as troubles:
            while True:
                await asyncio.sleep(self._chance.uniform(0.5, 1.5) * self._every_s)
                backend = self._chance.choice(self._backends)
                away_s = self._chance.uniform(0.05, 1.0) * self._every_s
                if backend.is_down:
                    continue
                trouble = backend.kill if self._chance.random() < 0.7 else backend.be_ill
                troubles.create_task(trouble(away_s))


@contextlib.asynccontextmanager
async def serving(backends: list[ChaoticBackend]) -> AsyncIterator[None]:
    """All of them listen as long as the block."""
    for backend in backends:
        await backend.start()
    try:
        yield
    finally:
        for backend in backends:
            await backend.stop()
