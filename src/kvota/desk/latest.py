"""The latest at which a ticket in line begins: told while nothing is known to predict it from.

A server that has just started has seen no output end, and nobody leave the line. But whoever holds
KV ends at the latest when it has produced max_tokens, at the measured speed; and before any speed
is known, at its deadline. In the order of these ends memory and places come back, until there is
enough for a ticket and for those before it. The line counts as it stands: who comes later and is
served before is not foreseen. More than all holders give back is given back by those in line
themselves, in rounds of the longest life among them.

It is no prediction: it is many times too long where outputs stay below max_tokens. So nobody is
refused for it, and nothing is learned from it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil

from kvota.core.request import Band
from kvota.desk.entry import Entry
from kvota.desk.lanes import WaitingLine
from kvota.desk.ledger import Ledger
from kvota.desk.pace import Pace
from kvota.desk.settings import DeskSettings
from kvota.desk.ticket import EtaBasis, Lane, Stage
from kvota.desk.turn import Holders

_REFRESH_S = 0.25  # the ends are worked out again after this long, or when others hold KV


@dataclass(frozen=True, slots=True)
class Latest:
    """Within `wait_s` from now, if `basis` holds."""

    wait_s: float
    basis: EtaBasis


@dataclass(frozen=True, slots=True)
class _Need:
    """KV tokens at most, places, and places of the long lane. Of one ticket, or of several."""

    tokens: float
    choices: float
    long: float

    def plus(self, other: "_Need", times: float = 1.0) -> "_Need":
        return _Need(
            self.tokens + times * other.tokens,
            self.choices + times * other.choices,
            self.long + times * other.long,
        )


_NOTHING = _Need(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Ends:
    """When the holders end at the latest, and what has come back by then."""

    looked_s: float
    version: int  # of the holders
    free: _Need
    at_s: Sequence[float]
    back: Sequence[_Need]  # with each end, and all before it
    mean: dict[Lane, _Need] = field(default_factory=dict)  # of those in line
    life_s: float = 0.0  # the longest of one in line


class LatestStart:
    """Reads the ledger, the holders and the line; changes none of them."""

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
        self._ends: _Ends | None = None

    def follow(self, settings: DeskSettings) -> None:
        """Go by other limits from now on."""
        self._settings = settings
        self._ends = None

    @property
    def basis(self) -> EtaBasis:
        return EtaBasis.DEADLINES if self._pace.step_s is None else EtaBasis.MAX_TOKENS

    def begins(self, entry: Entry, now: float) -> Latest:
        """Of an entry in line."""
        ends = self._look(now)
        need = self._need_of(entry).plus(
            ends.mean.get(entry.lane, _NOTHING), self._line.num_before(entry)
        )
        for lane, mean in ends.mean.items():
            if lane is not entry.lane:
                need = need.plus(mean, self._num_beside(lane, entry.band))
        if entry.lane is Lane.SHORT:
            need = _Need(need.tokens, need.choices, 0.0)
        return Latest(self._wait_s(need, ends, now), self.basis)

    def has_place(self, num_places: int, now: float) -> Latest:
        """So many places in line have become free, as those in line begin."""
        ends = self._look(now)
        mean = ends.mean.get(Lane.SHORT) or ends.mean.get(Lane.LONG) or _NOTHING
        need = _NOTHING.plus(mean, num_places / max(mean.choices, 1.0))
        return Latest(self._wait_s(need, ends, now), self.basis)

    # --- inside

    def _wait_s(self, need: _Need, ends: _Ends, now: float) -> float:
        """When the holders, and after them those in line, have given back what is missing."""
        if not ends.at_s:
            return 0.0
        free, all_back = ends.free, ends.back[-1]
        place = max(
            bisect_left(ends.back, need.tokens - free.tokens, key=lambda back: back.tokens),
            bisect_left(ends.back, need.choices - free.choices, key=lambda back: back.choices),
            bisect_left(ends.back, need.long - free.long, key=lambda back: back.long),
        )
        if place < len(ends.back):
            return max(ends.at_s[place] - now, 0.0)
        rounds = max(
            (need.tokens - free.tokens - all_back.tokens) / self._ledger.capacity_tokens,
            (need.choices - free.choices - all_back.choices) / self._settings.max_running_requests,
            (need.long - free.long - all_back.long) / self._settings.long_request_concurrency,
        )
        return max(ends.at_s[-1] - now, 0.0) + ceil(rounds) * ends.life_s

    def _num_beside(self, lane: Lane, band: Band) -> int:
        """Tickets of another lane that may begin before one of `band`."""
        num = sum(self._line.num_in(other, lane) for other in Band if other <= band)
        return min(num, self._settings.long_request_concurrency) if lane is Lane.LONG else num

    def _need_of(self, entry: Entry) -> _Need:
        is_long = entry.lane is Lane.LONG
        return _Need(self._ledger.need_max(entry.ticket), entry.size, float(is_long))

    def _look(self, now: float) -> _Ends:
        ends, version = self._ends, self._holders.num_changes
        if ends is None or ends.version != version or now - ends.looked_s >= _REFRESH_S:
            ends = self._ends = self._work_out(now)
        return ends

    def _work_out(self, now: float) -> _Ends:
        ordered = sorted(((self._end_s(one, now), one) for one in self._holders), key=_moment)
        needs = [self._need_of(one) for _, one in ordered]
        back = list(accumulate(needs, _Need.plus))
        taken = back[-1] if back else _NOTHING
        settings, waiting = self._settings, list(self._line)
        return _Ends(
            looked_s=now,
            version=self._holders.num_changes,
            free=_Need(
                self._ledger.capacity_tokens - taken.tokens,
                settings.max_running_requests - taken.choices,
                settings.long_request_concurrency - taken.long,
            ),
            at_s=[end_s for end_s, _ in ordered],
            back=back,
            mean={lane: self._mean_of([w for w in waiting if w.lane is lane]) for lane in Lane},
            life_s=max((self._life_s(one) for one in waiting), default=0.0),
        )

    def _mean_of(self, entries: Sequence[Entry]) -> _Need:
        total = _NOTHING
        for one in entries:
            total = total.plus(self._need_of(one))
        return _NOTHING.plus(total, 1 / len(entries)) if entries else _NOTHING

    def _end_s(self, holder: Entry, now: float) -> float:
        """The moment at which it has ended at the latest."""
        step_s = self._pace.step_s
        if holder.stage is Stage.CLOSING:
            return now + (step_s or 0.0)
        if step_s is None:
            return holder.end_by_s
        reading_s = 0.0
        if holder.reads_tokens is not None:
            reading_s = self._pace.first_token_s(holder.reads_tokens)
        left = holder.ticket.max_tokens - holder.longest_open
        return min(now + reading_s + left * step_s, holder.end_by_s)

    def _life_s(self, entry: Entry) -> float:
        """From its grant to its end, at most."""
        limit_s, step_s = self._settings.request_timeout_s, self._pace.step_s
        if step_s is None:
            return limit_s
        reading_s = self._pace.first_token_s(entry.uncached_tokens)
        return min(reading_s + entry.ticket.max_tokens * step_s, limit_s)


def _moment(end: tuple[float, Entry]) -> float:
    return end[0]
