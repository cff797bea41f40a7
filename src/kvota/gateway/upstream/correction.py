"""How far a ledger kept from outside is corrected by what the backend says of its own memory.

    nominal  = share of the capacity that the backend reports, else what the operator stated
    outside  = what it says is used − what our leases hold − slack
    pinned   = the smaller of the last two `outside`, at least 0
    capacity = nominal − pinned, at least one block

- *More used than we know of*: others use the backend too, or a prompt was counted too low. What is
  beyond our leases is pinned: nobody is granted it.
- Two readings must agree, because the two sides see things at different moments: a request that we
  have just closed still holds its blocks there. A difference that shrinks is believed at once.
- *Less used than we know of* changes nothing: a prefix it shares between two of ours today may be
  thrown out tomorrow.
- *Slack*: whole blocks, and tokens that are on their way to us. Two blocks for each of our choices.
- *Another capacity*: it was restarted with other settings. The nominal follows, down and up.

Leases are never taken back; a ledger that is over its capacity grants nothing until it fits again.
"""

from dataclasses import dataclass

SLACK_BLOCKS = 2  # per running choice


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReading:
    """What a backend says of its KV memory now. None: it does not say."""

    capacity_tokens: int | None = None
    used_tokens: int | None = None


class Correction:
    """`stated_tokens` is the capacity while the backend reports none; `share` of a reported one
    may be lent.
    """

    def __init__(self, stated_tokens: int, *, share: float = 1.0, block_size: int = 1) -> None:
        self.pinned_tokens = 0
        self.difference_tokens: int | None = None  # used there less held here, at the last reading
        self._block_size = block_size
        self._outside_before = 0
        self._reported_tokens: int | None = None
        self.state(stated_tokens, share)

    def state(self, stated_tokens: int, share: float) -> None:
        """What the operator says from now on. Raises ValueError where nothing is left to lend."""
        if not 0 < share <= 1 or stated_tokens < 1:
            raise ValueError(f"no KV to lend: {stated_tokens} tokens, share {share}")
        self._stated_tokens, self._share = stated_tokens, share

    @property
    def nominal_tokens(self) -> int:
        if self._reported_tokens is None:
            return self._stated_tokens
        return max(int(self._reported_tokens * self._share), self._block_size)

    @property
    def capacity_tokens(self) -> int:
        return max(self.nominal_tokens - self.pinned_tokens, self._block_size)

    def see(self, reading: KvReading, *, held_tokens: int, num_choices: int) -> None:
        """Take in a reading, beside what our own leases hold at the same time."""
        if reading.capacity_tokens is not None and reading.capacity_tokens > 0:
            self._reported_tokens = reading.capacity_tokens
        if reading.used_tokens is None:
            return
        self.difference_tokens = reading.used_tokens - held_tokens
        slack = SLACK_BLOCKS * self._block_size * num_choices
        outside = max(reading.used_tokens - held_tokens - slack, 0)
        self.pinned_tokens = min(outside, self._outside_before)
        self._outside_before = outside
