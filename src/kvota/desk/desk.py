"""The desk: every request is priced in KV memory, and runs, waits, or is refused honestly.

    arrive ─▶ price ─▶ Granted ─▶ progress … ─▶ release ─▶ closed
                 ├───▶ Queued ──(release, paused or tick grants it)──▶ …
                 └───▶ Refused

Public calls; `now` is seconds of the caller's clock and never goes back:

    arrive(ticket, now) -> Granted(lease) | Queued(position, eta_s, …) | Refused(reason, …)
    progress(lease_id, produced, now, *, choice, is_done, private_tokens)
    cancel(ticket_id, outcome, now) -> leases       it must end: waiting → closed, holding → closing
    release(ticket_id, outcome, now) -> leases      it has ended, and its blocks are back
    paused(lease_id, now) -> leases                 the blocks of a Pause are back
    tick(now) -> Ticked(granted, expired, overdue, pauses)
    reconfigure(settings, now) -> leases            other limits, from now on
    resize(capacity_tokens)                         other capacity, from now on
    position(ticket_id, now) · snapshot() · check()

Calls that make room return the leases granted by it; whoever owns the desk starts them. A lease
with `num_pauses` above 0 goes on where it was. Who is next: `turn.py`. Every call costs
O(log n) in what waits, and O(what runs) where it has to ask the ledger.
"""

import heapq

from kvota.core.errors import Outcome, Refusal
from kvota.core.request import Band
from kvota.desk.entry import Entry, ids_in, new_entry
from kvota.desk.fairness import W_IN, W_OUT, TenantCounters
from kvota.desk.forecast import Forecast
from kvota.desk.lanes import BandTurns, WaitingLine
from kvota.desk.latest import LatestStart
from kvota.desk.ledger import Ledger
from kvota.desk.lessons import Lessons
from kvota.desk.live_limits import Kept, check_change
from kvota.desk.outlook import Outlook
from kvota.desk.pace import Pace
from kvota.desk.pauses import Pausing
from kvota.desk.policies import new_policy
from kvota.desk.reading import Reading
from kvota.desk.refusals import Refusals
from kvota.desk.retry import clamp_retry_s
from kvota.desk.settings import DeskSettings
from kvota.desk.tally import DeskObserver, DeskSnapshot, Silence, Tally, snapshot_of
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
from kvota.desk.turn import Holders, Turn

RECHECK_S = 0.1  # while nobody leaves, the line is looked at again only this often


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
        self._kept = Kept()
        self._forecast = forecast
        self._observer: DeskObserver = observer or Silence()
        self._ledger = Ledger(
            capacity_tokens, new_policy(settings, forecast, block_size), block_size=block_size
        )
        self._counters = TenantCounters()
        self._bands = BandTurns(settings.batch_floor)
        self._line: WaitingLine[Entry] = WaitingLine(self._counters)
        self._holders = Holders(self._ledger)
        self._turn = Turn(settings, self._ledger, self._holders, self._line, self._bands)
        self._pace = Pace()
        latest = LatestStart(settings, self._ledger, self._line, self._holders, self._pace)
        self._outlook = Outlook(settings, self._ledger, self._line, self._pace, latest)
        self._pausing = Pausing(settings, self._ledger, self._line, self._holders, self._pace)
        self._tally = Tally()
        self._reading = Reading()
        self._refusals = Refusals(
            settings, self._ledger, self._line, self._outlook, self._tally, self._reading
        )
        self._lessons = Lessons(
            forecast, self._pace, self._reading, self._outlook, self._tally, self._observer
        )
        self._entries: dict[str, Entry] = {}
        self._deadlines: list[tuple[float, int, str]] = []  # a heap; may lag behind
        self._num_arrivals = 0
        self._has_changed = True  # since the line was looked at
        self._looked_s = 0.0

    # --- the life of a ticket -----------------------------------------------------------------

    def arrive(self, ticket: Ticket, now: float) -> Verdict:
        """Grant it, put it in line, or refuse it. Its id must be new among those not ended."""
        assert ticket.id not in self._entries, f"ticket {ticket.id} is here already"
        self._tally.arrived += 1
        self._num_arrivals += 1
        entry = new_entry(ticket, self._num_arrivals, self._settings, self._forecast, self._ledger)
        refused = self._refusals.impossible(entry)
        if refused is not None:
            return refused
        if self._turn.is_free_for(entry) and not self._refusals.is_lost(entry, now):
            self._line.pass_by(entry)
            self._enter(entry)
            self._begin(entry, now, is_batch_waiting=False)
            return Granted(entry.lease())
        self._line.push(entry)
        is_first = self._line.head(entry.band, entry.lane) is entry
        if is_first and self._turn.next() is entry:
            refused = self._refusals.too_late(entry, None, now)
            if refused is None:
                self._enter(entry)
                return Granted(self._grant(entry, now))
        else:
            refused = self._refusals.line_full(entry, now) or self._foresee(entry, now)
        if refused is not None:
            self._line.remove(entry)
            return refused
        self._enter(entry)
        entry.has_waited = True
        if self._line.num_fresh(entry.lane) == 1:
            self._pace.began_to_wait(entry.lane, now)
        assert entry.foreseen is not None
        return Queued(self._line.num_before(entry), entry.foreseen.told_s, entry.foreseen.basis)

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
            self._lessons.choice_ended(entry, choice, is_cut=produced >= entry.ticket.max_tokens)
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
        self._begin_closing(entry, outcome, now)
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
        entry.yields_to = self._num_arrivals
        entry.lends_tokens = self._ledger.held_by(entry.id)
        self._holders.remove(entry)
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
        if not self._has_changed and now - self._looked_s < RECHECK_S:
            return Ticked((), expired, overdue, ())
        granted = self._grant_all(now, expired)
        return Ticked(granted, expired, overdue, self._ask_to_pause(now))

    def reconfigure(self, settings: DeskSettings, now: float) -> list[Lease]:
        """Go by other limits from now on. Returns what the room was granted to.

        Lower limits take nothing away: what is beyond them leaves in its own time. Raises
        ConfigError, and changes nothing, where `live_limits.py` says so.
        """
        largest = max((entry.size for entry in self._entries.values()), default=0)
        check_change(self._settings, settings, largest=largest)
        holders = self._holders
        num_waiting = self._line.num_most
        num_here = (holders.num_choices, holders.num_long, num_waiting)
        self._kept = self._kept.limits_changed(*num_here)
        self._settings = settings
        for part in (self._turn, self._outlook, self._pausing, self._refusals):
            part.follow(settings)
        return self._grant_all(now)

    def resize(self, capacity_tokens: int) -> None:
        """From now on there is so much KV; who waits has it with the next `tick` at the latest.
        Leases keep what they have. A ticket in line that is larger now runs alone."""
        if capacity_tokens != self._ledger.capacity_tokens:
            self._kept = self._kept.capacity_changed(self._ledger.peak())
            self._ledger.capacity_tokens, self._has_changed = capacity_tokens, True

    # --- views --------------------------------------------------------------------------------

    def position(self, ticket_id: str, now: float) -> Queued | None:
        """Where a waiting ticket stands now; None when it does not wait."""
        entry = self._entries.get(ticket_id)
        if entry is None or entry.stage not in WAITING:
            return None
        seen = self._outlook.foresee(entry, now)
        return Queued(self._line.num_before(entry), seen.told_s, seen.basis)

    @property
    def settings(self) -> DeskSettings:
        return self._settings

    def lane(self, ticket_id: str) -> Lane | None:
        """None for every ticket that is not here (any more)."""
        entry = self._entries.get(ticket_id)
        return None if entry is None else entry.lane

    def stage(self, ticket_id: str) -> Stage:
        """CLOSED for every ticket that is not here (any more)."""
        entry = self._entries.get(ticket_id)
        return Stage.CLOSED if entry is None else entry.stage

    def service(self, tenant: str) -> float:
        """The tenant's virtual counter: weighted tokens served, over its weight, with lifts."""
        return self._counters.counter(tenant)

    def snapshot(self) -> DeskSnapshot:
        return snapshot_of(self._ledger, self._line, self._holders, self._tally)

    def check(self) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        self._line.check()
        self._holders.check(self._settings, self._kept)
        self._reading.check(self._holders)
        entries = self._entries
        assert {one.id for one in self._line} == ids_in(entries, WAITING), "lost in line"
        assert {one.id for one in self._holders} == ids_in(entries, HOLDING), "lost on the way"
        num_waiting_max = max(self._settings.max_waiting_queue, self._kept.num_waiting)
        assert self._line.num_most <= num_waiting_max, "the line is too long"
        assert self._tally.arrived == self._tally.ended.total() + len(entries), "an ending is off"
        for entry in entries.values():
            assert (entry.outcome is not None) == (entry.stage is Stage.CLOSING)
            assert entry.num_pauses <= self._settings.preemptions_max, "paused too often"

    # --- granting -----------------------------------------------------------------------------

    def _foresee(self, entry: Entry, now: float) -> Refused | None:
        """Note what it is told; a refusal when its deadline is out of reach by a prediction."""
        seen = entry.foreseen = self._outlook.foresee(entry, now)
        return self._refusals.too_late(entry, 0.0 if seen.basis.is_bound else seen.told_s, now)

    def _grant_all(self, now: float, expired: list[Expired] | None = None) -> list[Lease]:
        """Whoever has room begins. Who could begin and would be too late ends in `expired`.

        Without such a list the line stands still before it, until the next tick.
        """
        self._looked_s = now
        granted = []
        while (entry := self._turn.next()) is not None:
            if not self._refusals.is_lost(entry, now):
                granted.append(self._grant(entry, now))
            elif expired is not None:
                expired.append(self._give_up(entry, now))
            else:
                break
        self._has_changed = entry is not None
        return granted

    def _give_up(self, entry: Entry, now: float) -> Expired:
        retry_s = self._refusals.give_up(entry, now)
        self._close(entry, Outcome.REFUSED, now)
        reason = Refusal.DEADLINE_UNREACHABLE
        return Expired(entry.ticket, Outcome.REFUSED, retry_s, reason)

    def _grant(self, entry: Entry, now: float) -> Lease:
        """The next in line begins, or goes on."""
        is_batch_waiting = self._line.has_in(Band.BATCH)
        entry.was_owed |= self._bands.is_owed(entry.band)
        self._line.remove(entry)
        if entry.is_paused:
            self._hold(entry, now)
            self._tally.resumed += 1
        else:
            self._borrow(entry)
            self._begin(entry, now, is_batch_waiting=is_batch_waiting)
        return entry.lease()

    def _begin(self, entry: Entry, now: float, *, is_batch_waiting: bool) -> None:
        """Its first grant."""
        self._hold(entry, now)
        self._tally.granted += 1
        self._charge(entry, W_IN * entry.uncached_tokens, is_batch_waiting=is_batch_waiting)
        self._lessons.waited(entry, now)
        self._lessons.place_freed(entry, now)

    def _hold(self, entry: Entry, now: float) -> None:
        entry.move(Stage.GRANTED)
        entry.granted_s = now
        self._pace.busy(now)
        self._holders.add(entry)
        self._reading.begin(entry, now)

    def _borrow(self, entry: Entry) -> None:
        """A short ticket begins in the room that paused ones have left."""
        if entry.lane is Lane.SHORT:
            for lender in self._line.paused():
                lender.lends_tokens -= entry.footprint

    # --- running ------------------------------------------------------------------------------

    def _charge(self, entry: Entry, service: float, *, is_batch_waiting: bool) -> None:
        """Its tenant and its band have had so much more, in weighted tokens."""
        self._counters.charge(entry.tenant, service)
        self._bands.serve(
            entry.band, service, is_batch_waiting=is_batch_waiting, was_owed=entry.was_owed
        )

    def _advance(self, entry: Entry, choice: int, added: int, now: float) -> None:
        entry.produced[choice] += added
        self._charge(entry, W_OUT * added, is_batch_waiting=self._line.has_in(Band.BATCH))
        self._pausing.budget.computed(added)
        if entry.stage is Stage.GRANTED:
            entry.move(Stage.RUNNING)
        is_first = self._lessons.reading_ended(entry, now, has_token=True)
        if is_first and not entry.num_pauses:
            self._pausing.budget.computed(entry.uncached_tokens)
        entry.has_token = True
        if choice == 0:
            if entry.progressed_s is not None:
                self._pace.decoded(added, now - entry.progressed_s)
            entry.progressed_s = now

    # --- ending -------------------------------------------------------------------------------

    def _begin_closing(self, entry: Entry, outcome: Outcome, now: float) -> None:
        entry.move(Stage.CLOSING)
        entry.outcome = outcome
        self._lessons.reading_ended(entry, now, has_token=False)

    def _close(self, entry: Entry, outcome: Outcome, now: float) -> None:
        """The one ending."""
        self._has_changed = True
        if entry.stage in WAITING:
            self._line.remove(entry)
            if not entry.is_paused:
                self._lessons.place_freed(entry, now)
        else:
            self._holders.remove(entry)
            if not self._holders:
                self._pace.idle(now)
        outcome = entry.outcome or outcome
        self._lessons.reading_ended(entry, now, has_token=outcome is Outcome.COMPLETED)
        self._lessons.ticket_ended(entry, outcome)
        entry.move(Stage.CLOSED)
        self._tally.ended[outcome] += 1
        del self._entries[entry.id]

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
            lease, limit_s = entry.lease(), deadline_s - entry.ticket.arrived_s
            self._begin_closing(entry, Outcome.REQUEST_TIMEOUT, now)
            overdue.append(Overdue(lease, Outcome.REQUEST_TIMEOUT, limit_s, entry.has_token))

    # --- pausing ------------------------------------------------------------------------------

    def _ask_to_pause(self, now: float) -> list[Pause]:
        victims = self._pausing.choose(now)
        for victim in victims:
            victim.move(Stage.PAUSING)
            self._lessons.reading_ended(victim, now, has_token=False)
            is_repeated = victim.num_pauses > 0
            self._tally.pauses += 1
            self._tally.repeated_pauses += is_repeated
            self._observer.lease_paused(is_repeated=is_repeated)
            victim.num_pauses += 1
        return [Pause(victim.lease()) for victim in victims]

    def _enter(self, entry: Entry) -> None:
        """It stays: from here on it is somewhere until it ends."""
        self._entries[entry.id] = entry
        self._outlook.joined(entry)
        deadline_s = entry.next_deadline_s
        assert deadline_s is not None
        heapq.heappush(self._deadlines, (deadline_s, entry.arrival, entry.id))
