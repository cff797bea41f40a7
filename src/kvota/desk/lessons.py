"""What the desk learns from how things went, and how wrong it was before.

Every prediction is judged when its truth is known: lengths of outputs, waits in line, times to
come back. The observer hears of each.
"""

from kvota.core.errors import Outcome
from kvota.desk.entry import Entry
from kvota.desk.forecast import Forecast
from kvota.desk.outlook import Outlook
from kvota.desk.pace import Pace
from kvota.desk.reading import Reading
from kvota.desk.tally import DeskObserver, Tally


class Lessons:
    """Teaches the forecast, the pace and what is known of first tokens."""

    def __init__(
        self,
        forecast: Forecast,
        pace: Pace,
        reading: Reading,
        outlook: Outlook,
        tally: Tally,
        observer: DeskObserver,
    ) -> None:
        self._forecast = forecast
        self._pace = pace
        self._reading = reading
        self._outlook = outlook
        self._tally = tally
        self._observer = observer

    def waited(self, entry: Entry, now: float) -> None:
        """It was granted; if it was told a wait, that is judged."""
        if entry.has_waited:
            self._pace.left_line(entry.lane, now)
        seen = entry.foreseen
        if seen is None or seen.guess_s is None:
            return
        actual_s = now - entry.ticket.arrived_s
        self._pace.waited(seen.guess_s, actual_s)
        self._tally.wait.add(seen.told_s, actual_s)
        self._observer.wait_judged(seen.told_s, actual_s)

    def place_freed(self, entry: Entry, now: float) -> None:
        """A fresh ticket has left the line: somebody who was refused could have its place."""
        self._pace.freed_place(now)
        for predicted_s, actual_s in self._outlook.place_freed(entry.size, now):
            self._tally.retry_after.add(predicted_s, actual_s)
            self._observer.retry_judged(predicted_s, actual_s)

    def reading_ended(self, entry: Entry, now: float, *, has_token: bool) -> bool:
        """Its first token since the grant is there, or it is stopped before.

        False when one of both was said before. Whoever is stopped shows that it takes longer.
        """
        if entry.reads_tokens is None:
            return False
        assert entry.granted_s is not None
        self._reading.end(entry, now, has_token=has_token)
        if not entry.num_pauses:
            seconds = now - entry.granted_s
            self._pace.read_prompt(entry.uncached_tokens, seconds, is_cut=not has_token)
        return True

    def choice_ended(self, entry: Entry, choice: int, *, is_cut: bool) -> None:
        """Learn its length. A choice that was stopped only shows that it would have been longer."""
        entry.is_done[choice] = True
        length = entry.produced[choice]
        self._forecast.observe(entry.group, length, is_cut=is_cut)
        if not is_cut or length >= entry.ticket.max_tokens:
            self._tally.forecast.add(entry.expected_tokens, length)
            self._observer.forecast_judged(entry.expected_tokens, length)

    def ticket_ended(self, entry: Entry, outcome: Outcome) -> None:
        """Choices that had not ended by themselves end with it."""
        is_complete = outcome is Outcome.COMPLETED
        for choice, length in enumerate(entry.produced):
            if not entry.is_done[choice] and (length or is_complete):
                is_cut = not is_complete or length >= entry.ticket.max_tokens
                self.choice_ended(entry, choice, is_cut=is_cut)
