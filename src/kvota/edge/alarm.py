"""A clock that is wound up for every request and hardly ever rings.

Its one timer is not touched while it is put off: it looks at the time when it fires.
"""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final

_EARLY_S: Final = 0.005  # a timer may fire a little too soon


class Alarm:
    """Calls `ring` when the time last set has come."""

    __slots__ = ("_due_s", "_fires_s", "_loop", "_ring", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring: Callable[[], None] | None = ring
        self._due_s = inf
        self._timer: asyncio.TimerHandle | None = None
        self._fires_s = inf

    def set(self, seconds: float) -> None:
        """From now; whatever was set before is forgotten."""
        self._due_s = self._loop.time() + seconds
        if self._fires_s > self._due_s or self._timer is None:
            self._wind_up()

    def silence(self) -> None:
        """It does not ring until it is set again."""
        self._due_s = inf

    def end(self) -> None:
        """It never rings again, and holds nobody."""
        self._ring = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wind_up(self) -> None:
        if self._ring is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._fires_s = self._due_s
        self._timer = self._loop.call_at(self._fires_s, self._look_at_time)

    def _look_at_time(self) -> None:
        self._timer = None
        if self._due_s == inf:
            return
        if self._due_s - self._loop.time() >= _EARLY_S:
            self._wind_up()
        elif self._ring is not None:
            self._ring()
