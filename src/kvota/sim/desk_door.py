"""The real desk as the door of a simulated world: requests become tickets, events become calls."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from kvota.core.errors import Outcome
from kvota.core.request import Delta, Request
from kvota.desk.desk import Desk
from kvota.desk.forecast import Forecast
from kvota.desk.settings import DeskSettings
from kvota.desk.tally import DeskObserver
from kvota.desk.ticket import Expired, Granted, Lane, Lease, Queued, Refused, Ticket
from kvota.kv.cache import KVCache
from kvota.node.pricing import ticket_of
from kvota.sim.door import GO, Moves, No, Verdict, Wait
from kvota.traffic.arrival import Arrival


def desk_door(
    settings: DeskSettings, history: Iterable[Arrival] = (), observer: DeskObserver | None = None
) -> "DeskDoors":
    """A desk over all of the cache, which has seen the outputs of `history` end."""
    known = [
        (
            one.tenant,
            _lane_of(one, settings),
            one.output_tokens,
            one.output_tokens >= one.max_tokens,
        )
        for one in history
    ]
    return DeskDoors(settings, known, observer)


@dataclass(frozen=True, slots=True)
class DeskDoors:
    """Makes equal doors, one for each cache. `known`: tenant, lane, length and whether it was cut.

    As plain data, it can be sent to other processes.
    """

    settings: DeskSettings
    known: Sequence[tuple[str, Lane, int, bool]]
    observer: DeskObserver | None = None

    def __call__(self, cache: KVCache) -> "DeskDoor":
        forecast = Forecast()
        for tenant, lane, length, is_cut in self.known:
            forecast.observe(forecast.group("", tenant, lane), length, is_cut=is_cut)
        desk = Desk(
            cache.num_blocks * cache.block_size,
            self.settings,
            forecast,
            block_size=cache.block_size,
            observer=self.observer,
        )
        return DeskDoor(desk, cache)


class DeskDoor:
    """`cache` tells which blocks of a prompt are in memory when it arrives."""

    def __init__(self, desk: Desk, cache: KVCache) -> None:
        self.desk = desk
        self._cache = cache
        self._produced: dict[str, list[int]] = {}  # tokens of each choice

    def arrive(self, request: Request, arrival: Arrival, now: float) -> Verdict:
        verdict = self.desk.arrive(self._ticket(request, arrival), now)
        match verdict:
            case Refused(reason, retry_after_s, _):
                return No(reason, retry_after_s)
            case Queued(position, eta_s, basis):
                self._produced[request.id] = [0] * request.n
                return Wait(position, eta_s, is_latest=basis.is_bound)
            case Granted():
                self._produced[request.id] = [0] * request.n
                return GO

    def progress(self, request_id: str, delta: Delta, now: float) -> None:
        produced = self._produced[request_id]
        produced[delta.choice] += len(delta.token_ids)
        self.desk.progress(
            request_id,
            produced[delta.choice],
            now,
            choice=delta.choice,
            is_done=delta.finish is not None,
        )

    def has_produced(self, request_id: str, num_tokens: int) -> None:
        """The desk knows of these tokens of the only choice."""
        self._produced[request_id][0] += num_tokens

    def ended(self, request_id: str, outcome: Outcome, now: float) -> Moves:
        del self._produced[request_id]
        return _granted(self.desk.release(request_id, outcome, now))

    def paused(self, request_id: str, now: float) -> Moves:
        return _granted(self.desk.paused(request_id, now))

    def leave(self, request_id: str, now: float) -> Moves:
        del self._produced[request_id]
        return _granted(self.desk.cancel(request_id, Outcome.CLIENT_CLOSED, now))

    def tick(self, now: float) -> Moves:
        ticked = self.desk.tick(now)
        for expired in ticked.expired:
            del self._produced[expired.ticket.id]
        return Moves(
            granted=[lease.id for lease in ticked.granted],
            expired=[_ending(expired) for expired in ticked.expired],
            overdue=[(overdue.lease.id, overdue.outcome) for overdue in ticked.overdue],
            pauses=[pause.lease.id for pause in ticked.pauses],
        )

    def check(self) -> None:
        self.desk.check()

    def _ticket(self, request: Request, arrival: Arrival) -> Ticket:
        first_s = arrival.first_token_s
        return msgspec.structs.replace(
            ticket_of(request, self._cache),
            tenant=arrival.tenant,
            first_token_deadline_s=None if first_s is None else request.arrived_s + first_s,
        )


def _lane_of(one: Arrival, settings: DeskSettings) -> Lane:
    return Lane.LONG if one.prompt_tokens > settings.long_request_threshold else Lane.SHORT


def _granted(leases: Sequence[Lease]) -> Moves:
    return Moves(granted=[lease.id for lease in leases])


def _ending(expired: Expired) -> tuple[str, Outcome]:
    return expired.ticket.id, expired.outcome
