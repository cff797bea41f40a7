"""The desk in front of a backend that has none: hosted here, kept by counting what comes back.

    async with foreign.admitted(ticket) as place:        # waits in line; may be refused
        async with upstream.open(…) as reply:
            await Relay(reply, ask, clock, watcher=place).stream(exchange)

The ticket's life is the block. It is granted when the block begins, hears of every token through
`place`, and is released when the block ends, by whatever way: by then the upstream stream inside
it is closed, so the backend is giving its memory back. A lease past its deadline has its block
cancelled and raises RequestTimeout.

A foreign engine cannot be asked to give up memory and go on later, so nothing is ever paused here;
and nobody can tell which prefixes it keeps, so every prompt is charged in full.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from kvota.core.clock import Clock
from kvota.core.errors import (
    ClientClosed,
    KvotaError,
    Outcome,
    OutputTooLong,
    Refusal,
    Refused,
    RequestCancelled,
    RequestTimeout,
)
from kvota.desk.desk import Desk
from kvota.desk.forecast import Forecast
from kvota.desk.live_limits import check_change
from kvota.desk.settings import DeskSettings
from kvota.desk.tally import DeskSnapshot
from kvota.desk.ticket import Expired, Granted, Lane, Lease, Overdue, Queued, Ticket
from kvota.desk.ticket import Refused as DeskRefused
from kvota.desk.waiting import why_waiting
from kvota.edge.arrival import Arrival
from kvota.gateway.caller import Caller
from kvota.gateway.upstream.correction import Correction, KvReading
from kvota.gateway.upstream.place import Place, PlaceObserver
from kvota.wire import sse

TICK_S: Final = 0.05
_NOBODY_WAITS: Final = (
    asyncio.CancelledError, ClientClosed, GeneratorExit, RequestCancelled,
)  # fmt: skip
DRAINING_RETRY_S: Final = 5.0


def ticket_of(
    caller: Caller,
    arrival: Arrival,
    *,
    model: str,
    prompt_tokens: int,
    max_tokens: int,
    num_choices: int = 1,
) -> Ticket:
    """A request's price. Of several prompts in one request, give the sum and all their choices."""
    return Ticket(
        id=arrival.id,
        tenant=caller.tenant,
        model=model,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        n=num_choices,
        arrived_s=arrival.arrived_s,
        band=caller.band(arrival.band),
        weight=caller.weight,
        queue_deadline_s=arrival.queue_deadline_s,
        deadline_s=arrival.deadline_s,
    )


class ForeignDesk:
    """Admission to one backend. Built anywhere, used on one event loop.

    `capacity_tokens` counts until the backend reports its own, of which `share` is lent.
    """

    def __init__(
        self,
        clock: Clock,
        settings: DeskSettings,
        *,
        capacity_tokens: int,
        share: float = 1.0,
        block_size: int = 1,
        forecast: Forecast | None = None,
        observer: PlaceObserver | None = None,
    ) -> None:
        self._observer = observer
        self._clock = clock
        self._correction = Correction(capacity_tokens, share=share, block_size=block_size)
        self._desk = Desk(
            capacity_tokens,
            _never_pausing(settings),
            forecast or Forecast(),
            block_size=block_size,
            observer=observer,
        )
        self._places: dict[str, Place] = {}
        self._behind: set[Place] = set()  # have tokens that the desk has not heard of
        self._timer: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._drained = asyncio.Event()

    def admitted(self, ticket: Ticket, client_id: str = "") -> "_Admitted":
        """Wait for the grant; the ticket ends with the block. `client_id`: what its client says.

        Raises Refused, OutputTooLong, RequestTimeout or RequestCancelled. To be left by
        cancellation while it waits.
        """
        return _Admitted(self, ticket, client_id or ticket.id)

    def waits(self, ticket_id: str) -> Queued | None:
        """Where a ticket stands in line; None when it does not wait."""
        return self._desk.position(ticket_id, self._clock.now())

    def remark(self, ticket_id: str) -> str | None:
        """The same as the text of a comment for its stream."""
        place = self.waits(ticket_id)
        if place is None:
            return None
        return sse.place_in_line(place.position + 1, place.eta_s, place.basis.latest_by)

    @property
    def places(self) -> tuple[Place, ...]:
        """Every ticket that is here, in order of arrival."""
        return tuple(self._places.values())

    def lane(self, ticket_id: str) -> Lane:
        return self._desk.lane(ticket_id) or Lane.SHORT

    def why(self, ticket_id: str) -> str:
        """What a ticket waits for, in words."""
        self._catch_up()
        return why_waiting(self._desk, ticket_id, self._desk.snapshot())

    def cancel(self, ticket_id: str) -> bool:
        """End a ticket, waiting or at work: its block raises RequestCancelled.

        False where there is none, or it is ending already.
        """
        place = self._places.get(ticket_id)
        if place is None or place.cut_by is not None:
            return False
        place.cut(RequestCancelled("The request was cancelled by DELETE."))
        return True

    def correct(self, reading: KvReading) -> None:
        """Take in what the backend says of its memory now (`correction.py`)."""
        self._catch_up()
        counts = self._desk.snapshot()
        self._correction.see(
            reading, held_tokens=counts.held_tokens, num_choices=counts.num_choices
        )
        self._desk.resize(self._correction.capacity_tokens)

    def check_change(self, settings: DeskSettings) -> None:
        """Raises ConfigError where `follow` could not be called with these now."""
        largest = max((place.ticket.n for place in self._places.values()), default=0)
        check_change(self._desk.settings, _never_pausing(settings), largest=largest)

    def follow(self, settings: DeskSettings, *, capacity_tokens: int, share: float) -> None:
        """Go by other limits from now on; who holds KV or waits keeps its place."""
        self._catch_up()
        self._correction.state(capacity_tokens, share)
        self._desk.resize(self._correction.capacity_tokens)
        self._start(self._desk.reconfigure(_never_pausing(settings), self._clock.now()))

    @property
    def settings(self) -> DeskSettings:
        return self._desk.settings

    @property
    def pinned_outside_tokens(self) -> int:
        """Used at the backend beyond what our leases hold."""
        return self._correction.pinned_tokens

    @property
    def difference_tokens(self) -> int | None:
        """Used at the backend less what our leases held, when it last said; None: it never did."""
        return self._correction.difference_tokens

    def snapshot(self) -> DeskSnapshot:
        self._catch_up()
        return self._desk.snapshot()

    def check(self) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        self._desk.check()

    def drain(self) -> None:
        """Refuse new tickets and those that wait; the running ones finish."""
        self._is_draining = True
        for place in list(self._places.values()):
            if not place.granted.done():
                place.granted.set_exception(_draining())
        self._settle()

    async def wait_drained(self) -> None:
        """Return when no ticket is open any more after `drain`."""
        await self._drained.wait()

    # --- arriving and leaving

    def arrive(self, ticket: Ticket) -> Place:
        """For the block of `admitted`. Raises Refused and OutputTooLong."""
        if self._is_draining:
            raise _draining()
        self._catch_up()
        verdict = self._desk.arrive(ticket, self._clock.now())
        if isinstance(verdict, DeskRefused):
            raise self._refusal(ticket, verdict)
        place = self._places[ticket.id] = Place(ticket, self._desk, self._clock, self._behind)
        if isinstance(verdict, Granted):
            place.grant(verdict.lease)
        if self._timer is None:
            self._wind_up()
        return place

    def _refusal(self, ticket: Ticket, verdict: DeskRefused) -> KvotaError:
        """What can never fit is the client's to change; for anything else it may come back."""
        need = ticket.prompt_tokens + ticket.n * ticket.max_tokens
        is_hopeless = (
            need > self._correction.nominal_tokens
            or ticket.n > self._desk.settings.max_running_requests
        )
        if verdict.reason is Refusal.KV_BUDGET_EXHAUSTED and is_hopeless:
            return OutputTooLong(verdict.message, param="max_tokens")
        return Refused(verdict.reason, verdict.message, retry_after_s=verdict.retry_after_s)

    def leave(self, place: Place, outcome: Outcome) -> None:
        """For the block of `admitted`, at its end."""
        del self._places[place.ticket.id]
        if place.granted.done() and not place.granted.cancelled():
            place.granted.exception()  # it has been told, or nobody is left to be told
        self._catch_up()
        if self._observer is not None:
            self._observer.left(place, self._clock.now())
        if not place.is_closed:
            place.is_closed = True
            self._start(self._desk.release(place.ticket.id, outcome, self._clock.now()))
        self._settle()

    def _settle(self) -> None:
        if self._is_draining and not self._places:
            self._drained.set()

    # --- time

    def _wind_up(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._places:
            return
        self._wind_up()
        self._catch_up()
        ticked = self._desk.tick(self._clock.now())
        for expired in ticked.expired:
            self._expire(expired)
        for overdue in ticked.overdue:
            self._stop(overdue)
        self._start(ticked.granted)
        assert not ticked.pauses, "a foreign engine cannot pause"

    def _catch_up(self) -> None:
        """Whatever the desk decides or says, it knows of all tokens by then."""
        for place in self._behind:
            place.catch_up()
        self._behind.clear()

    def _start(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._places[lease.id].grant(lease)

    def _expire(self, expired: Expired) -> None:
        """Its time in line is over; the desk has closed it."""
        place = self._places[expired.ticket.id]
        place.is_closed = True
        if not place.granted.done():
            place.granted.set_exception(_expiry(expired))

    def _stop(self, overdue: Overdue) -> None:
        what = "answer was not complete" if overdue.has_token else "first token was not there"
        place = self._places[overdue.lease.id]
        place.cut(RequestTimeout(f"The {what} within {overdue.limit_s:.3g} s, the limit."))


class _Admitted:
    """The block in which a ticket lives."""

    __slots__ = ("_client_id", "_desk", "_place", "_ticket")

    def __init__(self, desk: ForeignDesk, ticket: Ticket, client_id: str) -> None:
        self._desk = desk
        self._ticket = ticket
        self._client_id = client_id

    async def __aenter__(self) -> Place:
        place = self._place = self._desk.arrive(self._ticket)
        place.client_id = self._client_id
        place.scope.begin()
        if not (place.granted.done() and place.lease is not None):
            try:
                await place.granted
            except BaseException as error:  # cancelled as well: `__aexit__` is not called for it
                self._end(error)
                raise
        return place

    async def __aexit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Raises what the place was cut by, if that is why the block ends."""
        place, outcome = self._place, Outcome.COMPLETED
        cut_by = place.cut_by if place.scope.end(None if error is None else type(error)) else None
        if cut_by is not None:
            outcome = _outcome_of(cut_by)
        elif error is not None:
            outcome = _outcome_of(error)
        self._desk.leave(place, outcome)
        if cut_by is not None:
            raise cut_by from None


def _outcome_of(error: BaseException) -> Outcome:
    if isinstance(error, _NOBODY_WAITS):
        return Outcome.CLIENT_CLOSED
    if isinstance(error, RequestTimeout):
        return Outcome.REQUEST_TIMEOUT
    return Outcome.REFUSED if isinstance(error, Refused) else Outcome.ENGINE_ERROR


def _expiry(expired: Expired) -> KvotaError:
    """What a ticket hears whose time in line is over."""
    ticket = expired.ticket
    if expired.outcome is Outcome.REQUEST_TIMEOUT:
        limit_s = (ticket.deadline_s or ticket.arrived_s) - ticket.arrived_s
        return RequestTimeout(f"The answer was not complete in time; the limit is {limit_s:.3g} s.")
    if expired.outcome is Outcome.REFUSED:
        message = "In what is left of its time the request would not get its first token."
    else:
        limit_s = (ticket.queue_deadline_s or ticket.arrived_s) - ticket.arrived_s
        message = f"The request did not begin within {limit_s:.3g} s, the longest wait allowed."
    return Refused(expired.reason, message, retry_after_s=expired.retry_after_s)


def _never_pausing(settings: DeskSettings) -> DeskSettings:
    return replace(settings, preemptions_max=0)


def _draining() -> Refused:
    return Refused(
        Refusal.DRAINING,
        "The backend is being taken out of service and takes no new requests.",
        retry_after_s=DRAINING_RETRY_S,
    )
