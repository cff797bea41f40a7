"""When: the predicted wait of a ticket in line, and what a refused one is told.

A ticket is granted when the memory and the places that those before it and it itself need have
come back. Both come back at a steady rate (`pace.py`); what is free now is used up first.
"""

from kvota.desk.entry import Entry
from kvota.desk.forecast import Forecast
from kvota.desk.lanes import WaitingLine
from kvota.desk.ledger import Ledger
from kvota.desk.pace import Pace, Turnover, turnover
from kvota.desk.retry import Promises, clamp_retry_s
from kvota.desk.settings import DeskSettings
from kvota.desk.ticket import Lane

_REFRESH_S = 0.25  # the rates are computed again after this long, not for each who asks
_FOOTPRINT_MEMORY = 0.98


class Outlook:
    """Reads the ledger and the line; changes neither."""

    def __init__(
        self,
        settings: DeskSettings,
        forecast: Forecast,
        ledger: Ledger,
        line: WaitingLine[Entry],
        pace: Pace,
    ) -> None:
        self._settings = settings
        self._forecast = forecast
        self._ledger = ledger
        self._line = line
        self._pace = pace
        self._promises = Promises()
        self._footprint = dict.fromkeys(Lane, 0.0)  # of a ticket of that lane, a sliding mean
        self._refreshed_s: float | None = None
        self._rate = Turnover(0.0, 0.0)
        self._long_rate = Turnover(0.0, 0.0)
        self._free_tokens = 0.0
        self._free_choices = 0
        self._num_long = 0

    def joined(self, entry: Entry) -> None:
        """Learn how large the tickets of a lane are."""
        mean = self._footprint[entry.lane]
        memory = _FOOTPRINT_MEMORY if mean else 0.0
        self._footprint[entry.lane] = memory * mean + (1 - memory) * entry.footprint

    def guess_s(self, entry: Entry, num_before: int, now: float) -> float | None:
        """Uncorrected seconds until an entry with `num_before` others ahead is granted."""
        self._refresh(now)
        tokens = num_before * self._footprint[entry.lane] + entry.footprint - self._free_tokens
        choices = num_before + entry.size - self._free_choices
        steps = [_steps(tokens, self._rate.tokens_per_step)]
        steps.append(_steps(choices, self._rate.choices_per_step))
        if entry.lane is Lane.LONG:
            free = self._settings.long_request_concurrency - self._num_long
            steps.append(_steps(num_before + 1 - free, self._long_rate.choices_per_step))
        return self._in_seconds(max((one for one in steps if one is not None), default=None))

    def corrected(self, guess_s: float | None) -> float | None:
        """What is told: the guess times how much longer waits were than guessed lately."""
        return None if guess_s is None else guess_s * self._pace.honesty

    def first_token_s(self, entry: Entry, wait_s: float | None) -> float:
        """Predicted seconds from now to its first token. What is not known counts as 0."""
        return (wait_s or 0.0) + self._pace.first_token_s(entry.uncached_tokens)

    def promise_place_s(self, entry: Entry, now: float) -> float:
        """Retry-After for a ticket that found the line full."""
        self._refresh(now)
        places = self._promises.num_ahead(now) + entry.size
        by_memory = _steps(
            places * (self._footprint[entry.lane] or entry.footprint), self._rate.tokens_per_step
        )
        by_count = _steps(places, self._rate.choices_per_step)
        steps = max((one for one in (by_memory, by_count) if one is not None), default=None)
        wait_s = clamp_retry_s(self.corrected(self._in_seconds(steps)))
        self._promises.make(entry.size, wait_s, now)
        return wait_s

    def place_freed(self, num_places: int, now: float) -> list[tuple[float, float]]:
        """Places in line are free again; (predicted, actual) of the promises now judged."""
        return self._promises.freed(num_places, now)

    def _in_seconds(self, steps: float | None) -> float | None:
        step_s = self._pace.step_s
        return None if steps is None or step_s is None else steps * step_s

    def _refresh(self, now: float) -> None:
        if self._refreshed_s is not None and now - self._refreshed_s < _REFRESH_S:
            return
        self._refreshed_s = now
        ledger = self._ledger
        self._rate = turnover(ledger.rows, ledger.held_tokens(), self._forecast)
        long = ledger.long_leases()
        self._long_rate = turnover(ledger.rows.at(long), ledger.held_tokens()[long], self._forecast)
        self._free_tokens = max(ledger.capacity_tokens - ledger.peak(), 0.0)
        taken = int(ledger.rows.num_open.sum())
        self._free_choices = max(self._settings.max_running_requests - taken, 0)
        self._num_long = len(long)


def _steps(amount: float, per_step: float) -> float | None:
    """Steps until `amount` has come back at that rate; None when nothing comes back."""
    if amount <= 0:
        return 0.0
    return amount / per_step if per_step > 0 else None
