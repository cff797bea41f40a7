"""The waiting line: two bands, in each a short and a long lane, in each the tenants' queues.

    interactive   short  paused ▸▸  fair queue ▸▸▸▸▸▸
                  long   paused ▸   fair queue ▸▸
    batch         short  …

interactive comes before batch, but for the floor: while batch waits it is owed `batch_floor` of
all service that is given: prompts as they are granted, outputs as they are produced. When it is
owed anything, it goes first. What it was owed is forgotten when nothing of it waits any more.

Each band has a bound of its own, so that batch cannot fill the line for interactive, nor the other
way. Two kinds of ticket do not count against it: a paused one, in front of its lane, which was let
in once; and one that was let in beyond the bound, as the only one of its tenant. Of these there may
be as many again, so that nobody fills the line by calling himself many.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from kvota.core.request import Band
from kvota.desk.fairness import FairQueue, InLine, TenantCounters, rank_of
from kvota.desk.ticket import Lane


class InLanes(InLine, Protocol):
    """What the line needs to know of a ticket."""

    is_beyond: bool  # it waits beyond the bound

    @property
    def band(self) -> Band: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def size(self) -> int:
        """What it counts for against the bound: its choices."""

    @property
    def is_paused(self) -> bool: ...

    @property
    def weight(self) -> float: ...


Entry = TypeVar("Entry", bound=InLanes)


class BandTurns:
    """Which band goes first, so that batch gets its floor."""

    def __init__(self, floor: float) -> None:
        self._owed_per_token = floor / (1 - floor)
        self._owed = 0.0

    @property
    def order(self) -> Sequence[Band]:
        if self._owed > 0:
            return (Band.BATCH, Band.INTERACTIVE)
        return (Band.INTERACTIVE, Band.BATCH)

    def forget(self) -> None:
        """Nothing of batch waits: it is owed nothing."""
        self._owed = 0.0

    def is_owed(self, band: Band) -> bool:
        """Whether a grant to `band` now is one that it is owed: all that it uses counts for it.

        Otherwise nobody else could use the room, and what it does there costs batch nothing.
        """
        return band is Band.BATCH and self._owed > 0

    def serve(self, band: Band, service: float, *, is_batch_waiting: bool, was_owed: bool) -> None:
        """A ticket of `band` has used `service` (weighted tokens); `was_owed` at its grant."""
        if not is_batch_waiting:
            self._owed = 0.0
        elif band is Band.INTERACTIVE:
            self._owed += service * self._owed_per_token
        elif was_owed:
            self._owed -= service


class WaitingLine(Generic[Entry]):
    """Every ticket that waits. Attributes may be read; only the methods change them."""

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
        self._fresh: dict[tuple[Band, Lane], FairQueue[Entry]] = {
            (band, lane): FairQueue(counters) for band in sorted(Band) for lane in Lane
        }
        self._paused: dict[tuple[Band, Lane], list[Entry]] = {key: [] for key in self._fresh}
        self.num_choices = 0  # of tickets that were never granted
        self.num_bounded = dict.fromkeys(Band, 0)  # of those, what counts against a band's bound
        self.num_beyond = dict.fromkeys(Band, 0)  # and the others
        self._num_in_band = dict.fromkeys(Band, 0)

    def __len__(self) -> int:
        return sum(self._num_in_band.values())

    def __iter__(self) -> Iterator[Entry]:
        for key, queue in self._fresh.items():
            yield from self._paused[key]
            yield from queue

    def num_in(self, band: Band, lane: Lane) -> int:
        return len(self._fresh[band, lane]) + len(self._paused[band, lane])

    def num_fresh(self, lane: Lane) -> int:
        """Tickets of a lane that were never granted."""
        return sum(len(self._fresh[band, lane]) for band in Band)

    def has_in(self, band: Band) -> bool:
        return self._num_in_band[band] > 0

    def head(self, band: Band, lane: Lane) -> Entry | None:
        """The next of a lane: a paused one if there is any."""
        paused = self._paused[band, lane]
        return paused[0] if paused else self._fresh[band, lane].head

    @property
    def num_most(self) -> int:
        """Choices in line within the bound or beyond it, of either band, whatever is most."""
        return max(*self.num_bounded.values(), *self.num_beyond.values())

    def let_in_beyond(self, entry: Entry) -> None:
        """It stays in line, and does not count against the bound."""
        entry.is_beyond = True
        self.num_bounded[entry.band] -= entry.size
        self.num_beyond[entry.band] += entry.size

    def is_only_one(self, entry: Entry) -> bool:
        """Whether nothing else of its tenant waits, in whatever band and lane; it is in line."""
        return self._counters.num_waiting(entry.tenant) == 1

    def first_fresh(self, band: Band, lane: Lane) -> Entry | None:
        return self._fresh[band, lane].head

    def paused(self) -> Iterator[Entry]:
        for entries in self._paused.values():
            yield from entries

    def push(self, entry: Entry) -> None:
        self._counters.enter(entry.tenant, entry.weight)
        self._num_in_band[entry.band] += 1
        if entry.is_paused:
            insort(self._paused[entry.band, entry.lane], entry, key=rank_of)
        else:
            self._fresh[entry.band, entry.lane].push(entry)
            self._count(entry, entry.size)

    def pass_by(self, entry: Entry) -> None:
        """What `push` and then `remove` come to for a fresh ticket while nobody waits."""
        self._counters.pass_by(entry.tenant, entry.weight)

    def remove(self, entry: Entry) -> None:
        """Take it out. Whether it is paused must not have changed since it was pushed."""
        if entry.is_paused:
            paused = self._paused[entry.band, entry.lane]
            place = bisect_left(paused, entry.rank, key=rank_of)
            assert paused[place] is entry, "a paused ticket is not in line"
            del paused[place]
        else:
            self._fresh[entry.band, entry.lane].remove(entry)
            self._count(entry, -entry.size)
        self._num_in_band[entry.band] -= 1
        self._counters.leave(entry.tenant)

    def num_before(self, entry: Entry) -> int:
        """How many tickets of its lane are expected to be served before this one."""
        lane, band = entry.lane, entry.band
        ahead = sum(self.num_in(other, lane) for other in Band if other < band)
        paused = self._paused[band, lane]
        if entry.is_paused:
            return ahead + bisect_left(paused, entry.rank, key=rank_of)
        return ahead + len(paused) + self._fresh[band, lane].num_before(entry)

    def _count(self, entry: Entry, num_choices: int) -> None:
        self.num_choices += num_choices
        counts = self.num_beyond if entry.is_beyond else self.num_bounded
        counts[entry.band] += num_choices

    def check(self) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        choices, bounded, beyond = 0, dict.fromkeys(Band, 0), dict.fromkeys(Band, 0)
        for (band, lane), queue in self._fresh.items():
            entries = list(queue)
            assert len(entries) == len(queue)
            assert all(not entry.is_paused for entry in entries)
            assert all(entry.is_paused for entry in self._paused[band, lane])
            together = entries + self._paused[band, lane]
            assert all((one.band, one.lane) == (band, lane) for one in together)
            choices += sum(entry.size for entry in entries)
            bounded[band] += sum(entry.size for entry in entries if not entry.is_beyond)
            beyond[band] += sum(entry.size for entry in entries if entry.is_beyond)
        assert bounded == self.num_bounded, "the bound of the line is miscounted"
        assert beyond == self.num_beyond, "what is beyond the bound is miscounted"
        assert choices == self.num_choices, "the choices in line are miscounted"
        for band, num in self._num_in_band.items():
            assert num == sum(self.num_in(band, lane) for lane in Lane), "a band is miscounted"
