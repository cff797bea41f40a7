"""What the desk counts: numbers of a moment, numbers since the start, and how wrong it was."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvota.core.errors import Outcome, Refusal
from kvota.core.request import Band
from kvota.desk.entry import Entry
from kvota.desk.lanes import WaitingLine
from kvota.desk.ledger import Ledger
from kvota.desk.ticket import Lane, Stage
from kvota.desk.turn import Holders


class DeskObserver(Protocol):
    """Hears of every prediction that can be judged, and of every pause. Must be quick."""

    def forecast_judged(self, predicted_tokens: float, actual_tokens: int) -> None:
        """A choice has ended by itself; predicted when its ticket was granted."""

    def wait_judged(self, predicted_s: float, actual_s: float) -> None:
        """A ticket that had an ETA when it joined the line was granted."""

    def retry_judged(self, predicted_s: float, actual_s: float) -> None:
        """The place in line that a refused ticket was told to come back for has become free."""

    def lease_paused(self, *, is_repeated: bool) -> None:
        """A lease is to give its KV back for others; `is_repeated`: it did before."""


class Silence:
    """For whoever does not want to hear."""

    def forecast_judged(self, predicted_tokens: float, actual_tokens: int) -> None:
        pass

    def wait_judged(self, predicted_s: float, actual_s: float) -> None:
        pass

    def retry_judged(self, predicted_s: float, actual_s: float) -> None:
        pass

    def lease_paused(self, *, is_repeated: bool) -> None:
        pass


@dataclass(slots=True)
class ErrorTally:
    """Predicted and actual values of one kind, summed."""

    num: int = 0
    predicted: float = 0.0
    actual: float = 0.0
    absolute_error: float = 0.0

    def add(self, predicted: float, actual: float) -> None:
        self.num += 1
        self.predicted += predicted
        self.actual += actual
        self.absolute_error += abs(predicted - actual)


@dataclass(slots=True)
class Tally:
    """Since the start."""

    arrived: int = 0
    granted: int = 0  # first grants; a paused lease that goes on is not granted again
    resumed: int = 0
    pauses: int = 0  # leases paused for the short lane
    repeated_pauses: int = 0  # of those, leases that had been paused before: thrash
    refused: Counter[Refusal] = field(default_factory=Counter)
    ended: Counter[Outcome] = field(default_factory=Counter)
    forecast: ErrorTally = field(default_factory=ErrorTally)  # tokens
    wait: ErrorTally = field(default_factory=ErrorTally)  # seconds
    retry_after: ErrorTally = field(default_factory=ErrorTally)  # seconds


@dataclass(frozen=True, slots=True)
class DeskSnapshot:
    """Counts of this moment; `tally` is the desk's own and goes on counting."""

    capacity_tokens: int
    held_tokens: int  # by leases now, each block of a shared prefix once
    peak_tokens: float  # what they are expected to need at the worst moment
    pinned_tokens: int
    held_after_end_tokens: int  # by leases that have ended and are not released yet
    running: Mapping[Lane, int]  # requests that hold KV
    num_choices: int  # of those, as max_running_requests counts
    waiting: Mapping[tuple[Lane, Band], int]  # requests
    num_waiting_choices: int  # of those, but for paused ones
    tally: Tally


def snapshot_of(
    ledger: Ledger, line: WaitingLine[Entry], holders: Holders, tally: Tally
) -> DeskSnapshot:
    closing = [one for one in holders if one.stage is Stage.CLOSING]
    return DeskSnapshot(
        capacity_tokens=ledger.capacity_tokens,
        held_tokens=int(ledger.held_tokens().sum()) + ledger.pinned_tokens,
        peak_tokens=ledger.peak(),
        pinned_tokens=ledger.pinned_tokens,
        held_after_end_tokens=sum(ledger.held_by(entry.id) for entry in closing),
        running={Lane.SHORT: len(holders) - holders.num_long, Lane.LONG: holders.num_long},
        num_choices=holders.num_choices,
        waiting={(lane, band): line.num_in(band, lane) for band in Band for lane in Lane},
        num_waiting_choices=line.num_choices,
        tally=tally,
    )
