"""How much KV a set of leases will need at its worst moment: one class for each way to guess.

    forecast         expected peak with a margin for chance (below)
    reserve          everybody to max_tokens: no guess, never a preemption
    optimistic       what is held now, and a watermark
    quantile         one quantile of the length for each, and LightLLM's peak formula
    running_length   LightLLM's published heuristic for the length, and the same formula

The expected peak, with a_i tokens held now, S_i(τ) the chance to run on for τ steps:

    max over τ of  min( μ + K(z, γ)·σ, Σ s_i )       s_i = a_i + τ, what it holds if it runs
        μ  = Σ s_i·S_i
        σ² = Σ s_i²·S_i·(1−S_i)
        γσ³ = Σ s_i³·S_i·(1−S_i)·(1−2·S_i)

K is how many σ above μ a sum with the skewness γ is with the chance of z of a normal one: the
frequency factor of Pearson's type III, 2/γ·((1 + γz/6 − γ²/36)³ − 1), which is z for γ = 0. Where
most run on, γ is negative: a sum that cannot exceed everybody's running is hardly ever far above
its mean. With z = 2 alone it would be exceeded not once in forty times but once in some hundreds.

The second argument is the worst case; it makes sure that a request that fits alone is granted when
it is alone. τ runs over a geometric grid. Between two of its points S is nearly a straight line,
but a max_tokens in between is a cliff; so each lease is kept, at its full size, up to the first
point not before its cliff. With S = 1 the result is therefore never below the true peak.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvota.core.errors import ConfigError
from kvota.desk.forecast import Float32Array, Forecast, IntArray
from kvota.desk.settings import Admission, DeskSettings

GRID_POINTS = 27
OPTIMISTIC_WATERMARK = 0.01


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
    def peak(self, rows: Rows) -> float:
        """Tokens of KV, in whole blocks, at the worst moment; 0 for no leases."""


class ExpectedPeak:
    """Looks as far ahead as the last of the leases can run."""

    def __init__(self, forecast: Forecast, risk: float, block_size: int) -> None:
        self._forecast = forecast
        self._risk = risk
        self._block_size = block_size

    def peak(self, rows: Rows) -> float:
        mean, variance, third, worst = self.needs(rows)
        deviation = np.sqrt(variance)
        skewness = third / np.maximum(variance * deviation, 1.0)
        need = mean + margin(self._risk, skewness) * deviation
        return float(np.minimum(need, worst).max())

    def needs(self, rows: Rows) -> Float32Array:
        """At each point, of all together: mean, variance, third central moment and worst case.

        In single precision: every decision comes through here, with all that runs.
        """
        points, before = time_grid(int(rows.left.max(initial=0)))
        has_choices = rows.num_open > 1
        if not has_choices.any():
            return self._needs_of_single(rows, points, before)
        single = self._needs_of_single(rows.at(~has_choices), points, before)
        return single + self._needs_of_several(rows.at(has_choices), points, before)

    def _needs_of_single(
        self, rows: Rows, points: Float32Array, before: Float32Array
    ) -> Float32Array:
        size, running, is_possible = self._futures(rows, points, before)
        size += rows.prompt.astype(np.float32)
        size *= is_possible
        mean = size * running
        rest = size - mean
        variance = mean * rest
        third = np.vecdot(variance, rest - mean)
        return np.array((mean.sum(axis=1), variance.sum(axis=1), third, size.sum(axis=1)))

    def _needs_of_several(
        self, rows: Rows, points: Float32Array, before: Float32Array
    ) -> Float32Array:
        """Choices end one by one; their prompt stays until the last of them has.

        With N of m choices running and X = P·[N > 0] + s·N, the powers of X have the means
        E Xᵏ = Pᵏ·P(N > 0) + Σ_j C(k, j)·P^(k−j)·s^j·E N^j, j from 1 to k.
        """
        own, running, is_possible = self._futures(rows, points, before)
        chance = running.astype(np.float64) * is_possible
        prompt, num = rows.prompt, rows.num_open
        first = num * chance
        second = first * (1 - chance + first)
        third = first * (1 + (num - 1) * chance * (3 + (num - 2) * chance))
        some = 1 - (1 - chance) ** num
        mean = prompt * some + own * first
        square = prompt**2 * some + 2 * prompt * own * first + own**2 * second
        cube = prompt**3 * some + 3 * prompt**2 * own * first
        cube += 3 * prompt * own**2 * second + own**3 * third
        variance = np.maximum(square - mean**2, 0)
        central = cube - 3 * mean * square + 2 * mean**3
        worst = (prompt + num * own) * is_possible
        found = (mean, variance, central, worst)
        return np.array([each.sum(axis=1) for each in found], dtype=np.float32)

    def _futures(
        self, rows: Rows, points: Float32Array, before: Float32Array
    ) -> tuple[Float32Array, Float32Array, npt.NDArray[np.bool_]]:
        """Per point and lease: own tokens of a choice, P(it runs), and whether it may."""
        left = rows.left.astype(np.float32)
        ahead = np.minimum(points, left)
        running = self._forecast.survival(rows.group, rows.produced, ahead)
        ahead += rows.own.astype(np.float32)
        return _in_blocks(ahead, self._block_size), running, left > before


class Reserve:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def peak(self, rows: Rows) -> float:
        return float(_held(rows, rows.left, self._block_size).sum())


class Optimistic:
    """What is held now and one token more for each, as if nothing would grow."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def peak(self, rows: Rows) -> float:
        held = _held(rows, np.minimum(rows.left, 1), self._block_size)
        return float(held.sum()) / (1 - OPTIMISTIC_WATERMARK)


RemainingTokens = Callable[[Rows], IntArray]


class PointPeak:
    """One guess b_i for the remaining tokens of each choice.

    With the choices sorted by b, longest first, the i longest alone are left after b_i steps:
    peak = max_i (b_i·i + Σ_{j≤i} a_j).  Source: LightLLM, arXiv 2507.10150.
    """

    def __init__(self, remaining: RemainingTokens, block_size: int) -> None:
        self._remaining = remaining
        self._block_size = block_size

    def peak(self, rows: Rows) -> float:
        remaining, held = self._choices(rows)
        order = np.argsort(-remaining, kind="stable")
        count = np.arange(1, len(order) + 1)
        return float((remaining[order] * count + np.cumsum(held[order])).max(initial=0))

    def _choices(self, rows: Rows) -> tuple[IntArray, IntArray]:
        """b and a of every choice. The first of a lease carries the prompt that they share."""
        remaining = np.clip(self._remaining(rows), 0, rows.left)
        held = rows.own + self._block_size - 1  # growth then never needs more than it adds
        num_others = np.maximum(rows.num_open - 1, 0)
        return (
            np.concatenate((remaining, np.repeat(remaining, num_others))),
            np.concatenate((held + rows.prompt, np.repeat(held, num_others))),
        )


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
            return PointPeak(_running_length(settings.typical_output), block_size)
    raise ConfigError(f"unknown admission {settings.admission!r}")


def time_grid(steps: int) -> tuple[Float32Array, Float32Array]:
    """Steps to look at, from 0 to at least `steps`, and for each the point before it (or -1).

    Both have shape (points, 1): moments go down, leases across. The grid reaches to a power of
    two, so that it stays the same while leases come, run and go.
    """
    return _grid_of(max(steps - 1, 0).bit_length())


def margin(risk: float, skewness: Float32Array) -> Float32Array:
    """K above, without its division by γ. The third power is never of anything below 0."""
    part = risk / 6 - skewness / 36
    change = np.maximum(skewness * part, -1)
    factor: Float32Array = 2 * part * (3 + change * (3 + change))
    return factor


@lru_cache(maxsize=32)
def _grid_of(log_horizon: int) -> tuple[Float32Array, Float32Array]:
    spaced = np.geomspace(1, 1 << log_horizon, GRID_POINTS - 1)
    points = np.unique(np.concatenate(([0.0], np.ceil(spaced - 1e-9)))).astype(np.float32)
    before = np.concatenate((np.array([-1], dtype=np.float32), points[:-1]))
    return points[:, None], before[:, None]


def _in_blocks(tokens: Float32Array, block_size: int) -> Float32Array:
    """Rounded up to whole blocks, in place."""
    tokens /= block_size
    np.ceil(tokens, out=tokens)
    tokens *= block_size
    return tokens


def _held(rows: Rows, ahead: IntArray, block_size: int) -> IntArray:
    """Tokens each lease holds after `ahead` more steps, none of its choices having ended."""
    own = -(-(rows.own + ahead) // block_size) * block_size
    return rows.prompt + rows.num_open * own


def _quantile_of(forecast: Forecast, share: float) -> RemainingTokens:
    def remaining(rows: Rows) -> IntArray:
        return forecast.quantile(rows.group, rows.produced, share) - rows.produced

    return remaining


def _running_length(typical: int) -> RemainingTokens:
    """LightLLM's `get_tuple_tokens`, without its busy mode (which reserves everything).

    `typical` is its router_max_new_token_len, 1024 unless set.
    """

    def remaining(rows: Rows) -> IntArray:
        total = np.maximum(1.1 * rows.produced, typical)
        total = np.minimum(total, rows.produced + rows.left)
        found: IntArray = (total - rows.produced - 1 + 6).astype(np.int64)
        return found

    return remaining
