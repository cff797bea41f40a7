"""Who holds how much KV, and whether one more fits at every future moment.

    capacity ≥ pinned + peak(leases + candidate)

`pinned` are the prefix blocks that leases name, each counted once however many name it; the rest
of a lease is its own and its future is guessed by the policy. What a lease holds changes with every
token it produces and every one that comes or goes, so nothing is worth keeping from one question to
the next: a candidate is one more column beside those of the leases. Where everybody fits with all
of max_tokens, whatever the policy guesses, no future is worked out.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import msgspec
import numpy as np

from kvota.desk.forecast import FloatArray, IntArray
from kvota.desk.policies import Policy, Rows
from kvota.desk.ticket import Ticket

_FIELDS = 6  # of Rows, in its order
_PROMPT, _OWN, _PRODUCED, _LEFT, _OPEN = range(5)
# Times the worst case: above the answer of every policy, a watermark and single precision included.
_ABOVE_ALL_POLICIES = 1.02


class Claim(msgspec.Struct, frozen=True):
    """What a ticket would take, were it granted now."""

    fields: tuple[int, ...]  # of Rows, in its order
    prefix_blocks: Sequence[Hashable]
    is_long: bool
    worst_tokens: int  # of its own, if every choice gets max_tokens: no policy charges more

    @property
    def private_prompt(self) -> int:
        """Whole blocks of prompt that only this ticket would hold."""
        return self.fields[_PROMPT]

    @property
    def column(self) -> IntArray:
        """The fields in the shape (6, 1), to stand beside those of the leases."""
        return np.array(self.fields, dtype=np.int64)[:, None]


class Ledger:
    """The leases that hold KV, by id."""

    def __init__(self, capacity_tokens: int, policy: Policy, *, block_size: int = 1) -> None:
        if capacity_tokens < 1 or block_size < 1:
            raise ValueError(f"no KV to lend: {capacity_tokens} tokens, blocks of {block_size}")
        self.capacity_tokens = capacity_tokens
        self.block_size = block_size
        self._policy = policy
        self._columns = np.zeros((_FIELDS, 64), dtype=np.int64)  # of the leases, by their places
        self._unwritten: set[str] = set()  # whose column is not what `_fields` says
        self._fields: dict[str, tuple[int, ...]] = {}  # of Rows, in its order
        self._ids: list[str] = []
        self._places: dict[str, int] = {}
        self._claims: dict[str, Claim] = {}
        self._worst: dict[str, int] = {}  # of each lease, as in its claim
        self._worst_tokens = 0  # their sum
        self._pinned: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._places

    @property
    def rows(self) -> Rows:
        """All leases, in no order. A view: true until the next change."""
        return Rows(*self._written())

    @property
    def pinned_tokens(self) -> int:
        return len(self._pinned) * self.block_size

    def claim(
        self, ticket: Ticket, group: int, *, produced: int, num_open: int, is_long: bool
    ) -> Claim:
        """The price tag of a ticket with `num_open` choices of up to `produced` tokens each."""
        prefix = ticket.prefix_blocks
        private = ticket.prompt_tokens - len(prefix) * self.block_size
        part = private % self.block_size
        prompt, own, left = private - part, part + produced, max(ticket.max_tokens - produced, 0)
        fields = (prompt, own, produced, left, num_open, group)
        return Claim(fields, prefix, is_long, self._worst_of(prompt, own, left, num_open))

    def need_max(self, ticket: Ticket) -> int:
        """Tokens of KV, in whole blocks, that the ticket needs if every choice gets max_tokens."""
        part = ticket.prompt_tokens % self.block_size
        own = -(-(part + ticket.max_tokens) // self.block_size) * self.block_size
        return ticket.prompt_tokens - part + ticket.n * own

    def peak(self, extra: Sequence[Claim] = (), *, without: Sequence[str] = ()) -> float:
        """Tokens needed at the worst moment by all leases but `without`, and `extra`, with pinned.

        O(leases × points of the policy's time grid).
        """
        columns = self._written()
        if without:
            columns = np.delete(columns, [self._places[lease_id] for lease_id in without], axis=1)
        return self._peak_of(columns, extra) + self._pinned_with(extra, without)

    def long_peak(self, extra: Claim) -> float:
        """The same for the leases of the long lane and `extra`, with all the prefixes they name."""
        long = self._long
        named = sum(len(self._claims[lease_id].prefix_blocks) for lease_id in long)
        columns = self._written()[:, [self._places[lease_id] for lease_id in long]]
        pinned = (named + len(extra.prefix_blocks)) * self.block_size
        return self._peak_of(columns, [extra]) + pinned

    def held_by_long(self) -> float:
        """KV that the leases of the long lane alone hold now."""
        places = [self._places[lease_id] for lease_id in self._long]
        return float(self.held_tokens()[places].sum())

    def fits(self, extra: Sequence[Claim], *, without: Sequence[str] = ()) -> bool:
        if self.has_ample_room(extra):
            return True
        return self.peak(extra, without=without) <= self.capacity_tokens

    def has_ample_room(self, extra: Sequence[Claim]) -> bool:
        """True only if `fits` without any guess: O(extra), and the same answer. False: unknown."""
        worst, num_pinned = self._worst_tokens, len(self._pinned)
        for claim in extra:
            worst += claim.worst_tokens
            num_pinned += len(claim.prefix_blocks)
        pinned = num_pinned * self.block_size
        return worst * _ABOVE_ALL_POLICIES + pinned <= self.capacity_tokens

    def add(self, lease_id: str, claim: Claim) -> None:
        assert lease_id not in self._places, f"{lease_id} holds a lease already"
        self._places[lease_id] = len(self._ids)
        self._ids.append(lease_id)
        self._fields[lease_id] = claim.fields
        self._unwritten.add(lease_id)
        self._claims[lease_id] = claim
        self._worst[lease_id] = claim.worst_tokens
        self._worst_tokens += claim.worst_tokens
        if claim.prefix_blocks:
            self._pinned.update(claim.prefix_blocks)

    def grow(self, lease_id: str, produced: int, num_open: int, private_tokens: int | None) -> None:
        """The longest open choice has `produced` tokens, `num_open` choices have not ended.

        `private_tokens`, where the engine tells it: KV that this lease alone holds now.
        """
        prompt, own, before, left, _, group = self._fields[lease_id]
        own += produced - before
        left -= produced - before
        if left < 0:
            left = 0
        if private_tokens is not None:
            in_blocks = -(-own // self.block_size) * self.block_size
            prompt = private_tokens - num_open * in_blocks
            if prompt < 0:
                prompt = 0
        self._fields[lease_id] = prompt, own, produced, left, num_open, group
        self._unwritten.add(lease_id)
        worst = self._worst_of(prompt, own, left, num_open)
        self._worst_tokens += worst - self._worst[lease_id]
        self._worst[lease_id] = worst

    def drop(self, lease_id: str) -> None:
        """The lease holds nothing any more."""
        place = self._places.pop(lease_id)
        self._worst_tokens -= self._worst.pop(lease_id)
        del self._fields[lease_id]
        self._unwritten.discard(lease_id)
        last_id = self._ids.pop()
        if last_id != lease_id:
            self._ids[place] = last_id
            self._places[last_id] = place
            self._unwritten.add(last_id)
        for block in self._claims.pop(lease_id).prefix_blocks:
            self._pinned[block] -= 1
            if not self._pinned[block]:
                del self._pinned[block]

    def held_tokens(self) -> FloatArray:
        """KV each lease alone holds now, in whole blocks; in the order of `rows`."""
        rows = self.rows
        own = -(-rows.own // self.block_size) * self.block_size
        return (rows.prompt + rows.num_open * own).astype(np.float64)

    def held_by(self, lease_id: str) -> int:
        return int(self.held_tokens()[self._places[lease_id]])

    def check(self) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        assert sorted(self._ids) == sorted(self._places) == sorted(self._claims)
        assert all(self._ids[place] == lease_id for lease_id, place in self._places.items())
        named = Counter(block for claim in self._claims.values() for block in claim.prefix_blocks)
        assert named == self._pinned, "a pinned block is miscounted"
        columns = [self._fields[lease_id] for lease_id in self._ids]
        assert self._written().T.tolist() == [list(one) for one in columns], "a column is old"
        assert (self.rows.left >= 0).all(), "a lease has produced more than its max_tokens"
        assert all(min(one) >= 0 for one in columns), "a lease holds less than nothing"
        assert sorted(self._worst) == sorted(self._ids)
        assert sum(self._worst.values()) == self._worst_tokens, "the worst case is miscounted"

    def _written(self) -> IntArray:
        """The columns of all leases, with what has changed since they were last looked at."""
        while self._columns.shape[1] < len(self._ids):
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        for lease_id in self._unwritten:
            self._columns[:, self._places[lease_id]] = self._fields[lease_id]
        self._unwritten.clear()
        return self._columns[:, : len(self._ids)]

    def _worst_of(self, prompt: int, own: int, left: int, num_open: int) -> int:
        """As if the last block of every choice held one token only."""
        return prompt + num_open * (own + left + self.block_size - 1)

    @property
    def _long(self) -> Sequence[str]:
        return [lease_id for lease_id, claim in self._claims.items() if claim.is_long]

    def _peak_of(self, columns: IntArray, extra: Sequence[Claim]) -> float:
        if extra:
            columns = np.concatenate((columns, *(claim.column for claim in extra)), axis=1)
        return self._policy.peak(Rows(*columns))

    def _pinned_with(self, extra: Sequence[Claim], without: Sequence[str]) -> int:
        """Tokens of the prefix blocks that the leases but `without`, and `extra`, name."""
        named = {block for claim in extra for block in claim.prefix_blocks}
        num = len(self._pinned) + len(named - self._pinned.keys())
        if without:
            leaving = Counter(block for one in without for block in self._claims[one].prefix_blocks)
            num -= sum(
                self._pinned[block] == count and block not in named
                for block, count in leaving.items()
            )
        return num * self.block_size
