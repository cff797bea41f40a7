"""What will happen, and when. Things of one moment happen in the order they were noted."""

import heapq
from collections.abc import Callable

Action = Callable[[float], None]  # is told the moment it was noted for


class Agenda:
    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Action]] = []
        self._num_noted = 0

    @property
    def next_s(self) -> float | None:
        return self._entries[0][0] if self._entries else None

    def note(self, at_s: float, action: Action) -> None:
        self._num_noted += 1
        heapq.heappush(self._entries, (at_s, self._num_noted, action))

    def pop_until(self, now: float) -> tuple[float, Action] | None:
        """The next thing that happens at `now` or before; None when there is none."""
        if not self._entries or self._entries[0][0] > now:
            return None
        at_s, _, action = heapq.heappop(self._entries)
        return at_s, action
