"""How fast the engine is, learned from what the desk sees.

What is measured, all forgetting slowly:
- decoding: tokens per second of one lease;
- reading a prompt: seconds from grant to first token, as a + b × uncached tokens (least squares);
- leaving the line: seconds between two grants from a lane in which somebody waits;
- places: seconds between two grants, whoever waits, but for the time in which the engine is idle;
- honesty: by what factor waits were longer than predicted.
"""

from kvota.desk.first_token import FadingLine
from kvota.desk.ticket import Lane

_DECODE_MEMORY = 0.995  # of 1 per observation: the last 200 or so count
_LEAVING_MEMORY = 0.95
_HONESTY_MEMORY = 0.9
_HONESTY_MAX = 2.0


class Pace:
    """Speeds of the engine. None while nothing has been seen."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._prompts = FadingLine()
        self._leaving = {lane: Leaving() for lane in Lane}
        self._places = Leaving()
        self._idle_since_s: float | None = None
        self._predicted_s = 0.0
        self._actual_s = 0.0

    def decoded(self, num_tokens: int, seconds: float) -> None:
        """One lease took `seconds` for its next `num_tokens`."""
        self._tokens = self._tokens * _DECODE_MEMORY + num_tokens
        self._seconds = self._seconds * _DECODE_MEMORY + seconds

    def read_prompt(self, uncached_tokens: int, seconds: float, *, is_cut: bool = False) -> None:
        """A lease took `seconds` from its grant to its first token; with `is_cut`, to its end."""
        if is_cut:
            seconds = max(seconds, self.first_token_s(uncached_tokens))
        self._prompts.add(uncached_tokens, seconds)

    def began_to_wait(self, lane: Lane, now: float) -> None:
        """The lane has its first waiting ticket."""
        self._leaving[lane].since_s = now

    def left_line(self, lane: Lane, now: float) -> None:
        """A waiting ticket of the lane was granted."""
        self._leaving[lane].count(now)

    def line_s(self, lane: Lane, num_before: int) -> float | None:
        """Seconds in which `num_before` waiting tickets and one more leave; None: not known.

        It needs no forecast, so it is there where nothing is known of how long outputs become.
        """
        each_s = self._leaving[lane].each_s
        return None if each_s is None else each_s * (num_before + 1)

    def freed_place(self, now: float) -> None:
        """A fresh ticket was granted, or has left the line."""
        self._places.count(now)

    def idle(self, now: float) -> None:
        """Nobody holds KV any more. Until somebody does, no time counts for places."""
        self._idle_since_s = now

    def busy(self, now: float) -> None:
        """Somebody holds KV."""
        if self._idle_since_s is not None:
            self._places.pass_over(now - self._idle_since_s)
            self._idle_since_s = None

    def places_s(self, num_places: int) -> float | None:
        """Seconds in which so many places become free, whatever the lane; None: not known."""
        each_s = self._places.each_s
        return None if each_s is None else each_s * num_places

    def waited(self, predicted_s: float, actual_s: float) -> None:
        """A ticket was granted after `actual_s`; the uncorrected prediction was `predicted_s`."""
        self._predicted_s = self._predicted_s * _HONESTY_MEMORY + predicted_s
        self._actual_s = self._actual_s * _HONESTY_MEMORY + actual_s

    @property
    def step_s(self) -> float | None:
        """Seconds per token of one lease."""
        return self._seconds / self._tokens if self._tokens else None

    @property
    def honesty(self) -> float:
        """Multiply a predicted wait by this."""
        if self._predicted_s <= 0:
            return 1.0
        return min(max(self._actual_s / self._predicted_s, 1 / _HONESTY_MAX), _HONESTY_MAX)

    def first_token_s(self, uncached_tokens: int) -> float:
        """Seconds from grant to first token; 0 while nothing is known."""
        return self._prompts.at(uncached_tokens)


class Leaving:
    """Seconds from one ticket that leaves to the next."""

    def __init__(self) -> None:
        self.since_s: float | None = None  # the last one left, or the first one came
        self._seconds = 0.0
        self._num = 0.0

    def count(self, now: float) -> None:
        if self.since_s is not None:
            self._seconds = self._seconds * _LEAVING_MEMORY + (now - self.since_s)
            self._num = self._num * _LEAVING_MEMORY + 1
        self.since_s = now

    def pass_over(self, seconds: float) -> None:
        """The last so many seconds do not count."""
        if self.since_s is not None:
            self.since_s += seconds

    @property
    def each_s(self) -> float | None:
        return self._seconds / self._num if self._num else None
