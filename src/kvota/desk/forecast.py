"""How long outputs get, learned from those that ended: S(x) = P(an output has at least x tokens).

A group is everything of one (model, tenant, lane). Each keeps its last `window` outputs; while it
knows fewer than `thin_below` complete ones, its wider group answers for it:

    (model, tenant, lane) ─▶ (model, lane) ─▶ (model) ─▶ nothing known: S = 1

An output that was cut (at max_tokens, at a deadline, by a client that left) is censored: it says
only that the output is longer. S is the Kaplan–Meier estimate, in which such an output counts
among those that reached its length and never as an ending. So neither impatient clients nor a
small max_tokens make the forecast shorter than answers really are.

One imagined output that never ends is always among the observed. With nothing known it alone makes
S = 1; past the longest output ever seen it makes the conditional S equal 1 again; and it is the
rule of succession for what a thin window has not seen yet.

Lengths are told apart in buckets: 64 to an octave, so exactly below 64 and to 1/64 above. A bucket
counts as its smallest length when it asks who is still there, so S errs upwards only.
"""

from array import array
from functools import lru_cache

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]  # exact for token counts up to 2**24

_OCTAVES = 21
_STEPS = 64  # buckets in an octave
NUM_BUCKETS = _OCTAVES * _STEPS
LENGTH_MAX = 2**_OCTAVES - 2  # longer outputs count as this long
_MANTISSA_SHIFT = 23 - 6  # leaves the exponent and 6 bits of a float32: 64 steps an octave
_FIRST = 127 << 6  # what the shift makes of 1.0
_COUNT, _TOTAL = 0, 1  # rows of weights and sums
_UNKNOWN = 0  # the group that knows nothing; its S is 1 for ever


def bucket_of(lengths: IntArray) -> npt.NDArray[np.int32]:
    """The bucket of each length in 0..LENGTH_MAX: the leading bits of length + 1."""
    return _leading_bits((lengths + 1).astype(np.float32)) - np.int32(_FIRST)


@lru_cache(maxsize=4_096)
def _bucket_of_one(length: int) -> int:
    return int(bucket_of(np.array([length]))[0])


def bucket_edges() -> IntArray:
    """The smallest length in each bucket, and LENGTH_MAX + 1 behind the last.

    Below 64 there are more buckets than lengths; an empty bucket has its successor's edge.
    """
    bits = (np.arange(NUM_BUCKETS + 1, dtype=np.int32) + np.int32(_FIRST)) << _MANTISSA_SHIFT
    return np.ceil(bits.view(np.float32)).astype(np.int64) - 1


def _weights(edges: IntArray) -> FloatArray:
    """How many lengths from 1 on each bucket has, and their sum. Shape (2, buckets)."""
    first, end = np.maximum(edges[:-1], 1), np.maximum(edges[1:], 1)
    num = (end - first).astype(np.float64)
    return np.stack((num, num * (first + end - 1) / 2))


def _leading_bits(numbers: Float32Array) -> npt.NDArray[np.int32]:
    """Exponent and first mantissa bits. Takes the memory of `numbers`."""
    bits = numbers.view(np.int32)
    return np.right_shift(bits, _MANTISSA_SHIFT, out=bits)


class _Window:
    """The last outputs of one group, as a ring of 2 · bucket + is_cut."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ring = array("i", bytes(4 * size))
        self._next = 0  # the place of the next one, which is the oldest once the ring is full
        self._num = 0
        self.num_ended = 0
        self.num_new = 0  # since the curve was last read

    def add(self, bucket: int, *, is_cut: bool) -> None:
        ring, place = self._ring, self._next
        if self._num < self._size:
            self._num += 1
        elif not ring[place] & 1:
            self.num_ended -= 1
        ring[place] = 2 * bucket + is_cut
        self._next = place + 1 if place + 1 < self._size else 0
        if not is_cut:
            self.num_ended += 1
        self.num_new += 1

    @property
    def is_stale(self) -> bool:
        """True when more than 1/64 of what the curve rests on is new."""
        return self.num_new * 64 >= self._num

    def curve(self) -> FloatArray:
        """P(length is in this bucket or a later one), per bucket."""
        self.num_new = 0
        kept = np.frombuffer(self._ring, dtype=np.intc, count=self._num)
        ended, cut = np.bincount(kept, minlength=2 * NUM_BUCKETS).reshape(NUM_BUCKETS, 2).T
        at_risk = 1 + np.cumsum((ended + cut)[::-1])[::-1]
        survived = np.cumprod(1 - ended / at_risk)
        return np.concatenate(([1.0], survived[:-1]))


class Forecast:
    """Histories of output lengths, and what they say about outputs that are still running.

    Groups are numbered so that whole arrays of them can be asked at once. At most
    `num_groups_max` are kept; tenants beyond that share the history of their model and lane.
    """

    def __init__(
        self, *, window: int = 1_000, thin_below: int = 50, num_groups_max: int = 256
    ) -> None:
        if not 1 <= thin_below <= window:
            raise ValueError(f"thin_below must be in 1..{window}, got {thin_below}")
        self._window_size = window
        self._thin_below = thin_below
        self._num_groups_max = num_groups_max
        self._groups: dict[tuple[str, ...], int] = {}
        self._parents = [_UNKNOWN]
        self._windows = [_Window(window)]
        self._speaker = np.zeros(num_groups_max, dtype=np.int64)  # whose curve speaks for a group
        self._curves = np.ones((num_groups_max, NUM_BUCKETS), dtype=np.float32)
        self._flat = self._curves.reshape(-1)  # the same memory
        self._edges = bucket_edges()
        self._weights = _weights(self._edges)
        self._sums = np.zeros((2, num_groups_max, NUM_BUCKETS))  # over the buckets before each
        self._sum_up(_UNKNOWN)
        self._asked: set[int] = set()  # groups that were given out,
        self._speaking: set[int] = set()  # and those that speak for them: their curves are kept up

    def group(self, model: str, tenant: str, lane: str) -> int:
        """The number of a group; a new one starts with what its wider groups know."""
        by_model = self._enter((model,), _UNKNOWN)
        by_lane = self._enter((model, lane), by_model)
        group = self._enter((model, tenant, lane), by_lane)
        if group not in self._asked:
            self._asked.add(group)
            self._note_speaking()
        return group

    def is_known(self, group: int) -> bool:
        """True when history speaks for the group; else outputs count as max_tokens long."""
        return self._speaker.item(group) != _UNKNOWN

    def observe(self, group: int, length: int, *, is_cut: bool = False) -> None:
        """An output has ended by itself after `length` tokens; with `is_cut`, it was stopped."""
        bucket = _bucket_of_one(min(length, LENGTH_MAX))
        while group != _UNKNOWN:
            window = self._windows[group]
            was_thin = window.num_ended < self._thin_below
            window.add(bucket, is_cut=is_cut)
            if window.is_stale and group in self._speaking:
                self._take_curve(group)
            if was_thin != (window.num_ended < self._thin_below):
                self._appoint_speakers()
            group = self._parents[group]

    def num_known(self, group: int) -> int:
        """Complete outputs in the history that speaks for the group; 0: nothing is known."""
        return self._windows[int(self._speaker[group])].num_ended

    def survival(self, groups: IntArray, produced: IntArray, ahead: Float32Array) -> Float32Array:
        """P(still running after `ahead` more tokens | has produced `produced` and not ended).

        `groups` and `produced` have shape (n,), `ahead` (steps, n), and so has the result.

        A bucket is the leading bits of length + 1; here they are used as they are, and the start
        of the first bucket is taken from where the curve begins.
        """
        start = (self._speaker[groups] * NUM_BUCKETS - _FIRST).astype(np.int32)
        plus_one = (np.minimum(produced, LENGTH_MAX - 1) + 1).astype(np.float32)
        reached = plus_one + ahead
        bits = _leading_bits(np.minimum(reached, LENGTH_MAX + 1, out=reached))
        bits += start
        then = self._flat.take(bits)
        then /= self._flat.take(_leading_bits(plus_one + 1) + start)
        return np.minimum(then, 1.0, out=then)

    def quantile(self, groups: IntArray, produced: IntArray, share: float) -> IntArray:
        """The fewest total tokens within which `share` of such outputs end; LENGTH_MAX if none."""
        curves = self._curves[self._speaker[groups]]
        known = curves[np.arange(len(groups)), bucket_of(np.minimum(produced + 1, LENGTH_MAX))]
        num_above = (curves > (1 - share) * known[:, None]).sum(axis=1)
        total: IntArray = np.maximum(self._edges[num_above] - 1, produced)
        return total

    def expected(self, group: int, length_max: int) -> tuple[float, float]:
        """Of a new output that is cut at `length_max`: its tokens, Σ S(x) for x in 1..max, and what
        it holds after each of its steps together, Σ x·S(x). Whole buckets, and a part of the last.
        """
        last = length_max if length_max < LENGTH_MAX else LENGTH_MAX
        bucket = _bucket_of_one(last)
        first = self._edges.item(bucket) or 1
        num = last - first + 1
        speaker = self._speaker.item(group)
        alive = self._curves.item(speaker, bucket)
        tokens: float = self._sums.item(_COUNT, speaker, bucket) + num * alive
        growth: float = self._sums.item(_TOTAL, speaker, bucket) + num * (first + last) / 2 * alive
        return tokens, growth

    def check(self) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        for group in self._groups.values():
            curve = self._curves[group]
            assert (np.diff(curve) <= 0).all(), "a survival curve rises"
            assert curve[0] == 1.0, "an output has no length"
            assert curve[-1] > 0, "a survival curve reaches 0"
            speaker = int(self._speaker[group])
            assert speaker in (group, _UNKNOWN) or self._is_wider(speaker, group)

    def _take_curve(self, group: int) -> None:
        self._curves[group] = self._windows[group].curve()
        self._sum_up(group)

    def _sum_up(self, group: int) -> None:
        weighted = self._weights[:, :-1] * self._curves[group, :-1]
        np.cumsum(weighted, axis=1, out=self._sums[:, group, 1:])

    def _enter(self, key: tuple[str, ...], parent: int) -> int:
        group = self._groups.get(key)
        if group is not None:
            return group
        if len(self._parents) == self._num_groups_max:
            return parent
        group = len(self._parents)
        self._groups[key] = group
        self._parents.append(parent)
        self._windows.append(_Window(self._window_size))
        self._speaker[group] = self._speaker[parent]
        return group

    def _appoint_speakers(self) -> None:
        """Each group speaks for itself, or its nearest wider one that is not thin does."""
        for group, parent in enumerate(self._parents):  # parents come before their children
            if group != _UNKNOWN:
                is_thin = self._windows[group].num_ended < self._thin_below
                self._speaker[group] = self._speaker[parent] if is_thin else group
        self._note_speaking()

    def _note_speaking(self) -> None:
        """Whoever begins to speak brings its curve up to date."""
        before, self._speaking = self._speaking, {self._speaker.item(one) for one in self._asked}
        for group in self._speaking - before:
            self._take_curve(group)

    def _is_wider(self, candidate: int, group: int) -> bool:
        while group != _UNKNOWN:
            group = self._parents[group]
            if group == candidate:
                return True
        return False
