"""Who holds KV, and which waiting ticket is granted next.

The bands come in turn (`lanes.py`); in a band the long lane, within its share and its number, then
the short lane; in a lane whoever was paused, then the tenant with the least service. The first in
a lane is never overtaken within it. When it waits for memory, no later band is served, and a short
ticket is granted only if the waiting long one would still fit: the short lane borrows what the
long lane leaves idle, and gives it back by not renewing the loan.

A ticket larger than the long lane's share may run as the only one of its lane: it fits the pool,
and could not run at all otherwise.
"""

from collections.abc import Iterator, Sequence
from enum import Enum, auto

from kvota.core.request import Band
from kvota.desk.entry import Entry
from kvota.desk.lanes import BandTurns, WaitingLine
from kvota.desk.ledger import Ledger
from kvota.desk.live_limits import Kept
from kvota.desk.settings import Admission, DeskSettings
from kvota.desk.ticket import Lane


class Holders:
    """The tickets that hold KV, and their places in the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._entries: dict[str, Entry] = {}
        self.num_choices = 0
        self.num_long = 0
        self.num_changes = 0  # tickets that came or went

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, lease_id: str) -> Entry | None:
        return self._entries.get(lease_id)

    def add(self, entry: Entry) -> None:
        self._ledger.add(entry.id, entry.claim)
        self._entries[entry.id] = entry
        self.num_changes += 1
        self.num_choices += entry.size
        self.num_long += entry.lane is Lane.LONG

    def remove(self, entry: Entry) -> None:
        self._ledger.drop(entry.id)
        del self._entries[entry.id]
        self.num_changes += 1
        self.num_choices -= entry.size
        self.num_long -= entry.lane is Lane.LONG

    def check(self, settings: DeskSettings, kept: Kept) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        self._ledger.check()
        assert len(self._ledger) == len(self._entries)
        assert all(lease_id in self._ledger for lease_id in self._entries)
        assert all(entry.holds_kv for entry in self)
        assert self.num_choices == sum(entry.size for entry in self)
        num_choices_max = max(settings.max_running_requests, kept.num_choices)
        assert self.num_choices <= num_choices_max, "more run than may"
        assert self.num_long == sum(entry.lane is Lane.LONG for entry in self)
        num_long_max = max(settings.long_request_concurrency, kept.num_long)
        assert self.num_long <= num_long_max, "more long ones than may"
        if settings.admission is Admission.RESERVE:
            lent_max = max(self._ledger.capacity_tokens, kept.peak_tokens)
            is_within = self._ledger.peak() <= lent_max or len(self) == 1
            assert is_within, "more is lent than is there"


class _Room(Enum):
    YES = auto()
    NO = auto()  # memory or places are missing: what comes back is for this ticket
    LANE_FULL = auto()  # its lane has all it may have: others need not wait for it


class Turn:
    """Chooses; changes nothing but what the batch band is owed."""

    def __init__(
        self,
        settings: DeskSettings,
        ledger: Ledger,
        holders: Holders,
        line: WaitingLine[Entry],
        bands: BandTurns,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._holders = holders
        self._line = line
        self._bands = bands

    def follow(self, settings: DeskSettings) -> None:
        """Go by other limits from now on."""
        self._settings = settings

    def next(self) -> Entry | None:
        """The ticket that is to be granted now, if any."""
        if not self._line.has_in(Band.BATCH):
            self._bands.forget()
        for band in self._bands.order:
            if not self._line.has_in(band):
                continue
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

    def is_free_for(self, entry: Entry) -> bool:
        """Nobody waits and a fresh ticket has room: it would be the first in line, and the next."""
        if self._line:
            return False
        self._bands.forget()
        return self._room_for(entry, ()) is _Room.YES

    def _is_yielding(self, entry: Entry) -> bool:
        """True while short tickets wait that this one was paused for, and its room is not used up.

        The room is lent once: the short ones that fill it do not pass it on to others.
        """
        if entry.lends_tokens <= 0:
            return False
        heads = (self._line.first_fresh(band, Lane.SHORT) for band in Band if band <= entry.band)
        return any(head is not None and head.arrival <= entry.yields_to for head in heads)

    def _room_for(self, entry: Entry, before: Sequence[Entry]) -> _Room:
        """Whether it can be granted such that those before it still could be."""
        if entry.lane is Lane.LONG and not self._has_long_room(entry):
            return _Room.LANE_FULL
        choices = self._holders.num_choices + entry.size + sum(one.size for one in before)
        if choices > self._settings.max_running_requests:
            return _Room.NO
        if not self._holders:
            return _Room.YES  # it fits alone: the door let nothing else in
        claims = [entry.claim, *(one.claim for one in before)]
        return _Room.YES if self._ledger.fits(claims) else _Room.NO

    def _has_long_room(self, entry: Entry) -> bool:
        if self._holders.num_long == 0:
            return True
        if self._holders.num_long >= self._settings.long_request_concurrency:
            return False
        share = self._settings.long_kv_share * self._ledger.capacity_tokens
        return self._ledger.long_peak(entry.claim) <= share
