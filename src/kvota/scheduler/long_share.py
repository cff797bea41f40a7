"""How much of a step long prompts get, so that short ones hardly notice them.

A short request waits for the step that runs when it arrives, and then for those that read its own
prompt. Both are kept short, and a long prompt keeps its pace all the same:

- Beside others, long prompts have `long_prefill_share` of what decodes leave. When nothing but long
  prompts is there any more, the share does not leap to all of the step: it doubles every
  `DOUBLES_S`, since where short requests come often, the next one would wait for a whole step.
- A step that reads a short prompt leaves the long ones out and owes them their part. It is paid
  back in the steps that read no short prompt, which take twice the share. At most `OWED_MAX` whole
  steps are owed: short prompts that come all at once are read as if nobody else were there. Then
  long prompts are in every step, whatever else is read. So nobody starves.

The bound is in whole steps because a part may be small: of eight parts of 0.18 short prompts had
used up all after 0.4 s, and then the last of them waited half as long again.
"""

from math import ceil

DOUBLES_S = 1.0
OWED_MAX = 4  # whole steps; with half of a step for long prompts, 8 parts
_DOUBLED_MAX = 30


class LongShare:
    """Between two steps it remembers who was there and what is owed. One per scheduler."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._num_owed_max = ceil(OWED_MAX / share)
        self._others_s: float | None = None  # when anything but long prompts was there last
        self._num_owed = 0

    def see(self, *, has_long: bool, has_others: bool, now: float) -> None:
        """A step is planned. `has_long`: a long prompt is in progress; `has_others`: anything but
        long prompts runs or waits."""
        if has_others:
            self._others_s = now
        if not has_long:
            self._num_owed = 0

    @property
    def may_defer(self) -> bool:
        """Whether a step that reads short prompts may leave the long ones out."""
        return self._num_owed < self._num_owed_max

    def defer(self) -> None:
        """The step reads short prompts and leaves the long ones out."""
        self._num_owed += 1

    def of_step(self, now: float, *, reads_short: bool) -> float:
        """The share of a step that does not leave them out; part of what is owed is in it."""
        if self._others_s is None:
            return 1.0
        num_doubled = min((now - self._others_s) / DOUBLES_S, _DOUBLED_MAX)
        share = self._share * float(2.0**num_doubled)
        if self._num_owed and not reads_short:
            self._num_owed -= 1
            share *= 2
        return min(share, 1.0)
