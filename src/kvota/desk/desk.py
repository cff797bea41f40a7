"""The desk: every request is priced in KV memory, and runs, waits, or is refused honestly.

    arrive ─▶ price ─▶ Granted ─▶ progress … ─▶ release ─▶ closed
                 ├───▶ Queued ──(release, paused or tick grants it)──▶ …
                 └───▶ Refused

Public calls; `now` is seconds of the caller's clock and never goes back:

    arrive(ticket, now) -> Granted(lease) | Queued(position, eta_s) | Refused(reason, …)
    progress(lease_id, produced, now, *, choice, is_done, private_tokens)
    cancel(ticket_id, outcome, now) -> leases       it must end: waiting → closed, holding → closing
    release(ticket_id, outcome, now) -> leases      it has ended, and its blocks are back
    paused(lease_id, now) -> leases                 the blocks of a Pause are back
    tick(now) -> Ticked(granted, expired, overdue, pauses)
    position(ticket_id, now) · snapshot() · check()

Calls that make room return the leases granted by it; whoever owns the desk starts them. A lease
with `num_pauses` above 0 goes on where it was.

Who is next: the bands in turn (`lanes.py`); in a band the long lane, within its share and its
number, then the short lane; in a lane whoever was paused, then the tenant with the least service
(`fairness.py`). The first in a lane is never overtaken within it. When it waits for memory, no
later band is served, and a short ticket is granted only if the waiting long one would still fit:
the short lane borrows what the long lane leaves idle, and gives it back by not renewing the loan.

A ticket larger than the long lane's share may run as the only one of its lane: it fits the pool,
and could not run at all otherwise.
"""

import heapq
from collections.abc import Sequence
from enum import Enum, auto
from math import inf

from kvota.core.errors import Outcome, Refusal
from kvota.core.request import Band
from kvota.desk.entry import Entry, lane_of
from kvota.desk.fairness import W_IN, W_OUT, TenantCounters
from kvota.desk.forecast import Forecast
from kvota.desk.lanes import BandTurns, WaitingLine
from kvota.desk.ledger import Ledger
from kvota.desk.outlook import Outlook
from kvota.desk.pace import Pace
from kvota.desk.pauses import choose_pauses
from kvota.desk.policies import new_policy
from kvota.desk.retry import RETRY_AFTER_MAX_S, clamp_retry_s
from kvota.desk.settings import Admission, DeskSettings
from kvota.desk.tally import DeskObserver, DeskSnapshot, Tally
from kvota.desk.ticket import (
    HOLDING,
    WAITING,
    Expired,
    Granted,
    Lane,
    Lease,
    Overdue,
    Pause,
    Queued,
    Refused,
    Stage,
    Ticked,
    Ticket,
    Verdict,
)

RECHECK_S = 0.1  # while nobody leaves, the line is looked at again only this often


class _Room(Enum):
    YES = auto()
    NO = auto()  # memory or places are missing: what comes back is for this ticket
    LANE_FULL = auto()  # its lane has all it may have: others need not wait for it


class Desk:
    """Admission to one engine's KV memory of `capacity_tokens`, in blocks of `block_size`."""

    def __init__(
        self,
        capacity_tokens: int,
        settings: DeskSettings,
        forecast: Forecast,
        *,
        block_size: int = 1,
        observer: DeskObserver | None = None,
    ) -> None:
        self._settings = settings
        self._forecast = forecast
        self._observer = observer
        self._ledger = Ledger(
            capacity_tokens, new_policy(settings, forecast, block_size), block_size=block_size
        )
        self._counters = TenantCounters()
        self._turns = BandTurns(settings.batch_floor)
        self._line: WaitingLine[Entry] = WaitingLine(self._counters)
        self._pace = Pace()
        self._outlook = Outlook(settings, forecast, self._ledger, self._line, self._pace)
        self._entries: dict[str, Entry] = {}
        self._holders: dict[str, Entry] = {}
        self._deadlines: list[tuple[float, int, str]] = []  # a heap; may lag behind
        self._num_arrivals = 0
        self._num_choices = 0  # of the holders
        self._num_leaving = 0  # holders that are pausing or closing
        self._num_long = 0  # holders of the long lane
        self._has_changed = True  # since the line was looked at
        self._looked_s = 0.0
        self._tally = Tally()

    # --- the life of a ticket -----------------------------------------------------------------

    def arrive(self, ticket: Ticket, now: float) -> Verdict:
        """Grant it, put it in line, or refuse it. Its id must be new among those not ended."""
        assert ticket.id not in self._entries, f"ticket {ticket.id} is here already"
        self._tally.arrived += 1
        entry = self._new_entry(ticket)
        refused = self._refuse_impossible(entry)
        if refused is not None:
            return refused
        self._line.push(entry)
        is_first = self._line.head(entry.band, entry.lane) is entry
        if is_first and self._next() is entry:
            refused = self._refuse_late(entry, 0.0, now)
            if refused is None:
                self._enter(entry)
                return Granted(self._grant(entry, now))
        else:
            refused = self._refuse_in_line(entry, now)
        if refused is not None:
            self._line.remove(entry)
            return refused
        self._enter(entry)
        return Queued(self._line.num_before(entry), entry.wait_told_s)

    def progress(
        self,
        lease_id: str,
        produced: int,
        now: float,
        *,
        choice: int = 0,
        is_done: bool = False,
        private_tokens: int | None = None,
    ) -> None:
        """A choice has `produced` tokens; with `is_done` it has ended, others may go on.

        `private_tokens`: KV that the request alone holds, all choices, where the engine can tell.
        Passed over for a ticket that is ending or has ended.
        """
        entry = self._holders.get(lease_id)
        if entry is None or entry.stage is Stage.CLOSING:
            return
        added = produced - entry.produced[choice]
        if added > 0:
            self._advance(entry, choice, added, now)
        if is_done and not entry.is_done[choice]:
            self._end_choice(entry, choice, is_cut=produced >= entry.ticket.max_tokens)
        self._ledger.grow(lease_id, entry.longest_open, entry.num_open, private_tokens)

    def cancel(self, ticket_id: str, outcome: Outcome, now: float) -> list[Lease]:
        """It is to end with `outcome`. Tickets that have ended or are ending are passed over.

        One that waits has ended when this returns. One that holds KV is closing: stop it in the
        engine and `release` it when its blocks are back.
        """
        entry = self._entries.get(ticket_id)
        if entry is None or entry.stage is Stage.CLOSING:
            return []
        if entry.stage in WAITING:
            return self.release(ticket_id, outcome, now)
        self._begin_closing(entry, outcome)
        return []

    def release(self, ticket_id: str, outcome: Outcome, now: float) -> list[Lease]:
        """It has ended and nothing of it is held any more. Returns what the room was granted to.

        The outcome is that of `cancel` or of its deadline, if one of them came first.
        """
        entry = self._entries[ticket_id]
        self._close(entry, outcome, now)
        return self._grant_all(now)

    def paused(self, lease_id: str, now: float) -> list[Lease]:
        """The engine has given up the KV of a lease it was asked to pause, and keeps its tokens.

        Passed over when the lease is ending or has ended meanwhile: `release` says the rest.
        """
        entry = self._holders.get(lease_id)
        if entry is None or entry.stage is Stage.CLOSING:
            return []
        entry.move(Stage.PAUSED)
        self._num_leaving -= 1
        self._stop_holding(entry)
        entry.yields_to = self._num_arrivals
        entry.progressed_s = None
        entry.claim = self._ledger.claim(
            entry.ticket,
            entry.group,
            produced=entry.longest_open,
            num_open=entry.num_open,
            is_long=entry.lane is Lane.LONG,
        )
        self._line.push(entry)
        return self._grant_all(now)

    def tick(self, now: float) -> Ticked:
        """What the passing of time brings. Call it at least every few tenths of a second."""
        expired: list[Expired] = []
        overdue: list[Overdue] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            self._expire(heapq.heappop(self._deadlines)[2], now, expired, overdue)
        granted: list[Lease] = []
        if self._has_changed or now - self._looked_s >= RECHECK_S:
            granted = self._grant_all(now)
        return Ticked(granted, expired, overdue, self._ask_to_pause(now))

    # --- views --------------------------------------------------------------------------------

    def position(self, ticket_id: str, now: float) -> Queued | None:
        """Where a waiting ticket stands now; None when it does not wait."""
        entry = self._entries.get(ticket_id)
        if entry is None or entry.stage not in WAITING:
            return None
        num_before = self._line.num_before(entry)
        guess_s = self._outlook.guess_s(entry, num_before, now)
        return Queued(num_before, self._outlook.corrected(guess_s))

    def stage(self, ticket_id: str) -> Stage:
        """CLOSED for every ticket that is not here (any more)."""
        entry = self._entries.get(ticket_id)
        return Stage.CLOSED if entry is None else entry.stage

    def service(self, tenant: str) -> float:
        """The tenant's virtual counter: weighted tokens served, over its weight, with lifts."""
        return self._counters.counter(tenant)

    def snapshot(self) -> DeskSnapshot:
        ledger, line = self._ledger, self._line
        closing = [one for one in self._holders.values() if one.stage is Stage.CLOSING]
        return DeskSnapshot(
            capacity_tokens=ledger.capacity_tokens,
            held_tokens=int(ledger.held_tokens().sum()) + ledger.pinned_tokens,
            peak_tokens=ledger.peak(),
            pinned_tokens=ledger.pinned_tokens,
            held_after_end_tokens=sum(ledger.held_by(entry.id) for entry in closing),
            running={
                Lane.SHORT: len(self._holders) - self._num_long,
                Lane.LONG: self._num_long,
            },
            num_choices=self._num_choices,
            waiting={(lane, band): line.num_in(band, lane) for band in Band for lane in Lane},
            num_waiting_choices=line.num_bounded,
            tally=self._tally,
        )

    def check(self) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        self._line.check()
        self._ledger.check()
        entries, holders = self._entries, self._holders
        waiting = {entry.id for entry in self._line}
        assert waiting == {one.id for one in entries.values() if one.stage in WAITING}
        assert set(holders) == {one.id for one in entries.values() if one.stage in HOLDING}
        assert len(self._ledger) == len(holders)
        assert all(lease_id in self._ledger for lease_id in holders)
        assert self._num_choices == sum(one.size for one in holders.values())
        assert self._num_choices <= self._settings.max_running_requests
        assert self._num_long == sum(one.lane is Lane.LONG for one in holders.values())
        assert self._num_long <= self._settings.long_request_concurrency
        leaving = (Stage.PAUSING, Stage.CLOSING)
        assert self._num_leaving == sum(one.stage in leaving for one in holders.values())
        assert self._line.num_bounded <= self._settings.max_waiting_queue
        assert self._tally.arrived == self._tally.ended.total() + len(entries)
        for entry in entries.values():
            assert (entry.outcome is not None) == (entry.stage is Stage.CLOSING)
            assert entry.num_pauses <= self._settings.preemptions_max
        if self._settings.admission is Admission.RESERVE:
            assert self._ledger.peak() <= self._ledger.capacity_tokens, "more is lent than there is"

    # --- refusing -----------------------------------------------------------------------------

    def _refuse_impossible(self, entry: Entry) -> Refused | None:
        ticket, capacity = entry.ticket, self._ledger.capacity_tokens
        need = self._ledger.need_max(ticket)
        if need > capacity:
            return self._refuse(
                Refusal.KV_BUDGET_EXHAUSTED,
                RETRY_AFTER_MAX_S,
                f"The request may need {need} tokens of KV memory (prompt and `max_tokens`, for "
                f"each of n={ticket.n}) and there are {capacity}; ask for less.",
            )
        if ticket.n > self._settings.max_running_requests:
            return self._refuse(
                Refusal.KV_BUDGET_EXHAUSTED,
                RETRY_AFTER_MAX_S,
                f"`n` is {ticket.n} and at most {self._settings.max_running_requests} choices "
                "run at once; ask for fewer.",
            )
        return None

    def _refuse_in_line(self, entry: Entry, now: float) -> Refused | None:
        """Refuse for a full line or a deadline out of reach, or note the ETA it is told."""
        if self._line.num_bounded > self._settings.max_waiting_queue:
            return self._refuse(
                Refusal.QUEUE_FULL,
                self._outlook.promise_place_s(entry, now),
                f"The line is full: {self._line.num_bounded - entry.size} choices wait and at "
                f"most {self._settings.max_waiting_queue} may.",
            )
        guess_s = self._outlook.guess_s(entry, self._line.num_before(entry), now)
        told_s = self._outlook.corrected(guess_s)
        entry.wait_guess_s, entry.wait_told_s = guess_s, told_s
        return self._refuse_late(entry, told_s, now)

    def _refuse_late(self, entry: Entry, wait_s: float | None, now: float) -> Refused | None:
        first_s = self._outlook.first_token_s(entry, wait_s)
        left_s = min(entry.first_token_by_s, entry.end_by_s) - now
        if first_s <= left_s:
            return None
        return self._refuse(
            Refusal.DEADLINE_UNREACHABLE,
            clamp_retry_s(first_s - left_s),
            f"The first token is expected in {first_s:.1f} s, after the deadline in "
            f"{max(left_s, 0.0):.1f} s.",
        )

    def _refuse(self, reason: Refusal, retry_after_s: float, message: str) -> Refused:
        self._tally.refused[reason] += 1
        self._tally.ended[Outcome.REFUSED] += 1
        return Refused(reason, retry_after_s, message)

    # --- granting -----------------------------------------------------------------------------

    def _grant_all(self, now: float) -> list[Lease]:
        self._has_changed = False
        self._looked_s = now
        granted = []
        while (entry := self._next()) is not None:
            granted.append(self._grant(entry, now))
        return granted

    def _next(self) -> Entry | None:
        """The ticket that is to be granted now, if any."""
        if not self._line.has_in(Band.BATCH):
            self._turns.forget()
        for band in self._turns.order:
            before: list[Entry] = []  # waits in this band for what comes back
            for lane in (Lane.LONG, Lane.SHORT):
                entry = self._line.head(band, lane)
                if entry is None or self._is_yielding(entry):
                    continue
                room = self._room_for(entry, before)
                if room is _Room.YES:
                    return entry
                if room is _Room.NO:
                    before.append(entry)
            if before:
                return None
        return None

    def _is_yielding(self, entry: Entry) -> bool:
        """True while short tickets wait that this one was paused for."""
        if entry.yields_to is None:
            return False
        heads = (self._line.first_fresh(band, Lane.SHORT) for band in Band if band <= entry.band)
        return any(head is not None and head.arrival < entry.yields_to for head in heads)

    def _room_for(self, entry: Entry, before: Sequence[Entry]) -> _Room:
        """Whether it can be granted such that those before it still could be."""
        if entry.lane is Lane.LONG and not self._has_long_room(entry):
            return _Room.LANE_FULL
        choices = self._num_choices + entry.size + sum(one.size for one in before)
        if choices > self._settings.max_running_requests:
            return _Room.NO
        if not self._holders:
            return _Room.YES  # it fits alone: the door let nothing else in
        claims = [entry.claim, *(one.claim for one in before)]
        return _Room.YES if self._ledger.fits(claims) else _Room.NO

    def _has_long_room(self, entry: Entry) -> bool:
        if self._num_long == 0:
            return True
        share = self._settings.long_kv_share * self._ledger.capacity_tokens
        has_place = self._num_long < self._settings.long_request_concurrency
        return has_place and self._ledger.long_peak(entry.claim) <= share

    def _grant(self, entry: Entry, now: float) -> Lease:
        is_resumed = entry.is_paused
        is_batch_waiting = self._line.has_in(Band.BATCH)
        self._line.remove(entry)
        entry.move(Stage.GRANTED)
        entry.granted_s = now
        self._ledger.add(entry.id, entry.claim)
        self._holders[entry.id] = entry
        self._num_choices += entry.size
        self._num_long += entry.lane is Lane.LONG
        if is_resumed:
            self._tally.resumed += 1
        else:
            self._tally.granted += 1
            self._turns.grant(entry.band, entry.service, is_batch_waiting=is_batch_waiting)
            self._counters.charge(entry.tenant, W_IN * entry.uncached_tokens)
            self._judge_wait(entry, now)
            self._free_place(entry, now)
        return entry.lease()

    def _judge_wait(self, entry: Entry, now: float) -> None:
        if entry.wait_guess_s is None or entry.wait_told_s is None:
            return
        actual_s = now - entry.ticket.arrived_s
        self._pace.waited(entry.wait_guess_s, actual_s)
        self._tally.wait.add(entry.wait_told_s, actual_s)
        if self._observer is not None:
            self._observer.wait_judged(entry.wait_told_s, actual_s)

    def _free_place(self, entry: Entry, now: float) -> None:
        """A fresh ticket has left the line: somebody who was refused could have its place."""
        for predicted_s, actual_s in self._outlook.place_freed(entry.size, now):
            self._tally.retry_after.add(predicted_s, actual_s)
            if self._observer is not None:
                self._observer.retry_judged(predicted_s, actual_s)

    # --- running ------------------------------------------------------------------------------

    def _advance(self, entry: Entry, choice: int, added: int, now: float) -> None:
        entry.produced[choice] += added
        self._counters.charge(entry.tenant, W_OUT * added)
        if entry.stage is Stage.GRANTED:
            entry.move(Stage.RUNNING)
        assert entry.granted_s is not None
        if not entry.has_token:
            entry.has_token = True
            if not entry.num_pauses:
                self._pace.read_prompt(entry.uncached_tokens, now - entry.granted_s)
        if choice == 0:
            if entry.progressed_s is not None:
                self._pace.decoded(added, now - entry.progressed_s)
            entry.progressed_s = now

    def _end_choice(self, entry: Entry, choice: int, *, is_cut: bool) -> None:
        """Learn its length. A choice that was stopped only shows that it would have been longer."""
        entry.is_done[choice] = True
        length = entry.produced[choice]
        self._forecast.observe(entry.group, length, is_cut=is_cut)
        if not is_cut or length >= entry.ticket.max_tokens:
            self._tally.forecast.add(entry.expected_tokens, length)
            if self._observer is not None:
                self._observer.forecast_judged(entry.expected_tokens, length)

    # --- ending -------------------------------------------------------------------------------

    def _begin_closing(self, entry: Entry, outcome: Outcome) -> None:
        was_pausing = entry.stage is Stage.PAUSING
        entry.move(Stage.CLOSING)
        entry.outcome = outcome
        self._num_leaving += not was_pausing

    def _close(self, entry: Entry, outcome: Outcome, now: float) -> None:
        """The one ending."""
        self._has_changed = True
        if entry.stage in WAITING:
            self._line.remove(entry)
            if not entry.is_paused:
                self._free_place(entry, now)
        else:
            self._num_leaving -= entry.stage in (Stage.PAUSING, Stage.CLOSING)
            self._stop_holding(entry)
        outcome = entry.outcome or outcome
        self._learn_lengths(entry, outcome)
        entry.move(Stage.CLOSED)
        self._tally.ended[outcome] += 1
        del self._entries[entry.id]

    def _learn_lengths(self, entry: Entry, outcome: Outcome) -> None:
        is_complete = outcome is Outcome.COMPLETED
        for choice, length in enumerate(entry.produced):
            if not entry.is_done[choice] and (length or is_complete):
                is_cut = not is_complete or length >= entry.ticket.max_tokens
                self._end_choice(entry, choice, is_cut=is_cut)

    def _stop_holding(self, entry: Entry) -> None:
        self._ledger.drop(entry.id)
        del self._holders[entry.id]
        self._num_choices -= entry.size
        self._num_long -= entry.lane is Lane.LONG

    def _expire(
        self, ticket_id: str, now: float, expired: list[Expired], overdue: list[Overdue]
    ) -> None:
        entry = self._entries.get(ticket_id)
        deadline_s = entry.next_deadline_s if entry is not None else None
        if entry is None or deadline_s is None:
            return
        if deadline_s > now:
            heapq.heappush(self._deadlines, (deadline_s, entry.arrival, ticket_id))
        elif entry.stage in WAITING:
            is_over = entry.is_paused or entry.end_by_s <= now
            outcome = Outcome.REQUEST_TIMEOUT if is_over else Outcome.QUEUE_TIMEOUT
            told = self.position(ticket_id, now)
            self._close(entry, outcome, now)
            retry_s = clamp_retry_s(told.eta_s if told is not None else None)
            expired.append(Expired(entry.ticket, outcome, retry_s))
        else:
            lease = entry.lease()
            self._begin_closing(entry, Outcome.REQUEST_TIMEOUT)
            overdue.append(Overdue(lease, Outcome.REQUEST_TIMEOUT))

    # --- pausing ------------------------------------------------------------------------------

    def _ask_to_pause(self, now: float) -> list[Pause]:
        """Pause for the first short ticket, unless memory is on its way back already."""
        settings = self._settings
        if self._num_leaving or not settings.preemptions_max:
            return []
        heads = (self._line.first_fresh(band, Lane.SHORT) for band in sorted(Band))
        head = next((one for one in heads if one is not None), None)
        if head is None or now - head.ticket.arrived_s < settings.preempt_after_s:
            return []
        victims = choose_pauses(
            head,
            self._holders.values(),
            self._ledger,
            settings,
            num_choices=self._num_choices,
            now=now,
        )
        for victim in victims:
            victim.move(Stage.PAUSING)
            self._tally.pauses += 1
            self._tally.repeated_pauses += victim.num_pauses > 0
            victim.num_pauses += 1
        self._num_leaving += len(victims)
        return [Pause(victim.lease()) for victim in victims]

    # --- records ------------------------------------------------------------------------------

    def _new_entry(self, ticket: Ticket) -> Entry:
        settings = self._settings
        lane = lane_of(ticket, settings)
        group = self._forecast.group(ticket.model, ticket.tenant, lane)
        weight = ticket.weight or settings.tenant_weights.get(ticket.tenant, 1.0)
        self._num_arrivals += 1
        return Entry(
            ticket=ticket,
            lane=lane,
            arrival=self._num_arrivals,
            group=group,
            claim=self._ledger.claim(
                ticket, group, produced=0, num_open=ticket.n, is_long=lane is Lane.LONG
            ),
            expected_tokens=self._forecast.mean(group, 0, ticket.max_tokens),
            weight=weight,
            queue_until_s=_earlier(ticket.queue_deadline_s, ticket, settings.queue_timeout_s),
            first_token_by_s=_earlier(
                ticket.first_token_deadline_s, ticket, settings.first_token_timeout_s
            ),
            end_by_s=_earlier(ticket.deadline_s, ticket, settings.request_timeout_s),
        )

    def _enter(self, entry: Entry) -> None:
        """It stays: from here on it is somewhere until it ends."""
        self._entries[entry.id] = entry
        self._outlook.joined(entry)
        deadline_s = entry.next_deadline_s
        assert deadline_s is not None
        heapq.heappush(self._deadlines, (deadline_s, entry.arrival, entry.id))


def _earlier(deadline_s: float | None, ticket: Ticket, limit_s: float | None) -> float:
    """The ticket's own deadline or the settings' limit after its arrival; inf without either."""
    limit_at_s = inf if limit_s is None else ticket.arrived_s + limit_s
    return limit_at_s if deadline_s is None else min(deadline_s, limit_at_s)
