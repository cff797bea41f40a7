"""How long from a grant to the first token, learned also from those that never got one.

The engine reads prompts in the order in which they came, so the time grows with the prompt tokens
that are to be read until then: the ticket's own and those of the prompts before it.

    seconds = m + z · √m        m = a + b · tokens

a and b by least squares that forget, by observations and by time; z is the spread around that line.
It grows with the root of the time, as that of a sum of many steps does. A lease that was ended
before its first token shows that it would have taken longer than it was waited for: it is censored.
Left out, only the fast ones would be seen, and a desk under overload would grant more the later
everything gets. So the quantile of z is Kaplan and Meier's (1958), which uses both kinds, and the
line takes a censored one for the time that was expected of it, or a quarter more than it was waited
for.

An observation counts half as much with every `_HALF_LIFE_S` that it is older: nobody must be
refused for what was a minute ago. Of a quiet time only `_QUIET_MAX_S` count, so that a lane in
which little happens always knows something.
"""

from collections import deque
from math import inf, sqrt
from typing import NamedTuple

QUANTILE = 0.9  # of first tokens come within `FirstTokens.bound_s`
_MEMORY = 0.98  # of 1 per observation: the last 50 or so make the line
_HALF_LIFE_S = 10.0
_QUIET_MAX_S = 3.0
_NUM_KEPT = 128  # observations make the spread
_NUM_ENOUGH = 8  # with fewer, the spread counts as none
_MEAN_MIN_S = 1e-6  # of what is divided by
_CUT_TAKES = 1.25  # times as long as it was waited for, at least


class FadingLine:
    """The least-squares line y = a + b·x with b ≥ 0, over points that are slowly forgotten."""

    def __init__(self, memory: float = _MEMORY) -> None:
        self._memory = memory
        self._moments = (0.0, 0.0, 0.0, 0.0, 0.0)  # Σ 1, x, y, x², xy
        self._terms: tuple[float, float] | None = (0.0, 0.0)  # None: not worked out since

    def fade(self, share: float) -> None:
        """All points so far count for `share` of what they did."""
        num, sum_x, sum_y, xx, xy = self._moments
        self._moments = (num * share, sum_x * share, sum_y * share, xx * share, xy * share)
        self._terms = None

    def add(self, x: float, y: float) -> None:
        keep = self._memory
        num, sum_x, sum_y, xx, xy = self._moments
        self._moments = (
            num * keep + 1.0,
            sum_x * keep + x,
            sum_y * keep + y,
            xx * keep + x * x,
            xy * keep + x * y,
        )
        self._terms = None

    def at(self, x: float) -> float:
        """y there; 0 while no point is known."""
        start, slope = self.terms()
        return start + slope * x

    def terms(self) -> tuple[float, float]:
        """a and b; both 0 while no point is known."""
        if self._terms is None:
            self._terms = self._fitted()
        return self._terms

    def _fitted(self) -> tuple[float, float]:
        num, sum_x, sum_y, xx, xy = self._moments
        if num == 0:
            return 0.0, 0.0
        spread = num * xx - sum_x * sum_x
        slope = (num * xy - sum_x * sum_y) / spread if spread > 1e-9 * num * xx else 0.0
        slope = max(slope, 0.0)
        return max((sum_y - slope * sum_x) / num, 0.0), slope


class _Seen(NamedTuple):
    tokens: int
    seconds: float
    is_cut: bool
    at_s: float


class FirstTokens:
    """The first tokens of one lane. `tokens`: of prompt, to be read until then."""

    def __init__(self) -> None:
        self._line = FadingLine()
        self._seen: deque[_Seen] = deque(maxlen=_NUM_KEPT)
        self._newest_s = 0.0
        self._age_s = 0.0  # by a clock that stands still in quiet times
        self._spread: float | None = 0.0  # z at QUANTILE; None: not worked out since the last one
        self._fastest: float | None = inf  # seconds per token; None: to be worked out again
        self._num_since = 0  # observations since these two were taken from `_seen` alone:
        self._slowest_s = 0.0  # no remembered one took longer,
        self._fewest = inf  # or had fewer tokens,
        self._most = 0  # and none that came had more

    def came(self, tokens: int, seconds: float, now: float) -> None:
        """A first token came after `seconds`."""
        self._grow_old(now)
        self._line.add(tokens, seconds)
        self._keep(tokens, seconds, is_cut=False)

    def was_cut(self, tokens: int, seconds: float, now: float) -> None:
        """A lease was ended after `seconds` without a first token."""
        self._grow_old(now)
        self._line.add(tokens, max(seconds * _CUT_TAKES, self._line.at(tokens)))
        self._keep(tokens, seconds, is_cut=True)

    @property
    def token_s(self) -> float:
        """Seconds for each token of prompt; 0 while nothing is known."""
        _, slope_s = self._line.terms()
        return slope_s

    def bound_s(self, tokens: float) -> float:
        """QUANTILE of first tokens come within it; 0 while nothing is known."""
        if self._spread is None:
            self._spread = self._measure_spread()
        mean_s = self._line.at(tokens)
        return mean_s + self._spread * sqrt(mean_s)

    def is_within(self, tokens: float, limit_s: float) -> bool:
        """Whether `bound_s` is at most `limit_s`.

        No z is above the slowest's seconds / √m, with m that of the fewest tokens. Where even that
        is within, as it is unless the engine is overloaded, the spread is not worked out.
        """
        if self._spread is None:
            start_s, slope_s = self._line.terms()
            mean_s, least_s = start_s + slope_s * tokens, start_s + slope_s * self._fewest
            if mean_s + self._slowest_s * sqrt(mean_s / max(least_s, _MEAN_MIN_S)) <= limit_s:
                return True
        return self.bound_s(tokens) <= limit_s

    def fastest_s(self, tokens: int) -> float:
        """At the best speed of those remembered; 0 while nothing is known.

        A speed has in it what every step costs, so for a prompt that is longer than them it would
        count that again and again: there the line is heard, too.
        """
        if self._fastest is None:
            speeds = [one.seconds / one.tokens for one in self._seen if not one.is_cut]
            self._fastest = min(speeds, default=inf)
        if self._fastest == inf:
            return 0.0
        at_best_s = self._fastest * tokens
        return at_best_s if tokens <= self._most else min(at_best_s, self._line.at(tokens))

    def _grow_old(self, now: float) -> None:
        """What was seen before an observation that is made now."""
        passed_s = min(now - self._newest_s, _QUIET_MAX_S)
        self._line.fade(_share_left(passed_s))
        self._age_s += passed_s
        self._newest_s = now

    def _keep(self, tokens: int, seconds: float, *, is_cut: bool) -> None:
        tokens = max(tokens, 1)
        if len(self._seen) == _NUM_KEPT:
            oldest = self._seen[0]  # is forgotten now
            if not oldest.is_cut and oldest.seconds / oldest.tokens == self._fastest:
                self._fastest = None
        self._seen.append(_Seen(tokens, seconds, is_cut, self._age_s))
        self._spread = None
        if self._fastest is not None and not is_cut:
            self._fastest = min(self._fastest, seconds / tokens)
        if tokens > self._most and not is_cut:
            self._most = tokens
        if seconds > self._slowest_s:
            self._slowest_s = seconds
        if tokens < self._fewest:
            self._fewest = tokens
        self._num_since += 1
        if self._num_since == _NUM_KEPT:
            self._num_since = 0
            self._slowest_s = max(one.seconds for one in self._seen)
            self._fewest = min(one.tokens for one in self._seen)
            self._most = max((one.tokens for one in self._seen if not one.is_cut), default=0)

    def _measure_spread(self) -> float:
        if len(self._seen) < _NUM_ENOUGH:
            return 0.0
        spreads = []
        start_s, slope_s = self._line.terms()
        for tokens, seconds, is_cut, at_s in self._seen:
            mean_s = max(start_s + slope_s * tokens, _MEAN_MIN_S)
            weight = _share_left(self._age_s - at_s)
            spreads.append(((seconds - mean_s) / sqrt(mean_s), is_cut, weight))
        return max(censored_quantile(spreads, QUANTILE), 0.0)


def _share_left(age_s: float) -> float:
    """How much an observation of that age counts still."""
    return float(0.5 ** (age_s / _HALF_LIFE_S))


def censored_quantile(values: list[tuple[float, bool, float]], share: float) -> float:
    """The least value at which Kaplan–Meier's estimate says that `share` of all have ended.

    `values` are (value, is_cut, weight), at least one; a cut one is known to be larger than its
    value. Where too many are cut to tell, the largest value of all: the quantile is no smaller.
    """
    ordered = sorted(values)  # of equal ones, those that ended come first
    surviving, at_risk = 1.0, sum(weight for _, _, weight in values)
    for value, is_cut, weight in ordered:
        if not is_cut:
            surviving *= 1 - weight / max(at_risk, weight)
            if surviving <= 1 - share + 1e-12:
                return value
        at_risk -= weight
    return ordered[-1][0]
