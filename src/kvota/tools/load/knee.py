"""Where the knee is, and which rate to try next. Pure: trials in, a decision out.

Rule. A rate *holds* in a trial when at least `ATTAINMENT_MIN` of the requests due met the SLO
(DistServe's level; refused and failed ones did not) and open requests did not pile up. A rate holds
when it did in more than half of its trials. The knee is the highest rate that holds below the
lowest that does not.

Search. Rates rise by `growth` until one fails (or fall, when the first does). The geometric middle
between knee and failure is tried until they are within `resolution` of each other. Then both are
repeated, with other requests, until each has `repeats` trials: one lucky or unlucky run must not
decide. A repeat that turns a verdict moves the knee, and the search goes on from there.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

ATTAINMENT_MIN = 0.9
SAFE_SHARE = 0.65  # of the knee: 60 to 70 % leaves room for bursts, retries and a lost replica
SAFE_RANGE = (0.6, 0.7)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run at one rate, and whether it held."""

    rate_rps: float
    has_held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How to look. Rates outside [rate_min, rate_max] are not tried."""

    first_rps: float
    growth: float = 1.7
    resolution: float = 1.15
    repeats: int = 3
    rate_min_rps: float = 0.0
    rate_max_rps: float = float("inf")
    trials_max: int = 30


@dataclass(frozen=True, slots=True)
class Knee:
    """`failed_rps`: the lowest rate that failed; None when none did."""

    rate_rps: float
    failed_rps: float | None

    @property
    def safe_rps(self) -> float:
        """What to plan with."""
        return SAFE_SHARE * self.rate_rps


def has_held(attainment: float, *, is_keeping_up: bool) -> bool:
    """The rule for one trial."""
    return attainment >= ATTAINMENT_MIN and is_keeping_up


def next_rate(search: Search, trials: Sequence[Trial]) -> float | None:
    """The rate of the next trial; None when the knee is known, or is outside what may be tried."""
    if len(trials) >= search.trials_max:
        return None
    if not trials:
        return search.first_rps
    held, failed = _around(trials)
    if failed is None:
        assert held is not None
        return _within(search, held, held * search.growth) or _repeat(search, trials, held)
    if held is None:
        return _within(search, failed, failed / search.growth) or _repeat(search, trials, failed)
    if failed / held > search.resolution:
        return sqrt(held * failed)
    return _repeat(search, trials, held) or _repeat(search, trials, failed)


def knee_of(trials: Sequence[Trial]) -> Knee | None:
    """What the trials say so far; None when no rate holds below the lowest that fails."""
    held, failed = _around(trials)
    return None if held is None else Knee(held, failed)


def _around(trials: Sequence[Trial]) -> tuple[float | None, float | None]:
    """The knee and the lowest rate that fails."""
    verdicts = _verdicts(trials)
    failed = min((rate for rate, holds in verdicts.items() if not holds), default=None)
    held = [rate for rate, holds in verdicts.items() if holds and (failed is None or rate < failed)]
    return max(held, default=None), failed


def _verdicts(trials: Iterable[Trial]) -> dict[float, bool]:
    by_rate: dict[float, list[bool]] = defaultdict(list)
    for trial in trials:
        by_rate[trial.rate_rps].append(trial.has_held)
    return {rate: 2 * sum(votes) > len(votes) for rate, votes in by_rate.items()}


def _within(search: Search, at_rps: float, wanted_rps: float) -> float | None:
    """The wanted rate, kept within bounds; None when that is no step from `at_rps`."""
    rate = min(max(wanted_rps, search.rate_min_rps), search.rate_max_rps)
    return rate if rate != at_rps and rate > 0 else None


def _repeat(search: Search, trials: Iterable[Trial], rate_rps: float) -> float | None:
    num = sum(trial.rate_rps == rate_rps for trial in trials)
    return rate_rps if num < search.repeats else None
