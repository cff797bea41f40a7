"""Whose KV is given up when a block is missing.

A victim is recomputed later from its tokens, so nothing is lost but work. The rules keep that work
bounded and make sure that it is never wasted in a circle:

1. Only a sequence that ranks after the one in need: lower band first, then latest arrival.
   So the oldest of the highest band is never anybody's victim.
2. Never one that has sampled fewer than `min_run_tokens` since it (re)started: every run pays.
3. Never the same one more than `max_consecutive_preemptions` times in a row.
4. Never one that already has its place in the step being planned.

When nobody is eligible the one in need sits the step out and keeps its blocks. While anyone at all
can be scheduled the others come closer to their quantum. When nobody can, rules 2 and 3 are
dropped for the last in rank, which frees its blocks for the first. Nobody is admitted in a step in
which someone was short of memory, and whoever is first in rank is planned first, in every step
that it is part of. So what is freed reaches it before anybody else, and the oldest of the highest
band always gets to its next token.
"""

from collections.abc import Sequence as Seq

from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.sequence import Sequence


class VictimChoice:
    """The rules, and the memory of who was last. One per scheduler."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._last: int | None = None
        self._num_in_row = 0

    def choose(self, running: Seq[Sequence], needy: Sequence, step: int) -> Sequence | None:
        """The victim for `needy` among `running`, which is sorted by rank. None: nobody."""
        for sequence in reversed(running):
            if sequence.rank <= needy.rank:
                return None
            if sequence.planned_step != step and self._may_be_preempted(sequence):
                return sequence
        return None

    def record(self, victim: Sequence) -> None:
        """Note who was preempted, whatever the reason."""
        self._num_in_row = self._num_in_row + 1 if victim.id == self._last else 1
        self._last = victim.id

    def _may_be_preempted(self, sequence: Sequence) -> bool:
        if sequence.num_run_tokens < self._limits.min_run_tokens:
            return False
        is_last = sequence.id == self._last
        return not is_last or self._num_in_row < self._limits.max_consecutive_preemptions
