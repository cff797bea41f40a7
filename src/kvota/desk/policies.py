"""How much KV a set of leases will need at its worst moment: one class for each way to guess.

A policy turns leases into a price (`price`, an array it alone understands) and prices of disjoint
sets of leases into one peak (`peak`, tokens). So the price of what runs is computed once and a
candidate is added to it. `horizon` is the number of steps to look ahead; it must be the same in
prices that are put together, and at least the largest `left`.

    forecast         expected peak with a margin for chance (below)
    reserve          everybody to max_tokens: no guess, never a preemption
    optimistic       what is held now, and a watermark
    quantile         one quantile of the length for each, and LightLLM's peak formula
    running_length   LightLLM's published heuristic for the length, and the same formula

The expected peak, with a_i tokens held now, S_i(τ) the chance to run on for τ steps:

    max over τ of  min( Σ (a_i+τ)·S_i(τ) + z·sqrt(Σ (a_i+τ)²·S_i(τ)·(1−S_i(τ))),  Σ (a_i+τ) )

The second argument is the worst case; it makes sure that a request that fits alone is granted when
it is alone. τ runs over a geometric grid. Between two of its points S is nearly a straight line,
but a max_tokens in between is a cliff; so each lease is kept, at its full size, up to the first
point not before its cliff. With S = 1 the result is therefore never below the true peak.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvota.core.errors import ConfigError
from kvota.desk.forecast import FloatArray, Forecast, IntArray
from kvota.desk.settings import Admission, DeskSettings

GRID_POINTS = 30
OPTIMISTIC_WATERMARK = 0.01
RUNNING_LENGTH_TYPICAL = 1024  # LightLLM's router_max_new_token_len


@dataclass(frozen=True, slots=True)
class Rows:
    """Leases, as arrays of one length. All choices of a lease share its prompt.

    A choice has its own KV for `own` tokens: the part of the prompt that does not fill a block, and
    what it has produced. Where choices differ, the longest speaks for all.
    """

    prompt: IntArray  # tokens of prompt that all choices share and no other lease does
    own: IntArray
    produced: IntArray
    left: IntArray  # tokens until max_tokens
    num_open: IntArray  # choices that have not ended
    group: IntArray  # of the forecast

    def at(self, where: npt.NDArray[np.bool_]) -> "Rows":
        """Only the leases for which `where` is true."""
        return Rows(*(getattr(self, name)[where] for name in self.__slots__))


class Policy(Protocol):
    def price(self, rows: Rows, horizon: int) -> FloatArray: ...

    def peak(self, prices: Sequence[FloatArray]) -> float: ...


class ExpectedPeak:
    """Price: mean, variance and worst case of the need at every point of the grid."""

    def __init__(self, forecast: Forecast, risk: float, block_size: int) -> None:
        self._forecast = forecast
        self._risk = risk
        self._block_size = block_size

    def price(self, rows: Rows, horizon: int) -> FloatArray:
        has_choices = rows.num_open > 1
        if not has_choices.any():
            return self._price_of_single(rows, horizon)
        single = self._price_of_single(rows.at(~has_choices), horizon)
        return single + self._price_of_several(rows.at(has_choices), horizon)

    def peak(self, prices: Sequence[FloatArray]) -> float:
        mean, variance, worst = sum(prices[1:], start=prices[0])
        return float(np.minimum(mean + self._risk * np.sqrt(variance), worst).max())

    def _price_of_single(self, rows: Rows, horizon: int) -> FloatArray:
        own, running, is_possible = self._futures(rows, horizon)
        size = (rows.prompt[:, None] + own).astype(np.float64)
        mean = size * running
        return _summed(mean, size * mean * (1 - running), size * is_possible)

    def _price_of_several(self, rows: Rows, horizon: int) -> FloatArray:
        """Choices end one by one; their prompt stays until the last of them has.

        Var = P²·A·(1−A) + m·s²·S·(1−S) + 2·P·m·s·S·(1−A), with A = 1 − (1−S)^m.
        """
        own, running, is_possible = self._futures(rows, horizon)
        prompt, num = rows.prompt[:, None], rows.num_open[:, None]
        some = 1 - (1 - running) ** num
        choices = num * own * running
        mean = prompt * some + choices
        variance = prompt**2 * some * (1 - some) + own * choices * (1 - running)
        variance += 2 * prompt * choices * (1 - some)
        return _summed(mean, variance, (prompt + num * own) * is_possible)

    def _futures(
        self, rows: Rows, horizon: int
    ) -> tuple[IntArray, FloatArray, npt.NDArray[np.bool_]]:
        """At each point of the grid: own tokens of a choice, P(it runs), and whether it can."""
        points, before = time_grid(horizon)
        left = rows.left[:, None]
        ahead = np.minimum(points, left)
        is_possible = left > before
        running = self._forecast.survival(rows.group, rows.produced, ahead) * is_possible
        return _in_blocks(rows.own[:, None] + ahead, self._block_size), running, is_possible


class Reserve:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def price(self, rows: Rows, horizon: int) -> FloatArray:
        return _held(rows, rows.left, self._block_size)

    def peak(self, prices: Sequence[FloatArray]) -> float:
        return float(sum(price.sum() for price in prices))


class Optimistic:
    """What is held now and one token more for each, as if nothing would grow."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def price(self, rows: Rows, horizon: int) -> FloatArray:
        return _held(rows, np.minimum(rows.left, 1), self._block_size)

    def peak(self, prices: Sequence[FloatArray]) -> float:
        return float(sum(price.sum() for price in prices)) / (1 - OPTIMISTIC_WATERMARK)


RemainingTokens = Callable[[Rows], IntArray]


class PointPeak:
    """One guess b_i for the remaining tokens of each choice.

    With the choices sorted by b, longest first, the i longest alone are left after b_i steps:
    peak = max_i (b_i·i + Σ_{j≤i} a_j).  Source: LightLLM, arXiv 2507.10150.
    """

    def __init__(self, remaining: RemainingTokens, block_size: int) -> None:
        self._remaining = remaining
        self._block_size = block_size

    def price(self, rows: Rows, horizon: int) -> FloatArray:
        """Shape (2, choices): b and a of each. The first choice carries the shared prompt."""
        remaining = np.clip(self._remaining(rows), 0, rows.left)
        held = rows.own + self._block_size - 1  # growth then never needs more than it adds
        first = np.stack((remaining, held + rows.prompt))
        others = np.repeat(np.stack((remaining, held)), np.maximum(rows.num_open - 1, 0), axis=1)
        return np.concatenate((first, others), axis=1).astype(np.float64)

    def peak(self, prices: Sequence[FloatArray]) -> float:
        remaining, held = np.concatenate(prices, axis=1)
        order = np.argsort(-remaining, kind="stable")
        count = np.arange(1, len(order) + 1)
        return float((remaining[order] * count + np.cumsum(held[order])).max(initial=0.0))


def new_policy(settings: DeskSettings, forecast: Forecast, block_size: int) -> Policy:
    """The policy that the settings name."""
    match settings.admission:
        case Admission.FORECAST:
            return ExpectedPeak(forecast, settings.risk, block_size)
        case Admission.RESERVE:
            return Reserve(block_size)
        case Admission.OPTIMISTIC:
            return Optimistic(block_size)
        case Admission.QUANTILE:
            return PointPeak(_quantile_of(forecast, settings.quantile), block_size)
        case Admission.RUNNING_LENGTH:
            return PointPeak(_running_length, block_size)
    raise ConfigError(f"unknown admission {settings.admission!r}")


@lru_cache(maxsize=64)
def time_grid(horizon: int) -> tuple[IntArray, IntArray]:
    """Steps to look at, 0 … horizon, and for each the point before it (-1 before the first)."""
    spaced = np.geomspace(1, max(horizon, 1), GRID_POINTS - 1)
    points = np.unique(np.concatenate(([0.0], np.ceil(spaced - 1e-9)))).astype(np.int64)
    return points, np.concatenate((np.array([-1], dtype=np.int64), points[:-1]))


def _summed(mean: FloatArray, variance: FloatArray, worst: FloatArray) -> FloatArray:
    """Over all leases, shape (3, points). A product with ones is a faster sum."""
    ones = np.ones(len(mean))
    return np.array((ones @ mean, ones @ variance, ones @ worst))


def _in_blocks(tokens: IntArray, block_size: int) -> IntArray:
    """Rounded up to whole blocks."""
    return -(-tokens // block_size) * block_size


def _held(rows: Rows, ahead: IntArray, block_size: int) -> FloatArray:
    """Tokens each lease holds after `ahead` more steps, none of its choices having ended."""
    own = _in_blocks(rows.own + ahead, block_size)
    return (rows.prompt + rows.num_open * own).astype(np.float64)


def _quantile_of(forecast: Forecast, share: float) -> RemainingTokens:
    def remaining(rows: Rows) -> IntArray:
        return forecast.quantile(rows.group, rows.produced, share) - rows.produced

    return remaining


def _running_length(rows: Rows) -> IntArray:
    """LightLLM's `get_tuple_tokens`, without its busy mode (which reserves everything)."""
    total = np.maximum(1.1 * rows.produced, RUNNING_LENGTH_TYPICAL)
    total = np.minimum(total, rows.produced + rows.left)
    remaining: IntArray = (total - rows.produced - 1 + 6).astype(np.int64)
    return remaining
