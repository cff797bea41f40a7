"""When to come back: every refused ticket is promised a place in line of its own.

Places become free one after the other, as the tickets in line are granted or give up. Whoever was
refused before is expected back first. So the k-th of a burst gets the time of the k-th place, and
they do not all return for the same one. A promise is judged when its place has become free.
"""

import heapq
from collections import deque

RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 120.0
RETRY_AFTER_UNKNOWN_S = 5.0  # while no speed is known
_PROMISES_MAX = 4_096  # not judged or not due yet; beyond it the longest wait is told


class Promises:
    """Places in line that refused tickets were told to come back for."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int]] = []  # (time, places), a heap
        self._open: deque[tuple[int, float, float]] = deque()  # (freed total, made at, wait)
        self._num_due = 0
        self._num_freed = 0

    def num_ahead(self, now: float) -> int:
        """Places promised to tickets that are not due back yet."""
        while self._due and self._due[0][0] <= now:
            self._num_due -= heapq.heappop(self._due)[1]
        return self._num_due

    def make(self, num_places: int, wait_s: float, now: float) -> None:
        """A ticket for `num_places` was told to come back after `wait_s`."""
        if len(self._open) >= _PROMISES_MAX or len(self._due) >= _PROMISES_MAX:
            return
        target = self._num_freed + self._num_due + num_places
        if self._open:
            target = max(target, self._open[-1][0])
        self._open.append((target, now, wait_s))
        heapq.heappush(self._due, (now + wait_s, num_places))
        self._num_due += num_places

    def freed(self, num_places: int, now: float) -> list[tuple[float, float]]:
        """Places have become free. Returns (predicted, actual) waits of the promises now judged."""
        self._num_freed += num_places
        judged = []
        while self._open and self._open[0][0] <= self._num_freed:
            _, made_s, wait_s = self._open.popleft()
            judged.append((wait_s, now - made_s))
        return judged


def clamp_retry_s(wait_s: float | None) -> float:
    """Within what a client obeys; a guess while nothing is known."""
    if wait_s is None:
        return RETRY_AFTER_UNKNOWN_S
    return min(max(wait_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
