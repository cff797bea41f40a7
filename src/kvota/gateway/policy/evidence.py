"""When a difference between two streams of calls is more than noise, however often one looks.

A watch looks after every call. A usual test at level 5 % would then be wrong sooner or later: the
more looks, the surer. So this uses a bound that holds at all times at once (a confidence sequence).
For `num` calls of which `hits` hit with probability p each, mix the likelihood ratio over a Beta
prior (Robbins 1970; Howard, Ramdas, McAuliffe, Sekhon, Annals of Statistics 2021):

    M(p) = B(hits + ½, misses + ½) / ( B(½, ½) · p^hits · (1 − p)^misses )

At the true p this is a martingale that starts at 1, so by Ville's inequality

    P( M(p) ≥ 1/risk at any time ) ≤ risk

and all p with M(p) < 1/risk are believable. The same p that is refused once may come back later;
the promise is about ever refusing the true one.
"""

import math
from dataclasses import dataclass
from math import lgamma
from typing import Final

_PRIOR: Final = 0.5  # Jeffreys
_LOG_BETA_PRIOR: Final = 2 * lgamma(_PRIOR) - lgamma(2 * _PRIOR)
_NUM_HALVINGS: Final = 40  # of the search for a bound: to 1e-12


@dataclass(frozen=True, slots=True)
class Hits:
    """`num` calls, `hits` of them hit (failed, or were too slow)."""

    hits: int
    num: int

    @property
    def rate(self) -> float:
        return self.hits / self.num if self.num else 0.0


def log_evidence(seen: Hits, rate: float) -> float:
    """ln M(rate): how much the calls speak against each of them hitting with that probability."""
    misses = seen.num - seen.hits
    if (rate <= 0 and seen.hits) or (rate >= 1 and misses):
        return math.inf
    log_mixture = (
        lgamma(seen.hits + _PRIOR)
        + lgamma(misses + _PRIOR)
        - lgamma(seen.num + 2 * _PRIOR)
        - _LOG_BETA_PRIOR
    )
    log_hits = seen.hits * math.log(rate) if seen.hits else 0.0
    log_misses = misses * math.log1p(-rate) if misses else 0.0
    return log_mixture - log_hits - log_misses


def is_surely_above(seen: Hits, rate: float, risk: float) -> bool:
    """The true rate is above `rate`; wrong at any time at all with probability `risk` at most."""
    return seen.rate > rate and log_evidence(seen, rate) >= -math.log(risk)


def is_surely_below(seen: Hits, rate: float, risk: float) -> bool:
    """The true rate is below `rate`; wrong at any time at all with probability `risk` at most."""
    return seen.rate < rate and log_evidence(seen, rate) >= -math.log(risk)


def lowest_rate(seen: Hits, risk: float) -> float:
    """The lowest believable rate: `is_surely_above` holds for all below it."""
    low, high = 0.0, seen.rate
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_surely_above(seen, middle, risk) else (low, middle)
    return low


def highest_rate(seen: Hits, risk: float) -> float:
    """The highest believable rate: `is_surely_below` holds for all above it."""
    low, high = seen.rate, 1.0
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_surely_below(seen, middle, risk) else (middle, high)
    return high
