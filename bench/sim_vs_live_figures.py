"""The statistics of `bench.sim_vs_live`: percentiles, how far they are apart, and how sure that is.

Several replays of the same requests are pooled, as are several simulations of them. Compared are
p50, p95 and p99 of three figures, so there are nine errors: their mean, and the largest of the
three at p99, are the result.

Two things are left to chance: which requests the trace happened to hold, and how the machine fared
in each replay. So the interval comes from resampling both, requests and replays (bootstrap, Efron
1979). And halves of the replays are compared with each other, in all ways to halve them: no
simulator can be expected to be much nearer to the machine than the machine is to itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

SHARES: Final = (0.5, 0.95, 0.99)
NUM_RESAMPLES: Final = 400
CONFIDENCE: Final = 0.9
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one request, live or simulated. Seconds from when it was due."""

    ttft_s: float
    total_s: float
    num_tokens: int

    @property
    def per_token_s(self) -> float:
        """NaN for an answer of one token."""
        if self.num_tokens < 2:
            return float("nan")
        return (self.total_s - self.ttft_s) / (self.num_tokens - 1)


Run = Sequence[Latency | None]  # by request; None: it was not answered in full


@dataclass(frozen=True, slots=True)
class Figure:
    """Seconds: a row for each run, a column for each request."""

    live: Array
    made: Array

    def errors(self) -> list[float]:
        return apart(self.live, self.made)


def figures_of(live: Sequence[Run], made: Sequence[Run]) -> Mapping[str, Figure]:
    """Of the requests that were answered in full in all runs."""
    kept = [
        at
        for at in range(len(live[0]))
        if all(run[at] is not None for runs in (live, made) for run in runs)
    ]
    names = {"TTFT": "ttft_s", "whole answer": "total_s", "time per token": "per_token_s"}
    found = {}
    for name, field in names.items():
        one, other = (
            np.array([[getattr(run[at], field) for at in kept] for run in runs])
            for runs in (live, made)
        )
        known = ~np.isnan(one[0])
        found[name] = Figure(one[:, known], other[:, known])
    return found


def percentiles(values: Array) -> list[float]:
    """p50, p95 and p99; each is a sample."""
    return [float(one) for one in np.quantile(values, SHARES, method="inverted_cdf")]


def apart(true: Array, guess: Array) -> list[float]:
    """|guess / true − 1| at p50, p95 and p99 of all values."""
    pairs = zip(percentiles(guess), percentiles(true), strict=True)
    return [abs(one / other - 1) for one, other in pairs]


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares. `mean` of all errors, and the largest of those at p99."""

    mean: float
    at_p99: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> "Summary":
        return cls(sum(errors) / len(errors), max(errors[len(SHARES) - 1 :: len(SHARES)]))


def summary_of(figures: Mapping[str, Figure]) -> Summary:
    return Summary.of([error for figure in figures.values() for error in figure.errors()])


def of_itself(figures: Mapping[str, Figure]) -> tuple[Summary, Mapping[str, list[float]]]:
    """Half of the replays against the others: the mean over all ways; and by figure."""
    num = len(next(iter(figures.values())).live)
    found = np.array(
        [
            [apart(figure.live[one], figure.live[other]) for figure in figures.values()]
            for one, other in _halves(num)
        ]
    )  # by way, by figure, by share
    summaries = [Summary.of([float(one) for one in errors.ravel()]) for errors in found]
    mean, at_p99 = np.mean([(each.mean, each.at_p99) for each in summaries], 0)
    by_figure = dict(zip(figures, found.mean(axis=0).tolist(), strict=True))
    return Summary(float(mean), float(at_p99)), by_figure


def _halves(num: int) -> Iterator[tuple[list[int], list[int]]]:
    """Of so many replays, all ways, and each both ways round."""
    for chosen in combinations(range(num), num // 2):
        one, other = list(chosen), [at for at in range(num) if at not in chosen]
        yield one, other
        if num % 2:
            yield other, one


def interval(
    figures: Mapping[str, Figure], rng: np.random.Generator
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Between which values the two errors lie, with CONFIDENCE: (mean), (at p99)."""
    found = np.array([_resampled(figures, rng) for _ in range(NUM_RESAMPLES)])
    tail = (1 - CONFIDENCE) / 2
    (low, low_p99), (high, high_p99) = np.quantile(found, [tail, 1 - tail], axis=0)
    return (float(low), float(high)), (float(low_p99), float(high_p99))


def _resampled(figures: Mapping[str, Figure], rng: np.random.Generator) -> tuple[float, float]:
    errors: list[float] = []
    for figure in figures.values():
        num_runs, num_requests = figure.live.shape
        runs = rng.integers(num_runs, size=num_runs)
        requests = rng.integers(num_requests, size=num_requests)
        errors += apart(figure.live[runs][:, requests], figure.made[:, requests])
    found = Summary.of(errors)
    return found.mean, found.at_p99
