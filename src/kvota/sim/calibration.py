"""From recorded steps to a step cost, and how far that cost can be believed.

What is fitted is the turn that a step takes: the executor's time and the gap before it. Where the
gap is not known, because the engine may have waited, it counts as the median of those that are.

The fit minimises Σ ((measured − predicted) / expected)². The error is relative, because a short
decode step matters as much as a long prefill; and it is relative to what is *expected*, because
what was measured is late by chance now and then: divided by that, lateness would count for little
and every prediction come out below the mean, which is what adds up to a wait. What is expected is
the prediction itself, so the fit is repeated with the last one. A turn that took three times as
long as expected counts as three times, so that no single stall bends the shape; all coefficients
are scaled in the end so that all predictions add up to all that was measured.

Coefficients are never negative; more work cannot take less time. With six columns all sixty-four
choices of which coefficients are zero can be tried, so the constrained optimum is found exactly.

To judge the form, the first 60 % of the records are fitted and the last 40 % predicted. Targets:
mean below 9 %, p99 below 15 % out of sample. What is handed on is fitted to all of them, with
`jitter`: what the fit cannot know, by all turns in their order (`jitter.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from kvota.sim.executor import StepCost
from kvota.sim.jitter import Jitter
from kvota.telemetry.steps import StepRecord

FITTED_SHARE = 0.6
NUM_FITS = 8
OUTLIER = 3.0  # times as long, or as short, as expected
MEAN_ERROR_MAX = 0.09
P99_ERROR_MAX = 0.15
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors of the predicted duration, as shares of the measured one."""

    num_steps: int
    mean: float
    p50: float
    p95: float
    p99: float

    def line(self) -> str:
        return (
            f"{self.num_steps} steps: mean {self.mean:.1%}, p50 {self.p50:.1%}, "
            f"p95 {self.p95:.1%}, p99 {self.p99:.1%}"
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    cost: StepCost
    fitted: FitError
    unseen: FitError
    turns: Sequence[tuple[float, float]]  # of all steps in their order: expected, taken

    @property
    def jitter(self) -> Jitter:
        return Jitter.of(*zip(*self.turns, strict=True))

    @property
    def is_good(self) -> bool:
        return self.unseen.mean < MEAN_ERROR_MAX and self.unseen.p99 < P99_ERROR_MAX


def fit_step_cost(records: Sequence[StepRecord]) -> Calibration:
    """The cost by all records. Raises ValueError when they are too few to fit and to judge."""
    cut = int(len(records) * FITTED_SHARE)
    if cut < 12:
        raise ValueError(f"{len(records)} recorded steps are too few to fit; record at least 20")
    known, unseen = records[:cut], records[cut:]
    tried, cost = _cost(known), _cost(records)
    expected = [cost.seconds(one.terms) for one in records]
    turns = list(zip(expected, turns_s(records).tolist(), strict=True))
    return Calibration(cost, error_of(tried, known), error_of(tried, unseen), turns)


def turns_s(records: Sequence[StepRecord]) -> Array:
    """Seconds of each step with the gap before it."""
    gaps = [one.gap for one in records if one.gap is not None]
    usual = float(np.median(gaps)) if gaps else 0.0
    return np.array([one.seconds + (usual if one.gap is None else one.gap) for one in records])


def error_of(cost: StepCost, records: Sequence[StepRecord]) -> FitError:
    """How far `cost` is from what was measured."""
    predicted = np.array([cost.seconds(one.terms) for one in records])
    errors = np.abs(predicted / turns_s(records) - 1)
    p50, p95, p99 = np.percentile(errors, [50, 95, 99])
    return FitError(len(records), float(errors.mean()), float(p50), float(p95), float(p99))


_NAMES = (
    "base", "per_prefill_token", "per_attention", "per_decode", "per_context", "any_prefill",
)  # fmt: skip


def _row(record: StepRecord) -> list[float]:
    terms = record.terms
    return [1.0, terms.prefill, terms.attention, terms.decodes, terms.context, terms.prefill > 0]


def _cost(records: Sequence[StepRecord]) -> StepCost:
    return StepCost(**dict(zip(_NAMES, _fit(records), strict=True)))


def _fit(records: Sequence[StepRecord]) -> list[float]:
    measured = turns_s(records)
    rows = np.array([_row(record) for record in records])
    expected = measured
    for _ in range(NUM_FITS):
        usual = np.clip(measured, expected / OUTLIER, expected * OUTLIER)
        found = _weighted(rows, usual, expected)
        expected = rows @ found
    scale = measured.sum() / expected.sum()
    return [float(value) for value in scale * found]


def _weighted(rows: Array, measured: Array, expected: Array) -> Array:
    """The non-negative x with the least Σ ((measured − row · x) / expected)²."""
    scaled = rows / expected[:, None]
    size = np.linalg.norm(scaled, axis=0)
    size[size == 0] = 1.0
    found: Array = _least_squares(scaled / size, measured / expected) / size
    return found


def _least_squares(rows: Array, wanted: Array) -> Array:
    """The non-negative x with the least |rows · x − wanted|²."""
    num_columns = rows.shape[1]
    best, least = np.zeros(num_columns), float("inf")
    for number in range(1, num_columns + 1):
        for chosen in combinations(range(num_columns), number):
            part = rows[:, chosen]
            found = np.linalg.lstsq(part, wanted)[0]
            residual = float(((part @ found - wanted) ** 2).sum())
            if found.min() >= 0 and residual < least:
                least = residual
                best = np.zeros(num_columns)
                best[list(chosen)] = found
    return best
