"""When: the predicted wait of a ticket in line, and what a refused one is told.

A ticket rents KV memory for a time: its prompt from grant to end, each token of output from when
it is produced. That is its rent, in token-seconds, expected from the forecast and the pace. Leases
that are replaced as they end rent out, each second, what they hold together. So tickets leave the
line at the rate

    tickets per second = tokens held / mean rent of a ticket

whatever it is that limits them, memory or places (Little's law, in tokens). The long lane has its
own number of places; for its tickets the same holds with what long leases hold.

Where nothing is known of how long outputs become, how fast the line moves says it; and where
nobody has left the line yet, the latest possible moment is told (`latest.py`).
"""

from dataclasses import dataclass

from kvota.desk.entry import Entry
from kvota.desk.lanes import WaitingLine
from kvota.desk.latest import LatestStart
from kvota.desk.ledger import Ledger
from kvota.desk.pace import Pace
from kvota.desk.retry import Promises, clamp_retry_s
from kvota.desk.settings import DeskSettings
from kvota.desk.ticket import EtaBasis, Foreseen, Lane

_REFRESH_S = 0.25  # the ledger is asked again after this long, not for each who wants to know
_MEMORY = 0.98  # of 1 per ticket: the last 50 or so count


@dataclass(frozen=True, slots=True)
class _Stay:
    """What a ticket is expected to need."""

    prompt: float  # tokens that it alone holds
    uncached: float  # tokens of prompt to compute
    tokens: float  # of output, one choice
    growth: float  # token-steps, all choices
    footprint: float  # tokens held at the end

    @staticmethod
    def of(entry: Entry) -> "_Stay":
        return _Stay(
            float(entry.claim.private_prompt),
            float(entry.uncached_tokens),
            entry.expected_tokens,
            entry.expected_growth * entry.size,
            entry.footprint,
        )

    def towards(self, other: "_Stay") -> "_Stay":
        """This sliding mean, one ticket later."""
        keep, add = _MEMORY, 1 - _MEMORY
        return _Stay(
            keep * self.prompt + add * other.prompt,
            keep * self.uncached + add * other.uncached,
            keep * self.tokens + add * other.tokens,
            keep * self.growth + add * other.growth,
            keep * self.footprint + add * other.footprint,
        )

    def rent(self, pace: Pace, step_s: float) -> float:
        """Token-seconds."""
        life_s = pace.first_token_s(round(self.uncached)) + self.tokens * step_s
        return self.prompt * life_s + self.growth * step_s


@dataclass(frozen=True, slots=True)
class _Room:
    """The ledger at one moment."""

    held_tokens: float
    held_by_long: float
    free_tokens: float
    free_choices: int


@dataclass(frozen=True, slots=True)
class Comeback:
    """When a refused ticket is to come back, within 1..120 s. `basis` None: nothing is known."""

    wait_s: float
    basis: EtaBasis | None


class Outlook:
    """Reads the ledger and the line; changes neither."""

    def __init__(
        self,
        settings: DeskSettings,
        ledger: Ledger,
        line: WaitingLine[Entry],
        pace: Pace,
        latest: LatestStart,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._line = line
        self._pace = pace
        self._latest = latest
        self._promises = Promises()
        self._mean_stay: dict[Lane, _Stay] = {}
        self._room = _Room(0.0, 0.0, 0.0, 0)
        self._looked_s: float | None = None

    def follow(self, settings: DeskSettings) -> None:
        """Go by other limits from now on."""
        self._settings = settings
        self._latest.follow(settings)

    def joined(self, entry: Entry) -> None:
        """Learn what the tickets of a lane need."""
        if not entry.is_forecast:
            return
        stay = _Stay.of(entry)
        mean = self._mean_stay.get(entry.lane)
        self._mean_stay[entry.lane] = stay if mean is None else mean.towards(stay)

    def foresee(self, entry: Entry, now: float) -> Foreseen:
        """The wait of an entry in line: as predicted, or at most."""
        guess_s, basis = self._guess_s(entry, now), EtaBasis.FORECAST
        if guess_s is None:
            guess_s = self._pace.line_s(entry.lane, self._line.num_before(entry))
            basis = EtaBasis.LINE
        if guess_s is not None:
            return Foreseen(guess_s * self._pace.honesty, basis, guess_s)
        latest = self._latest.begins(entry, now)
        return Foreseen(latest.wait_s, latest.basis)

    def _guess_s(self, entry: Entry, now: float) -> float | None:
        """Uncorrected seconds until a waiting entry is granted.

        None while no pace is known, or nothing of how long such outputs become: a wait worked out
        from max_tokens would be many times too long, and refuse whom the line was made for.
        """
        if not entry.is_forecast:
            return None
        room = self._look(now)
        num_before = self._line.num_before(entry)
        mean, own = self._mean_stay.get(entry.lane), _Stay.of(entry)
        ahead = mean or own
        num_free = min(room.free_tokens / max(ahead.footprint, 1.0), room.free_choices)
        count = max(num_before - num_free, 0.0)
        waits = [self._wait_s(count, ahead, own, room.held_tokens)]
        if entry.lane is Lane.LONG and room.held_by_long:
            waits.append(self._wait_s(num_before, ahead, own, room.held_by_long))
        known = [wait for wait in waits if wait is not None]
        return max(known) if known else None

    def first_token_s(self, entry: Entry, wait_s: float | None) -> float:
        """Predicted seconds from now to its first token. What is not known counts as 0."""
        return (wait_s or 0.0) + self._pace.first_token_s(entry.uncached_tokens)

    def promise_place(self, entry: Entry, now: float) -> Comeback:
        """Retry-After for a ticket that found no place; from what is held, or how places go."""
        places = self._promises.num_ahead(now) + entry.size
        guess_s, basis = self._place_s(entry, places, now)
        wait_s = clamp_retry_s(guess_s)
        self._promises.make(entry.size, wait_s, now)
        return Comeback(wait_s, basis)

    def _place_s(
        self, entry: Entry, places: int, now: float
    ) -> tuple[float | None, EtaBasis | None]:
        """Seconds until so many places in line are free, and what says so."""
        guess_s, basis = None, EtaBasis.FORECAST
        if entry.is_forecast:
            mean = self._mean_stay.get(entry.lane, _Stay.of(entry))
            guess_s = self._wait_s(places - 1, mean, mean, self._look(now).held_tokens)
        if guess_s is None:
            guess_s, basis = self._pace.places_s(places), EtaBasis.LINE
        if guess_s is not None:
            return guess_s * self._pace.honesty, basis
        if self._latest.basis is EtaBasis.MAX_TOKENS:
            return self._latest.has_place(places, now).wait_s, EtaBasis.MAX_TOKENS
        return None, None  # deadlines are too far off for a time to look again

    def place_freed(self, num_places: int, now: float) -> list[tuple[float, float]]:
        """Places in line are free again; (predicted, actual) of the promises now judged."""
        return self._promises.freed(num_places, now)

    def _wait_s(self, num_ahead: float, ahead: _Stay, own: _Stay, held: float) -> float | None:
        """Seconds until `num_ahead` tickets and one's own have been let in."""
        step_s = self._pace.step_s
        if step_s is None or not held:
            return None
        rent = num_ahead * ahead.rent(self._pace, step_s) + own.rent(self._pace, step_s)
        return rent / held

    def _look(self, now: float) -> _Room:
        if self._looked_s is None or now - self._looked_s >= _REFRESH_S:
            self._looked_s = now
            ledger = self._ledger
            taken = int(ledger.rows.num_open.sum())
            self._room = _Room(
                held_tokens=float(ledger.held_tokens().sum()),
                held_by_long=ledger.held_by_long(),
                free_tokens=max(ledger.capacity_tokens - ledger.peak(), 0.0),
                free_choices=max(self._settings.max_running_requests - taken, 0),
            )
        return self._room
