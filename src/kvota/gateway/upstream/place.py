"""A ticket's place at the desk in front of a foreign backend, from its arrival to its end."""

import asyncio
from typing import Protocol

from kvota.core.clock import Clock
from kvota.core.errors import KvotaError
from kvota.desk.desk import Desk
from kvota.desk.tally import DeskObserver
from kvota.desk.ticket import Lease, Ticket
from kvota.edge.cutting import CutScope
from kvota.gateway.upstream.passage import Tally


class Place:
    """In line or at work. Watches the answer (`passage.Watcher`).

    The desk hears at once of a first token and of an end, of all others when it is next asked, or
    with its tick: a stream of single tokens then costs it little.
    """

    def __init__(self, ticket: Ticket, desk: Desk, clock: Clock, behind: "set[Place]") -> None:
        """Puts itself in `behind` while `catch_up` has something to say."""
        self.ticket = ticket
        self.lease: Lease | None = None
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.scope = CutScope()  # of the block that the ticket lives in
        self.cut_by: KvotaError | None = None
        self.is_closed = False  # at the desk
        self.client_id = ticket.id
        self.first_token_s: float | None = None
        self.tally: Tally | None = None  # what has come back, once the answer is over
        self._desk = desk
        self._clock = clock
        self._behind = behind
        self._untold: set[int] = set()  # choices
        self._produced = [0] * ticket.n
        self._prompt_tokens: int | None = None  # as the backend counts it

    @property
    def queued_s(self) -> float:
        """Seconds from arrival to the grant; to now while it waits."""
        until_s = self._clock.now() if self.lease is None else self.lease.granted_s
        return until_s - self.ticket.arrived_s

    @property
    def prompt_tokens(self) -> int:
        """As the backend counts them, or else we."""
        return self._prompt_tokens or self.ticket.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """Over all choices, so far."""
        return sum(self._produced)

    def prompt_counted(self, num_tokens: int) -> None:
        """The backend says how long the prompt really is, all prompts of the request together."""
        self._prompt_tokens = num_tokens

    def produced(self, choice: int, num_tokens: int, *, is_done: bool) -> None:
        self._produced[choice] = num_tokens
        if is_done:
            self._untold.discard(choice)
            self._tell(choice, self._clock.now(), is_done=True)
        elif self.first_token_s is None:
            self._tell(choice, self._clock.now(), is_done=False)
        else:
            self._untold.add(choice)
            self._behind.add(self)

    def catch_up(self) -> None:
        """Tell the desk what it has not heard of."""
        now = self._clock.now()
        for choice in self._untold:
            self._tell(choice, now, is_done=False)
        self._untold.clear()

    def _tell(self, choice: int, now: float, *, is_done: bool) -> None:
        if self.first_token_s is None:
            self.first_token_s = now
        private = None
        if self._prompt_tokens is not None:
            private = self._prompt_tokens + self.output_tokens
        self._desk.progress(
            self.ticket.id,
            self._produced[choice],
            now,
            choice=choice,
            is_done=is_done,
            private_tokens=private,
        )

    def grant(self, lease: Lease) -> None:
        self.lease = lease
        if not self.granted.done():  # else it is leaving: its release comes next
            self.granted.set_result(None)

    def cut(self, error: KvotaError) -> None:
        """Cancel the block, which then raises `error`."""
        if self.cut_by is None:
            self.cut_by = error
            self.scope.cut()


class PlaceObserver(DeskObserver, Protocol):
    """Hears what the desk hears of its predictions, and of every place that is left."""

    def left(self, place: Place, now: float) -> None:
        """The answer has gone out, or broke, or there was none. Must be quick."""
