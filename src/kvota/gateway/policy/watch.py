"""Is a new version worse than the stable one? Never from noise, and in words.

A version is rolled back when, with risk `risk` of ever being wrong about it within one round,

    failures   its failure rate is above the stable version's by more than `failure_margin`, or
    latency    its p95 time to first token is more than `ttft_factor` times the stable version's.

Both are tested after every fourth call with bounds that hold at all times at once
(`evidence.py`), each of the four with a quarter of the risk. Of a version that has not answered
one call well, every call is looked at, and from `num_failed_first` on: the bounds allow that, and
`num_calls_min` only waits for what a few calls cannot tell.

    failures   lowest believable rate of the new > highest of the stable + failure_margin.
    latency    take the shortest time t that surely fewer than 5 % of the stable version's calls
               exceed: its p95 is surely at most t. Roll back when surely more than 5 % of the new
               version's exceed ttft_factor · t: its p95 is surely above. The numbers that exceed a
               time fall as it grows, so one wrong bound at the true p95 is the only way to be
               wrong, whatever t the counts suggest: no correction for many t is needed.

Times are counted on a logarithmic grid of 16 steps per octave from 1 ms to 17 min: constant memory.
t and the factor are rounded up to it, by 4.4 % at most each, which only makes a rollback rarer.

A version that fails everything is soon left out by its breakers, and gets too few calls to be
judged by. So a call that wanted it and was given to another version counts as failed too
(`turned_away`). One that has answered well in this round is given one open time to recover: its
turned away calls count once a probe has failed as well. The same holds for the stable version.

Both are counted from the same moment on, so what hits the whole service hits both. Counts start
anew in rounds, so that a version that turns bad late is not hidden by its good past: a round ends
when both have had `round_calls`, or either `round_calls_max`, or after `round_s`.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from kvota.core.errors import ConfigError
from kvota.gateway.policy.evidence import (
    Hits,
    highest_rate,
    is_surely_above,
    is_surely_below,
    lowest_rate,
)

_STEPS_PER_OCTAVE: Final = 16
_SHORTEST_S: Final = 0.001
_NUM_STEPS: Final = 20 * _STEPS_PER_OCTAVE
_TAIL: Final = 0.05  # of the calls are above the p95
_CHECK_EVERY: Final = 4  # calls of the new version
TRIPS_OF_A_GOOD_ONE: Final = 2  # in a row, before what a version that has answered misses counts


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """Raises ConfigError, naming the field, for values that make no sense."""

    failure_margin: float = 0.02
    ttft_factor: float = 1.5
    num_calls_min: int = 20  # of the new version, before anything is said
    num_failed_first: int = 10  # the same, where all of them failed: twice what opens a breaker
    risk: float = 0.0001
    round_calls: int = 1_000
    round_calls_max: int = 20_000
    round_s: float = 6 * 3600.0

    def __post_init__(self) -> None:
        if not 0 <= self.failure_margin < 1:
            raise ConfigError(
                f"rollout: failure_margin must be in [0, 1), got {self.failure_margin}."
            )
        if not self.ttft_factor >= 1:
            raise ConfigError(f"rollout: ttft_factor must be at least 1, got {self.ttft_factor}.")
        if not 0 < self.risk < 1:
            raise ConfigError(f"rollout: risk must be in (0, 1), got {self.risk}.")
        if not 1 <= self.num_calls_min <= self.round_calls <= self.round_calls_max:
            raise ConfigError(
                "rollout: 1 ≤ num_calls_min ≤ round_calls ≤ round_calls_max must hold, got "
                f"{self.num_calls_min}, {self.round_calls}, {self.round_calls_max}."
            )
        if not self.num_failed_first >= 1:
            raise ConfigError(
                f"rollout: num_failed_first must be at least 1, got {self.num_failed_first}."
            )
        if not self.round_s > 0:
            raise ConfigError(f"rollout: round_s must be above 0, got {self.round_s}.")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` None: keep the version. Otherwise: take it out, and this says why in words."""

    version: str
    reason: str | None = None

    @property
    def rolls_back(self) -> bool:
        return self.reason is not None


class Tally:
    """The calls of one version in one round."""

    def __init__(self) -> None:
        self.num = 0
        self.num_failed = 0
        self.num_turned_away = 0  # of those, never asked
        self._num_timed = 0
        self._steps = [0] * (_NUM_STEPS + 1)  # calls by time; the last one: longer than the grid

    def add(self, ok: bool, ttft_s: float | None) -> None:
        self.num += 1
        self.num_failed += not ok
        if ttft_s is not None:
            self._num_timed += 1
            self._steps[_step(ttft_s)] += 1

    @property
    def failed(self) -> Hits:
        return Hits(self.num_failed, self.num)

    @property
    def has_answered(self) -> bool:
        """Some call went well."""
        return self.num > self.num_failed

    def slower(self) -> "Slower":
        """How many calls took longer than each step of the grid. O(grid)."""
        return Slower(self._num_timed, list(accumulate(self._steps)))


@dataclass(frozen=True, slots=True)
class Slower:
    num: int
    num_within: list[int]  # by step of the grid

    def than(self, step: int) -> Hits:
        return Hits(self.num - self.num_within[step], self.num)


def _step(seconds: float) -> int:
    """The first step that is at least `seconds`; `_NUM_STEPS` beyond the grid."""
    if seconds <= _SHORTEST_S:
        return 0
    return min(math.ceil(math.log2(seconds / _SHORTEST_S) * _STEPS_PER_OCTAVE), _NUM_STEPS)


def _seconds(step: int) -> float:
    return float(_SHORTEST_S * 2 ** (step / _STEPS_PER_OCTAVE))


class _Round:
    """A new version beside the stable one, counted from the same moment on."""

    def __init__(self) -> None:
        self.began_s: float | None = None  # the new version's first call
        self.new = Tally()
        self.stable = Tally()

    def is_over(self, settings: WatchSettings, now: float) -> bool:
        fewer, more = sorted((self.new.num, self.stable.num))
        return (
            fewer >= settings.round_calls
            or more >= settings.round_calls_max
            or (self.began_s is not None and now - self.began_s >= settings.round_s)
        )


def _turn_away(tally: Tally, num_trips: int) -> bool:
    """Count it as failed, unless the version may only have stumbled. True: it was counted."""
    if tally.has_answered and num_trips < TRIPS_OF_A_GOOD_ONE:
        return False
    tally.add(False, None)
    tally.num_turned_away += 1
    return True


class Watch:
    """Compares each of `versions` with the stable one. Two tallies of constant size for each."""

    def __init__(self, settings: WatchSettings, stable: str, versions: Iterable[str]) -> None:
        self._settings = settings
        self._stable = stable
        self._rounds = {version: _Round() for version in versions if version != stable}

    def observe(self, version: str, ok: bool, ttft_s: float | None, now: float) -> Verdict:
        """A call of a known version ended. O(versions); every few calls also O(grid)."""
        if version == self._stable:
            for one in self._rounds.values():
                one.stable.add(ok, ttft_s)
            return Verdict(version)
        one = self._round(version, now)
        one.new.add(ok, ttft_s)
        return self._judge(version, one)

    def turned_away(self, version: str, num_trips: int, now: float) -> Verdict:
        """A call wanted the version, all of whose backends are left out since their calls fail.

        `num_trips`: how often in a row that has happened to the one that is best off.
        """
        if version == self._stable:
            for one in self._rounds.values():
                _turn_away(one.stable, num_trips)
            return Verdict(version)
        one = self._round(version, now)
        return self._judge(version, one) if _turn_away(one.new, num_trips) else Verdict(version)

    def restart(self, version: str) -> None:
        """Begin a new round for the version: its weight was changed, or it was taken out."""
        if version != self._stable:
            self._rounds[version] = _Round()

    def _judge(self, version: str, one: _Round) -> Verdict:
        if not self._is_due(one.new):
            return Verdict(version)
        reason = self._more_failures(version, one) or self._slower(version, one)
        return Verdict(version, reason)

    def _is_due(self, new: Tally) -> bool:
        if not new.has_answered:
            return new.num >= self._settings.num_failed_first
        return new.num >= self._settings.num_calls_min and new.num % _CHECK_EVERY == 0

    def _round(self, version: str, now: float) -> _Round:
        if self._rounds[version].is_over(self._settings, now):
            self._rounds[version] = _Round()
        one = self._rounds[version]
        if one.began_s is None:
            one.began_s = now
        return one

    def _more_failures(self, version: str, one: _Round) -> str | None:
        risk, margin = self._settings.risk / 4, self._settings.failure_margin
        new, stable = one.new.failed, one.stable.failed
        if new.rate <= stable.rate + margin:
            return None
        if lowest_rate(new, risk) <= highest_rate(stable, risk) + margin:
            return None
        away = one.new.num_turned_away
        unasked = f", {away} of them turned away by its breakers" if away else ""
        return (
            f"{version!r} failed in {new.hits} of {new.num} calls ({new.rate:.1%}){unasked}, "
            f"{self._stable!r} in {stable.hits} of {stable.num} ({stable.rate:.1%}): "
            f"more than {margin * 100:g} points above it"
        )

    def _slower(self, version: str, one: _Round) -> str | None:
        risk, factor = self._settings.risk / 4, self._settings.ttft_factor
        stable = one.stable.slower()
        step = bisect_left(
            range(_NUM_STEPS), True, key=lambda at: is_surely_below(stable.than(at), _TAIL, risk)
        )
        above = step + math.ceil(math.log2(factor) * _STEPS_PER_OCTAVE)
        if above >= _NUM_STEPS:
            return None  # too few calls of the stable version, or too slow a one, to know its p95
        new = one.new.slower().than(above)
        if not is_surely_above(new, _TAIL, risk):
            return None
        return (
            f"{new.hits} of {new.num} first tokens of {version!r} ({new.rate:.1%}) took longer "
            f"than {_seconds(above):.3g} s, so its p95 is more than {factor:g} times that of "
            f"{self._stable!r}, which is at most {_seconds(step):.3g} s"
        )
