"""A request at the desk: what it asks, what the desk answers, and the stages of its life.

    QUEUED ───▶ GRANTED ───▶ RUNNING          QUEUED   in line, holds nothing
       │          ▲  │  ╲       │             GRANTED  holds a lease, no token yet
       │          │  │   ╲      │             RUNNING  has produced a token
       │       PAUSED◀── PAUSING              PAUSING  asked to give its KV back, still holds it
       │          │  │      │   │             PAUSED   in line again, at its front
       ▼          ▼  ▼      ▼   ▼             CLOSING  ended; the engine still holds its blocks
     CLOSED ◀────── CLOSING ◀───              CLOSED   gone; nothing may follow

A ticket that holds KV goes to CLOSED by way of `release`, which says that its blocks are back.

What is made for every request is a Struct: a tenth of the time of a frozen dataclass.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvota.core.errors import Outcome, Refusal
from kvota.core.request import Band


class Lane(StrEnum):
    SHORT = "short"
    LONG = "long"


class Stage(StrEnum):
    QUEUED = "queued"
    GRANTED = "granted"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CLOSING = "closing"
    CLOSED = "closed"


TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    Stage.QUEUED: frozenset({Stage.GRANTED, Stage.CLOSED}),
    Stage.GRANTED: frozenset({Stage.RUNNING, Stage.PAUSING, Stage.CLOSING, Stage.CLOSED}),
    Stage.RUNNING: frozenset({Stage.PAUSING, Stage.CLOSING, Stage.CLOSED}),
    Stage.PAUSING: frozenset({Stage.PAUSED, Stage.CLOSING, Stage.CLOSED}),
    Stage.PAUSED: frozenset({Stage.GRANTED, Stage.CLOSED}),
    Stage.CLOSING: frozenset({Stage.CLOSED}),
    Stage.CLOSED: frozenset(),
}
HOLDING = frozenset({Stage.GRANTED, Stage.RUNNING, Stage.PAUSING, Stage.CLOSING})
WAITING = frozenset({Stage.QUEUED, Stage.PAUSED})


class IllegalMove(RuntimeError):
    """A ticket was asked to take a step that its life does not have. A bug of the caller."""

    def __init__(self, ticket_id: str, old: Stage, new: Stage) -> None:
        super().__init__(f"ticket {ticket_id} is {old.value} and cannot become {new.value}")


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A request, priced. Times are seconds of the desk's clock.

    `prefix_blocks` names the leading whole blocks of the prompt that are in the KV pool now; the
    same block must have the same name in every ticket. What several leases name is charged once.
    Empty where nobody can tell: then the whole prompt is charged to this ticket alone.
    """

    id: str
    tenant: str
    prompt_tokens: int  # exact, chat template included
    max_tokens: int  # of one choice
    arrived_s: float
    model: str = ""
    band: Band = Band.INTERACTIVE
    n: int = 1
    cached_tokens: int = 0  # of the prompt: need not be computed, and are not charged to the tenant
    prefix_blocks: Sequence[Hashable] = ()
    weight: float | None = None  # of the tenant; None: what the settings say
    # The settings' limits apply as well: whatever is earlier counts.
    queue_deadline_s: float | None = None  # granted by then
    begin_by_s: float | None = None  # the engine ends what it has not begun to compute by then
    first_token_deadline_s: float | None = None
    deadline_s: float | None = None  # ended by then


class Lease(msgspec.Struct, frozen=True):
    """KV granted to a ticket until it ends or is paused."""

    ticket: Ticket
    lane: Lane
    granted_s: float
    num_pauses: int  # above 0: it was paused and is to go on, with what it had produced

    @property
    def id(self) -> str:
        return self.ticket.id


class Granted(msgspec.Struct, frozen=True):
    lease: Lease


class EtaBasis(StrEnum):
    """What an ETA rests on. The last two make it the latest moment, not the expected one."""

    FORECAST = "forecast"  # what is held, how long outputs have been lately, the measured speed
    LINE = "line"  # how fast the line has moved lately
    MAX_TOKENS = "max_tokens"  # everybody produces max_tokens, at the measured speed
    DEADLINES = "deadlines"  # everybody ends at their deadline: no speed is known yet

    @property
    def is_bound(self) -> bool:
        return self in (EtaBasis.MAX_TOKENS, EtaBasis.DEADLINES)

    @property
    def latest_by(self) -> str | None:
        """What the latest moment rests on; None where it is the expected one."""
        return self.value if self.is_bound else None


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A wait in line. `guess_s` is uncorrected; None where `told_s` is no prediction."""

    told_s: float
    basis: EtaBasis
    guess_s: float | None = None


@dataclass(frozen=True, slots=True)
class Queued:
    """`position` tickets are expected to be served before it, and it in `eta_s` from now."""

    position: int
    eta_s: float
    basis: EtaBasis


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing is kept of the ticket. `retry_after_s` is within 1..120 and carries no jitter."""

    reason: Refusal
    retry_after_s: float
    message: str


Verdict = Granted | Queued | Refused


@dataclass(frozen=True, slots=True)
class Expired:
    """A ticket whose time in line is over. It has ended; there is nothing to release.

    `reason` says why where nothing was served: its time is over, or what is left of it is too
    short for a first token.
    """

    ticket: Ticket
    outcome: Outcome
    retry_after_s: float
    reason: Refusal = Refusal.QUEUE_TIMEOUT


@dataclass(frozen=True, slots=True)
class Overdue:
    """A lease past its deadline. It is closing: stop it, then `release` it."""

    lease: Lease
    outcome: Outcome
    limit_s: float  # it was given so long from its arrival
    has_token: bool  # False: for its first token


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop this lease, keep its tokens, and answer with `Desk.paused` when its blocks are back."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Ticked:
    granted: Sequence[Lease] = ()
    expired: Sequence[Expired] = ()
    overdue: Sequence[Overdue] = ()
    pauses: Sequence[Pause] = ()
