"""Successes and failures of the last few seconds, in constant memory.

    slices   │ 3/0 │ 5/1 │ 0/0 │ 4/2 │◀ now       each: succeeded / failed
             └──────── window_s ─────┘

Time is cut into slices of `window_s / num_slices`. The window is the slice that holds `now` and the
ones before it, `num_slices` in all; so it reaches back by `window_s` or up to one slice less.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    num_ok: int = 0
    num_failed: int = 0

    @property
    def num(self) -> int:
        return self.num_ok + self.num_failed

    @property
    def failure_rate(self) -> float:
        """Failures per call; 0 while there are no calls."""
        return self.num_failed / self.num if self.num else 0.0


class OutcomeWindow:
    """A ring of slices. Adding is O(1); a jump in time costs O(num_slices) at most."""

    def __init__(self, window_s: float, num_slices: int = 10) -> None:
        if not (window_s > 0 and num_slices >= 1):
            raise ValueError(f"a window of {window_s} s in {num_slices} slices has no slice")
        self._slice_s = window_s / num_slices
        self._ok = [0] * num_slices
        self._failed = [0] * num_slices
        self._head: int | None = None  # number of the newest slice since time 0
        self._sum_ok = 0
        self._sum_failed = 0

    def add(self, ok: bool, now: float) -> None:
        place = self._turn_to(now)
        if ok:
            self._ok[place] += 1
            self._sum_ok += 1
        else:
            self._failed[place] += 1
            self._sum_failed += 1

    def counts(self, now: float) -> Counts:
        self._turn_to(now)
        return Counts(self._sum_ok, self._sum_failed)

    def clear(self) -> None:
        num = len(self._ok)
        self._ok, self._failed = [0] * num, [0] * num
        self._sum_ok = self._sum_failed = 0

    def _turn_to(self, now: float) -> int:
        """Empty the slices that time has passed. Returns the place of the slice of `now`."""
        num = len(self._ok)
        newest = int(now // self._slice_s)
        if newest == self._head:
            return newest % num
        head = newest if self._head is None else max(self._head, newest)
        for number in range(self._first_stale(head, num), head + 1):
            place = number % num
            self._sum_ok -= self._ok[place]
            self._sum_failed -= self._failed[place]
            self._ok[place] = self._failed[place] = 0
        self._head = head
        return head % num

    def _first_stale(self, head: int, num: int) -> int:
        if self._head is None:
            return head + 1
        return max(self._head + 1, head - num + 1)
