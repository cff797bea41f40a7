"""Which leases to pause so that a short ticket that has waited too long can begin.

Who may be paused: leases of the long lane, or of a later band than the ticket's, that have run for
a minimum time and were not paused too often. The minimum doubles with every pause and includes the
time in which the lease computes again what it lost, so every run pays for its beginning. Who is
paused: batch before long, the latest granted first, and no more than needed; the last one needed
alone, if it is enough.

And only when it is worth it. What a paused lease had computed is computed again, and everybody who
runs or waits is later by that long. What is won is the time for which the tickets that can begin
would have waited for the lease to end:

    tickets that begin · rest of the lease's life  ≥  time to compute again · all who run or wait

Where the short lane itself is more than can be served, many wait and little is won: then nobody is
paused. Beside that, what pauses lose may be no more than a share of all tokens computed.
"""

from bisect import bisect_left
from collections.abc import Sequence

from kvota.core.request import Band
from kvota.desk.entry import Entry
from kvota.desk.lanes import WaitingLine
from kvota.desk.ledger import Ledger
from kvota.desk.pace import Pace
from kvota.desk.settings import DeskSettings
from kvota.desk.ticket import Lane, Stage
from kvota.desk.turn import Holders


class PauseBudget:
    """Tokens that pauses may still lose: a share of those computed, saved up to a bound.

    A pause may overdraw it once; the next ones wait until that is paid back.
    """

    def __init__(self, share: float, saved_max: float) -> None:
        self._share = share
        self._saved_max = saved_max
        self._left = 0.0

    @property
    def is_open(self) -> bool:
        return self._share > 0 and self._left >= 0

    def computed(self, num_tokens: int) -> None:
        left = self._left + self._share * num_tokens
        self._left = left if left < self._saved_max else self._saved_max

    def spend(self, num_tokens: float) -> None:
        self._left -= num_tokens


class Pausing:
    """Chooses whom to pause; changes nothing but its own budget."""

    def __init__(
        self,
        settings: DeskSettings,
        ledger: Ledger,
        line: WaitingLine[Entry],
        holders: Holders,
        pace: Pace,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._line = line
        self._holders = holders
        self._pace = pace
        share = settings.pause_waste_max
        self.budget = PauseBudget(share, share * ledger.capacity_tokens)

    def follow(self, settings: DeskSettings) -> None:
        """Go by other limits from now on."""
        self._settings = settings

    def choose(self, now: float) -> Sequence[Entry]:
        """The leases to pause now, for the first short ticket; mostly none."""
        head = self._first_short()
        if head is None or now - head.ticket.arrived_s < self._settings.preempt_after_s:
            return ()
        is_coming = any(one.stage in (Stage.PAUSING, Stage.CLOSING) for one in self._holders)
        if is_coming or not self.budget.is_open:
            return ()
        victims = self._victims(head, now)
        if not victims or not self._is_worth(victims, head, now):
            return ()
        self.budget.spend(sum(self._lost_tokens(victim, now) for victim in victims))
        return victims

    def _first_short(self) -> Entry | None:
        heads = (self._line.first_fresh(band, Lane.SHORT) for band in sorted(Band))
        return next((one for one in heads if one is not None), None)

    def _victims(self, head: Entry, now: float) -> Sequence[Entry]:
        """Leases without which `head` fits; none when no set of them is enough."""
        if self._makes_room(head, []):
            return ()  # it waits for its turn, not for memory
        candidates = [one for one in self._holders if self._may_pause(one, head, now)]
        candidates.sort(key=_last_first)
        if not candidates or not self._makes_room(head, candidates):
            return ()
        count = bisect_left(
            range(1, len(candidates)),
            True,
            key=lambda count: self._makes_room(head, candidates[:count]),
        )
        last = candidates[count : count + 1]
        return last if count and self._makes_room(head, last) else candidates[: count + 1]

    def _makes_room(self, head: Entry, victims: Sequence[Entry]) -> bool:
        taken = self._holders.num_choices - sum(victim.size for victim in victims) + head.size
        if taken > self._settings.max_running_requests:
            return False
        return self._ledger.fits([head.claim], without=[victim.id for victim in victims])

    def _may_pause(self, entry: Entry, head: Entry, now: float) -> bool:
        is_less_urgent = entry.lane is Lane.LONG or entry.band > head.band
        return (
            is_less_urgent
            and entry.band >= head.band
            and entry.stage in (Stage.GRANTED, Stage.RUNNING)
            and entry.num_pauses < self._settings.preemptions_max
            and self._has_run(entry, now)
        )

    def _has_run(self, entry: Entry, now: float) -> bool:
        assert entry.granted_s is not None
        least_s = self._settings.preempt_min_run_s * (1 << entry.num_pauses)
        if entry.num_pauses:
            least_s += self._pace.first_token_s(entry.unread_tokens)
        return now - entry.granted_s >= least_s

    # --- what it costs and what it brings -----------------------------------------------------

    def _is_worth(self, victims: Sequence[Entry], head: Entry, now: float) -> bool:
        step_s = self._pace.step_s
        if step_s is None:
            return True  # nothing is known of how long anything takes
        waiting = self._line.num_fresh(Lane.SHORT)
        lost_s = sum(self._seconds_again(one, now) for one in victims)
        rest_s = min(_rest_tokens(victim) for victim in victims) * step_s
        num_begun = min(waiting, self._num_fitting(victims, head))
        return num_begun * rest_s >= lost_s * (len(self._holders) + waiting)

    def _num_fitting(self, victims: Sequence[Entry], head: Entry) -> int:
        """How many tickets like `head` begin in the room of the victims."""
        room = sum(self._ledger.held_by(victim.id) for victim in victims)
        places = self._settings.max_running_requests - self._holders.num_choices
        places += sum(victim.size for victim in victims)
        return max(min(int(room / max(head.footprint, 1.0)), places // head.size), 1)

    def _seconds_again(self, entry: Entry, now: float) -> float:
        return self._pace.first_token_s(round(self._lost_tokens(entry, now)))

    def _lost_tokens(self, entry: Entry, now: float) -> float:
        """What it has computed so far. Of a prompt being read, as much as the pace makes likely."""
        whole = entry.unread_tokens
        if entry.reads_tokens is None:
            return whole
        assert entry.granted_s is not None
        expected_s = self._pace.first_token_s(whole)
        return whole * min((now - entry.granted_s) / expected_s, 1.0) if expected_s else whole


def _rest_tokens(entry: Entry) -> float:
    """Steps until it has ended, as expected when it arrived; at least one."""
    return max(entry.expected_tokens - entry.longest_open, 1.0)


def _last_first(entry: Entry) -> tuple[int, float]:
    assert entry.granted_s is not None
    return -entry.band, -entry.granted_s
