"""A desk in front of an imagined engine that gives every lease one token per choice and step.

The world checks the desk after every step and keeps what must hold from outside: each ticket ends
exactly once, and what the leases really hold.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvota.core.errors import Outcome
from kvota.desk.desk import Desk
from kvota.desk.forecast import Forecast
from kvota.desk.settings import DeskSettings
from kvota.desk.ticket import Granted, Lane, Lease, Refused, Stage, Ticket, Verdict


def new_ticket(ticket_id: str = "a", **fields: Any) -> Ticket:
    """A ticket of 10 prompt tokens and 10 output tokens, unless told otherwise."""
    defaults: dict[str, Any] = {
        "id": ticket_id,
        "tenant": "ann",
        "prompt_tokens": 10,
        "max_tokens": 10,
        "arrived_s": 0.0,
    }
    return Ticket(**(defaults | fields))


def new_desk(
    capacity_tokens: int = 100, block_size: int = 1, history: Iterable[int] = (), **settings: Any
) -> Desk:
    """A desk that has seen outputs of these lengths end in the short lane."""
    forecast = Forecast()
    group = forecast.group("", "ann", Lane.SHORT)
    for length in history:
        forecast.observe(group, length)
    return Desk(capacity_tokens, DeskSettings(**settings), forecast, block_size=block_size)


@dataclass
class DeskWorld:
    desk: Desk
    block_size: int = 1
    step_s: float = 0.1
    checks_arrivals: bool = True  # False: the desk is checked only after steps
    confirm_late: bool = False  # endings and pauses are confirmed one step later
    now: float = 0.0
    lengths: dict[str, int] = field(default_factory=dict)  # how long outputs really get
    tickets: dict[str, Ticket] = field(default_factory=dict)
    produced: dict[str, int] = field(default_factory=dict)  # of leases that run
    parked: dict[str, int] = field(default_factory=dict)  # of paused leases
    stopping: dict[str, Outcome] = field(default_factory=dict)  # end, not confirmed
    pausing: list[str] = field(default_factory=list)  # pause, not confirmed
    endings: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    granted_s: dict[str, float] = field(default_factory=dict)  # first grants
    served: Counter[str] = field(default_factory=Counter)  # weighted tokens by tenant
    num_pauses: int = 0

    def arrive(self, ticket: Ticket, length: int) -> Verdict:
        self.tickets[ticket.id] = ticket
        self.lengths[ticket.id] = min(length, ticket.max_tokens)
        verdict = self.desk.arrive(ticket, self.now)
        if isinstance(verdict, Granted):
            self._start([verdict.lease])
        elif isinstance(verdict, Refused):
            self._ended(ticket.id, Outcome.REFUSED)
        if self.checks_arrivals:
            self.desk.check()
        return verdict

    def cancel(self, ticket_id: str) -> None:
        granted = self.desk.cancel(ticket_id, Outcome.CLIENT_CLOSED, self.now)
        if self.desk.stage(ticket_id) is Stage.CLOSING:
            self.stopping.setdefault(ticket_id, Outcome.CLIENT_CLOSED)
        elif ticket_id not in self.outcomes:
            self._ended(ticket_id, Outcome.CLIENT_CLOSED)
        self._start(granted)
        self.desk.check()

    def step(self) -> None:
        """Confirm what was asked before, decode one token each, and let the time pass."""
        self.now += self.step_s
        self._confirm()
        for ticket_id in list(self.produced):
            self._decode(ticket_id)
        ticked = self.desk.tick(self.now)
        for expired in ticked.expired:
            self._ended(expired.ticket.id, expired.outcome)
        for overdue in ticked.overdue:
            self.stopping[overdue.lease.id] = overdue.outcome
        self._start(ticked.granted)
        for pause in ticked.pauses:
            self.num_pauses += 1
            self.pausing.append(pause.lease.id)
        if not self.confirm_late:
            self._confirm()
        self.desk.check()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def drain(self, num_steps_max: int = 20_000) -> None:
        """Run until everything has ended."""
        for _ in range(num_steps_max):
            if len(self.outcomes) == len(self.tickets):
                return
            self.step()
        raise AssertionError(f"not done after {num_steps_max} steps")

    def held_tokens(self) -> int:
        """What the leases really hold, in whole blocks, as if no prefix were shared."""
        return sum(self._held(ticket_id, tokens) for ticket_id, tokens in self.produced.items())

    def _held(self, ticket_id: str, produced: int) -> int:
        ticket = self.tickets[ticket_id]
        part = ticket.prompt_tokens % self.block_size
        own = -(-(part + produced) // self.block_size) * self.block_size
        return ticket.prompt_tokens - part + ticket.n * own

    def _start(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            assert lease.id not in self.produced, "granted twice"
            assert (lease.id in self.parked) == (lease.num_pauses > 0)
            if lease.num_pauses == 0:
                self.granted_s[lease.id] = self.now
                ticket = lease.ticket
                self.served[ticket.tenant] += ticket.prompt_tokens - ticket.cached_tokens
            self.produced[lease.id] = self.parked.pop(lease.id, 0)

    def _decode(self, ticket_id: str) -> None:
        if ticket_id in self.stopping or ticket_id in self.pausing:
            return
        ticket = self.tickets[ticket_id]
        tokens = self.produced[ticket_id] = self.produced[ticket_id] + 1
        is_last = tokens >= self.lengths[ticket_id]
        for choice in range(ticket.n):
            self.desk.progress(ticket_id, tokens, self.now, choice=choice, is_done=is_last)
            self.served[ticket.tenant] += 2
        if is_last:
            self._release(ticket_id, Outcome.COMPLETED)

    def _confirm(self) -> None:
        for ticket_id in self.pausing:
            if ticket_id in self.produced and ticket_id not in self.stopping:
                self.parked[ticket_id] = self.produced.pop(ticket_id)
            self._start(self.desk.paused(ticket_id, self.now))
        self.pausing.clear()
        stopping, self.stopping = self.stopping, {}
        for ticket_id, outcome in stopping.items():
            self._release(ticket_id, outcome)

    def _release(self, ticket_id: str, outcome: Outcome) -> None:
        del self.produced[ticket_id]
        granted = self.desk.release(ticket_id, outcome, self.now)
        self._ended(ticket_id, outcome)
        self._start(granted)

    def _ended(self, ticket_id: str, outcome: Outcome) -> None:
        self.parked.pop(ticket_id, None)
        self.endings[ticket_id] += 1
        assert self.endings[ticket_id] == 1, f"{ticket_id} ended twice"
        self.outcomes[ticket_id] = outcome
