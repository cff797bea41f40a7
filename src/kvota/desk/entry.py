"""The desk's own record of a ticket that has not ended. Only the desk changes it."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from math import inf

from kvota.core.errors import Outcome
from kvota.core.request import Band
from kvota.desk.fairness import Rank
from kvota.desk.forecast import Forecast
from kvota.desk.ledger import Claim, Ledger
from kvota.desk.settings import DeskSettings
from kvota.desk.ticket import (
    HOLDING,
    TRANSITIONS,
    Foreseen,
    IllegalMove,
    Lane,
    Lease,
    Stage,
    Ticket,
)


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """A ticket and everything that has happened to it."""

    ticket: Ticket
    lane: Lane
    arrival: int  # place in the order of arrival
    group: int  # of the forecast
    claim: Claim  # what it would take if it were granted now
    expected_tokens: float  # of one choice, as known when it arrived
    is_forecast: bool  # False: nothing is known of its output, expectations are max_tokens
    expected_growth: float  # token-steps that the output of one choice is expected to hold
    weight: float  # of its tenant
    queue_until_s: float
    begin_by_s: float
    first_token_by_s: float
    end_by_s: float
    id: str = field(init=False)
    tenant: str = field(init=False)
    band: Band = field(init=False)
    size: int = field(init=False)  # choices
    uncached_tokens: int = field(init=False)  # of its prompt
    due_s: float = field(init=False)  # by when its first token must be there
    rank: Rank = field(init=False)
    stage: Stage = Stage.QUEUED
    outcome: Outcome | None = None  # set by the first who ends it
    produced: list[int] = field(init=False)  # per choice
    is_done: list[bool] = field(init=False)  # per choice
    granted_s: float | None = None  # latest
    progressed_s: float | None = None  # of choice 0, since the latest grant
    has_token: bool = False
    has_waited: bool = False  # it was not granted when it arrived
    is_beyond: bool = False  # it waits beyond the bound of the line
    num_pauses: int = 0
    was_owed: bool = False  # granted on the floor of its band
    yields_to: int = 0  # paused for those that arrived up to this one,
    lends_tokens: float = 0.0  # until they have taken so much of the room that it left
    reads_tokens: int | None = None  # while it is read, until its first token since the grant
    reads_until: int = 0  # those, and what was to be read before them
    foreseen: Foreseen | None = None  # the wait, when it joined the line

    def __post_init__(self) -> None:
        ticket = self.ticket
        self.id, self.tenant = ticket.id, ticket.tenant
        self.band, self.size = ticket.band, ticket.n
        self.uncached_tokens = ticket.prompt_tokens - ticket.cached_tokens
        self.due_s = min(self.first_token_by_s, self.end_by_s)
        self.rank = (self.due_s, self.arrival)
        self.produced = [0] * ticket.n
        self.is_done = [False] * ticket.n

    @property
    def is_paused(self) -> bool:
        return self.stage is Stage.PAUSED

    @property
    def holds_kv(self) -> bool:
        return self.stage in HOLDING

    @property
    def unread_tokens(self) -> int:
        """What the engine has to compute of it before its next token, were it granted now."""
        return self.uncached_tokens + sum(self.produced)

    @property
    def footprint(self) -> float:
        """KV tokens it is expected to hold when it ends."""
        return self.claim.private_prompt + self.size * self.expected_tokens

    @property
    def num_open(self) -> int:
        """Choices that go on; 1 for the time between the end of the last and the release."""
        return self.is_done.count(False) or 1

    @property
    def longest_open(self) -> int:
        """Tokens of the longest choice that goes on."""
        if len(self.produced) == 1:
            return self.produced[0]
        pairs = zip(self.produced, self.is_done, strict=True)
        return max((tokens for tokens, done in pairs if not done), default=max(self.produced))

    @property
    def next_deadline_s(self) -> float | None:
        """When it must be ended if nothing happens. None: it is ending."""
        if self.stage is Stage.CLOSING:
            return None
        if self.stage is Stage.QUEUED:
            return min(self.queue_until_s, self.due_s)
        return self.end_by_s if self.has_token else self.due_s

    def lease(self) -> Lease:
        assert self.granted_s is not None
        return Lease(self.ticket, self.lane, self.granted_s, self.num_pauses)

    def move(self, new: Stage) -> None:
        """Follow the table of stages, or raise IllegalMove and change nothing."""
        if new not in TRANSITIONS[self.stage]:
            raise IllegalMove(self.id, self.stage, new)
        self.stage = new


def lane_of(prompt_tokens: int, settings: DeskSettings) -> Lane:
    """By the prompt alone, cached or not.

    The prompt is known exactly and has its KV from the first step to the last. max_tokens is only
    what a client would allow: most leave it at some large default, which would put every chat in
    the long lane; the ledger prices outputs anyway.
    """
    return Lane.LONG if prompt_tokens > settings.long_request_threshold else Lane.SHORT


def new_entry(
    ticket: Ticket, arrival: int, settings: DeskSettings, forecast: Forecast, ledger: Ledger
) -> Entry:
    """The ticket, priced: its lane, its group of the forecast, its claim and its deadlines."""
    lane = lane_of(ticket.prompt_tokens, settings)
    group = forecast.group(ticket.model, ticket.tenant, lane)
    is_long = lane is Lane.LONG
    expected_tokens, expected_growth = forecast.expected(group, ticket.max_tokens)
    return Entry(
        ticket=ticket,
        lane=lane,
        arrival=arrival,
        group=group,
        claim=ledger.claim(ticket, group, produced=0, num_open=ticket.n, is_long=is_long),
        expected_tokens=expected_tokens,
        expected_growth=expected_growth,
        is_forecast=forecast.is_known(group),
        weight=ticket.weight or settings.tenant_weights.get(ticket.tenant, 1.0),
        queue_until_s=_earlier(ticket.queue_deadline_s, ticket, settings.queue_timeout_s),
        begin_by_s=inf if ticket.begin_by_s is None else ticket.begin_by_s,
        first_token_by_s=_earlier(
            ticket.first_token_deadline_s, ticket, settings.first_token_limit_s(is_long=is_long)
        ),
        end_by_s=_earlier(ticket.deadline_s, ticket, settings.request_timeout_s),
    )


def ids_in(entries: Mapping[str, Entry], stages: Set[Stage]) -> set[str]:
    """The tickets that are in one of these stages."""
    return {entry.id for entry in entries.values() if entry.stage in stages}


def _earlier(deadline_s: float | None, ticket: Ticket, limit_s: float | None) -> float:
    """The ticket's own deadline or the settings' limit after its arrival; inf without either."""
    limit_at_s = inf if limit_s is None else ticket.arrived_s + limit_s
    return limit_at_s if deadline_s is None or limit_at_s < deadline_s else deadline_s
