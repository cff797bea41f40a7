"""Saying no at the door, with the reason, the numbers, and when to come back."""

from kvota.core.errors import Outcome, Refusal
from kvota.desk.entry import Entry
from kvota.desk.lanes import WaitingLine
from kvota.desk.ledger import Ledger
from kvota.desk.outlook import Outlook
from kvota.desk.reading import Reading
from kvota.desk.retry import RETRY_AFTER_MAX_S, clamp_retry_s
from kvota.desk.settings import DeskSettings
from kvota.desk.tally import Tally
from kvota.desk.ticket import EtaBasis, Refused


class Refusals:
    """Each method returns the refusal, which is then counted as the ticket's ending, or None."""

    def __init__(
        self,
        settings: DeskSettings,
        ledger: Ledger,
        line: WaitingLine[Entry],
        outlook: Outlook,
        tally: Tally,
        reading: Reading,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._line = line
        self._outlook = outlook
        self._tally = tally
        self._reading = reading

    def follow(self, settings: DeskSettings) -> None:
        """Go by other limits from now on."""
        self._settings = settings

    def impossible(self, entry: Entry) -> Refused | None:
        """It could not run if it were alone."""
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

    def line_full(self, entry: Entry, now: float) -> Refused | None:
        """`entry` is in line already; with it that of its band is longer than allowed.

        Whoever has nothing else in line waits beyond the bound: others have filled it. There are
        as many such places again.
        """
        num, most = self._line.num_bounded[entry.band], self._settings.max_waiting_queue
        if num <= most:
            return None
        has_place = self._line.num_beyond[entry.band] + entry.size <= most
        if has_place and self._line.is_only_one(entry):
            self._line.let_in_beyond(entry)
            return None
        comeback = self._outlook.promise_place(entry, now)
        return self._refuse(
            Refusal.QUEUE_FULL,
            comeback.wait_s,
            f"The line is full: {num - entry.size} choices wait and at most {most} may."
            + _caution(comeback.basis),
        )

    def too_late(self, entry: Entry, wait_s: float | None, now: float) -> Refused | None:
        """Granted after `wait_s` (None: now), it would probably not begin in time, or its first
        token miss its deadline.

        Probably: of tickets that find what it finds, the quantile of `first_token.py` does.
        """
        expected_s, left_s = self._first_token_s(entry, wait_s, now), entry.due_s - now
        what = "The first token is expected in {:.3g} s, after the deadline in {:.3g} s."
        if expected_s <= left_s:
            expected_s, left_s = self._begins_s(entry, wait_s, now), entry.begin_by_s - now
            what = "It would begin in {:.3g} s, after the longest wait is over in {:.3g} s."
        if expected_s <= left_s:
            return None
        return self._refuse(
            Refusal.DEADLINE_UNREACHABLE,
            self._retry_s(entry, expected_s - left_s, now),
            what.format(expected_s, max(left_s, 0.0)),
        )

    def is_lost(self, entry: Entry, now: float) -> bool:
        """It may be granted now, and would not begin in time or miss its deadline: what it
        computed would be for nobody."""
        if entry.has_token:
            return False
        if not entry.num_pauses and self._begins_s(entry, None, now) > entry.begin_by_s - now:
            return True
        left_s = entry.due_s - now
        if self._reading.is_idle(entry):
            return self._reading.fastest_s(entry) > left_s
        return not self._reading.is_within(entry, left_s, now)

    def give_up(self, entry: Entry, now: float) -> float:
        """Count a lost ticket as refused. Returns when to come back, in seconds."""
        self._tally.refused[Refusal.DEADLINE_UNREACHABLE] += 1
        return self._retry_s(entry, self._reading.bound_s(entry, now) - (entry.due_s - now), now)

    def _retry_s(self, entry: Entry, late_s: float, now: float) -> float:
        """When the place of somebody before it is free, for those that come with such patience.

        Who is too late even for an engine that does nothing else is told by how much.
        """
        patience_s = entry.due_s - entry.ticket.arrived_s
        if self._reading.fastest_s(entry) > patience_s:
            return clamp_retry_s(late_s)
        return self._outlook.promise_place(entry, now).wait_s

    def _first_token_s(self, entry: Entry, wait_s: float | None, now: float) -> float:
        """Seconds from now that its first token takes, most probably at most."""
        if wait_s is not None:
            num_before = self._line.num_before(entry)
            return self._reading.bound_in_line_s(entry, wait_s, num_before, now)
        if self._reading.is_idle(entry):
            return self._reading.fastest_s(entry)
        return self._reading.bound_s(entry, now)

    def _begins_s(self, entry: Entry, wait_s: float | None, now: float) -> float:
        """Seconds from now until the engine begins with it, most probably at most."""
        if wait_s is None:
            return self._reading.begins_s(entry, 0.0, 0, now)
        return self._reading.begins_s(entry, wait_s, self._line.num_before(entry), now)

    def _refuse(self, reason: Refusal, retry_after_s: float, message: str) -> Refused:
        self._tally.refused[reason] += 1
        self._tally.ended[Outcome.REFUSED] += 1
        return Refused(reason, retry_after_s, message)


def _caution(basis: EtaBasis | None) -> str:
    """What a time to come back rests on, where it is no prediction yet."""
    if basis is EtaBasis.MAX_TOKENS:
        return (
            " No output has ended yet, so the time to come back is the latest: it counts every "
            "output as `max_tokens` long, at the speed of now."
        )
    return "" if basis is not None else " No speed is known yet: the time to come back is a guess."
