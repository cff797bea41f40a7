"""How much KV a set of leases will need at its worst moment: one class for each way to guess.

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

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvota.core.errors import ConfigError
from kvota.desk.forecast import Float32Array, Forecast, IntArray
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
    def peak(self, rows: Rows) -> float:
        """Float32Array of KV, in whole blocks, at the worst moment; 0 for no leases."""


class ExpectedPeak:
    """Looks as far ahead as the last of the leases can run."""

    def __init__(self, forecast: Forecast, risk: float, block_size: int) -> None:
        self._forecast = forecast
        self._risk = risk
        self._block_size = block_size

    def peak(self, rows: Rows) -> float:
        mean, variance, worst = self.needs(rows)
        return float(np.minimum(mean + self._risk * np.sqrt(variance), worst).max())

    def needs(self, rows: Rows) -> Float32Array:
        """Mean, variance and worst case of all together, at each point. Shape (3, points).

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
        return np.array((mean.sum(axis=1), np.vecdot(size - mean, mean), size.sum(axis=1)))

    def _needs_of_several(
        self, rows: Rows, points: Float32Array, before: Float32Array
    ) -> Float32Array:
        """Choices end one by one; their prompt stays until the last of them has.

        Var = P²·A·(1−A) + m·s²·S·(1−S) + 2·P·m·s·S·(1−A), with A = 1 − (1−S)^m.
        """
        own, running, is_possible = self._futures(rows, points, before)
        running *= is_possible
        prompt, num = rows.prompt.astype(np.float32), rows.num_open.astype(np.float32)
        none = (1 - running) ** num
        choices = num * own * running
        mean = prompt * (1 - none) + choices
        variance = prompt**2 * none * (1 - none) + own * choices * (1 - running)
        variance += 2 * prompt * choices * none
        worst = (prompt + num * own) * is_possible
        return np.array((mean.sum(axis=1), variance.sum(axis=1), worst.sum(axis=1)))

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
            return PointPeak(_running_length, block_size)
    raise ConfigError(f"unknown admission {settings.admission!r}")


def time_grid(steps: int) -> tuple[Float32Array, Float32Array]:
    """Steps to look at, from 0 to at least `steps`, and for each the point before it (or -1).

    Both have shape (points, 1): moments go down, leases across. The grid reaches to a power of
    two, so that it stays the same while leases come, run and go.
    """
    return _grid_of(max(steps - 1, 0).bit_length())


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


def _running_length(rows: Rows) -> IntArray:
    """LightLLM's `get_tuple_tokens`, without its busy mode (which reserves everything)."""
    total = np.maximum(1.1 * rows.produced, RUNNING_LENGTH_TYPICAL)
    total = np.minimum(total, rows.produced + rows.left)
    remaining: IntArray = (total - rows.produced - 1 + 6).astype(np.int64)
    return remaining
