"""Who waits, in which order. Asking for the next one costs the same with ten or ten thousand.

    short   preempted ▸▸   fresh ▸▸▸▸▸▸▸▸
    long    preempted ▸    fresh ▸▸

Those that were preempted come first, by rank: band, then arrival. Those that have never run come in
the order of arrival whatever their band: the desk has let them in, in an order that keeps a floor
for batch, and interactive first would take that back. Sequences with much to read wait in a lane of
their own, so that they can be passed over in a step that has no room left for long prompts. Two
heads are all that is ever looked at.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from itertools import takewhile

from kvota.scheduler.sequence import Rank, Sequence, Status


class Lane(Enum):
    SHORT = "short"
    LONG = "long"  # a long prompt, or one whose logprobs are wanted


def rank_of(sequence: Sequence) -> Rank:
    return sequence.rank


class _Queue:
    """One lane. All operations O(1), with preempted ones O(log of their number), and
    to put one back that was held O(those that came later)."""

    def __init__(self) -> None:
        self._preempted: list[Sequence] = []  # by rank
        self._fresh: OrderedDict[int, Sequence] = OrderedDict()  # by arrival

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._fresh.values()

    @property
    def head(self) -> Sequence | None:
        if self._preempted:
            return self._preempted[0]
        return next(iter(self._fresh.values()), None)

    def push(self, sequence: Sequence) -> None:
        if sequence.status is Status.PREEMPTED:
            insort(self._preempted, sequence, key=rank_of)
        else:
            arrival = sequence.group.arrival
            came_later = [*takewhile(lambda one: one.group.arrival > arrival, self._last_first())]
            self._fresh[sequence.id] = sequence
            for one in reversed(came_later):  # none, unless it was held meanwhile
                self._fresh.move_to_end(one.id)

    def _last_first(self) -> Iterator[Sequence]:
        return reversed(self._fresh.values())

    def remove(self, sequence: Sequence) -> None:
        if self._fresh.pop(sequence.id, None) is None:
            place = bisect_left(self._preempted, sequence.rank, key=rank_of)
            assert self._preempted[place] is sequence, f"sequence {sequence.id} is not in line"
            del self._preempted[place]


class WaitingLine:
    """All sequences that are WAITING or PREEMPTED."""

    def __init__(self, long_prefill_threshold: int) -> None:
        self._threshold = long_prefill_threshold
        self._queues = {lane: _Queue() for lane in Lane}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def num_in(self, lane: Lane) -> int:
        return len(self._queues[lane])

    def lane_of(self, sequence: Sequence) -> Lane:
        """Does not change while it waits: nothing is added to its tokens."""
        is_long = len(sequence.tokens) > self._threshold or sequence.wants_prompt_logprobs
        return Lane.LONG if is_long else Lane.SHORT

    def push(self, sequence: Sequence) -> None:
        self._queues[self.lane_of(sequence)].push(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queues[self.lane_of(sequence)].remove(sequence)

    def head(self, *, with_long: bool) -> Sequence | None:
        """The next one to run; with `with_long` False, the next of the short lane."""
        lanes = (Lane.SHORT, Lane.LONG) if with_long else (Lane.SHORT,)
        heads = [head for lane in lanes if (head := self._queues[lane].head)]
        return min(heads, key=_turn, default=None)


def _turn(sequence: Sequence) -> tuple[int, ...]:
    if sequence.status is Status.PREEMPTED:
        return 0, *sequence.rank
    return 1, sequence.group.arrival
