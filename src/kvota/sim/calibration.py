"""From recorded steps to a step cost, and how far that cost can be believed.

The fit minimises the squared *relative* error, Σ (predicted / measured − 1)², because what is
judged is relative too: a short decode step matters as much as a long prefill. Coefficients are
never negative; more work cannot take less time. With six columns all sixty-four choices of which
coefficients are zero can be tried, so the constrained optimum is found exactly.

The first 60 % of the records are fitted and the last 40 % judged. Targets: mean below 9 %, p99
below 15 % out of sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from kvota.sim.executor import StepCost
from kvota.telemetry.steps import StepRecord

FITTED_SHARE = 0.6
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

    @property
    def is_good(self) -> bool:
        return self.unseen.mean < MEAN_ERROR_MAX and self.unseen.p99 < P99_ERROR_MAX


def fit_step_cost(records: Sequence[StepRecord]) -> Calibration:
    """Raises ValueError when there are too few records to fit and to judge."""
    cut = int(len(records) * FITTED_SHARE)
    if cut < 12:
        raise ValueError(f"{len(records)} recorded steps are too few to fit; record at least 20")
    known, unseen = records[:cut], records[cut:]
    cost = StepCost(**dict(zip(_NAMES, _fit(known), strict=True)))
    return Calibration(cost, error_of(cost, known), error_of(cost, unseen))


def error_of(cost: StepCost, records: Sequence[StepRecord]) -> FitError:
    """How far `cost` is from what was measured."""
    errors = np.array([abs(cost.seconds(one.terms) / one.seconds - 1) for one in records])
    p50, p95, p99 = np.percentile(errors, [50, 95, 99])
    return FitError(len(records), float(errors.mean()), float(p50), float(p95), float(p99))


_NAMES = (
    "base", "per_prefill_token", "per_attention", "per_decode", "per_context", "any_prefill",
)  # fmt: skip


def _row(record: StepRecord) -> list[float]:
    terms = record.terms
    return [1.0, terms.prefill, terms.attention, terms.decodes, terms.context, terms.prefill > 0]


def _fit(records: Sequence[StepRecord]) -> list[float]:
    measured = np.array([record.seconds for record in records])
    rows = np.array([_row(record) for record in records]) / measured[:, None]
    size = np.linalg.norm(rows, axis=0)
    size[size == 0] = 1.0
    return [float(value) for value in _least_squares(rows / size) / size]


def _least_squares(rows: Array) -> Array:
    """The non-negative x with the least |rows · x − 1|²."""
    num_columns = rows.shape[1]
    ones = np.ones(len(rows))
    best, least = np.zeros(num_columns), float("inf")
    for number in range(1, num_columns + 1):
        for chosen in combinations(range(num_columns), number):
            part = rows[:, chosen]
            found = np.linalg.lstsq(part, ones)[0]
            residual = float(((part @ found - ones) ** 2).sum())
            if found.min() >= 0 and residual < least:
                least = residual
                best = np.zeros(num_columns)
                best[list(chosen)] = found
    return best
