"""Time enters kvota through a Clock that is handed in, so that tests and the simulator own it."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds. Only differences mean anything."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds`, which must not be negative."""
        if seconds < 0:
            raise ValueError(f"time only moves forward, got {seconds} s")
        self._now_s += seconds
