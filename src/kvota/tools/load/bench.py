"""What the five modes have in common: one server, requests of wanted lengths, a bar to watch."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from kvota.core.clock import Clock
from kvota.core.errors import KvotaError
from kvota.tools.load.asked import CONNECTION, Asked, Seen
from kvota.tools.load.gauges import Page
from kvota.tools.load.generator import Generator, Run
from kvota.tools.load.prompts import Prompts
from kvota.tools.load.schedule import Due, Shape, one_by_one, open_loop
from kvota.tools.load.sender import Send
from kvota.tools.load.target import Target

IDLE_PATIENCE_S = 20.0
IDLE_LOOK_S = 0.1
ANSWER_PATIENCE_S = 600.0  # for one request that is alone


class NothingServed(KvotaError):
    """Not one request came back whole, so there is nothing to measure."""


class ServerGone(NothingServed):
    """There was no connection for any of a run's requests."""


class Watch(Protocol):
    """A progress bar, or whatever else wants to know."""

    def begin(self, what: str, num: int | None) -> None:
        """A part begins, of so many answers where that is known."""

    def advance(self) -> None:
        """One answer has come."""


class Unwatched:
    """Nobody watches."""

    def begin(self, what: str, num: int | None) -> None:
        pass

    def advance(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs of load on one server. Every run has other prompts than all before it."""

    target: Target
    sender: Send
    page: Page
    clock: Clock
    watch: Watch
    seed: int
    in_flight_max: int = 2048

    async def offer(
        self, what: str, shape: Shape, rate_rps: float, *, seconds: float, drain_s: float,
        attempt: object = 0, keeps: bool = False,
    ) -> Run:  # fmt: skip
        """Open loop: requests at random moments, at this rate. Raises ServerGone."""
        key = (self.seed, what, rate_rps, attempt)
        dues = open_loop(shape, rate_rps, seconds, key)
        self.watch.begin(what, len(dues))
        asked = list(self.asked(dues, key))
        run = await self._generator.offer(asked, duration_s=seconds, drain_s=drain_s, keeps=keeps)
        return _heard(what, run)

    async def keep(
        self, what: str, shape: Shape, num_open: int, *, seconds: float,
        num_max: int | None = None, keeps: bool = False,
    ) -> Run:  # fmt: skip
        """Closed loop: so many open at all times. Raises ServerGone."""
        key = (self.seed, what, num_open)
        self.watch.begin(what, num_max)
        asked = self.asked(one_by_one(shape, key), key)
        run = await self._generator.keep(
            asked, num_open, seconds=seconds, num_max=num_max, keeps=keeps
        )
        return _heard(what, run)

    async def alone(self, what: str, shape: Shape, num: int) -> list[Seen]:
        """One at a time; those that came whole. Raises NothingServed when none did."""
        run = await self.keep(what, shape, 1, seconds=num * ANSWER_PATIENCE_S, num_max=num)
        whole = [one for one in run.seen if one.is_whole and one.first_token_s is not None]
        if not whole:
            raise NothingServed(f"{what}: not one of {num} requests was served: {first_error(run)}")
        return whole

    def asked(self, dues: Iterable[Due], key: object) -> Iterator[Asked]:
        """With a prompt for each, made when it is taken."""
        return fresh(self.target.prompts, dues, key)

    async def wait_idle(self) -> None:
        """Return when nothing is open at the server, or it does not say, or after a while."""
        end_s = self.clock.now() + IDLE_PATIENCE_S
        while (await self.page.look()).num_open and self.clock.now() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(IDLE_LOOK_S)

    @property
    def _generator(self) -> Generator:
        return Generator(
            self.sender,
            self.clock,
            in_flight_max=self.in_flight_max,
            on_ended=lambda _: self.watch.advance(),
        )


def fresh(prompts: Prompts, dues: Iterable[Due], key: object) -> Iterator[Asked]:
    """A prompt of the right length for each; the same key gives the same prompts."""
    chance = Random(repr(key))
    for due in dues:
        yield Asked(
            scheduled_s=due.scheduled_s,
            prompt=prompts.make(due.prompt_tokens, chance),
            max_tokens=due.output_tokens,
            prompt_tokens=due.prompt_tokens if prompts.is_exact else None,
            lane=due.lane,
        )


def _heard(what: str, run: Run) -> Run:
    """The run, of whose requests at least one had a connection. Raises ServerGone."""
    if run.seen and all(one.status is None and one.code == CONNECTION for one in run.seen):
        raise ServerGone(f"{what}: the server is gone, {first_error(run)}")
    return run


def first_error(run: Run) -> str:
    """What went wrong first, in a few words."""
    bad = next((one for one in run.seen if not one.is_whole), None)
    return "no error was told" if bad is None else words_of(bad)


def words_of(bad: Seen) -> str:
    return f"{bad.status or 'no answer'}: {bad.message}"
