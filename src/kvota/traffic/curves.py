"""Lines that show traffic: how many came when, and how long they were.

Requests are counted in windows of equal length, from the first to the last. A distribution is
drawn as the share of requests that are at most so long, at so many places that nobody sees corners.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvota.traffic.servegen import WINDOW_S
from kvota.traffic.shape import Floats, Gathered, Population

NUM_POINTS = 200
WINDOWS_S = (1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600, 21_600, 86_400)
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curves:
    """Rates are requests/s at seconds from the first arrival; shares are percent at tokens."""

    mean_rps: float
    window_s: float
    rates: Points  # none where all came at once
    prompt: Points
    output: Points


def curves_of(of: Gathered) -> Curves:
    """Of requests, in about the shortest of WINDOWS_S that needs no more than NUM_POINTS."""
    span_s = float(of.at_s[-1])
    prompt, output = _shares(of.prompt), _shares(of.output)
    if not span_s:
        return Curves(0.0, 0.0, (), prompt, output)
    usual_s = next((one for one in WINDOWS_S if span_s / one <= NUM_POINTS), WINDOWS_S[-1])
    counts, edges = np.histogram(of.at_s, bins=max(1, round(span_s / usual_s)))
    window_s = float(edges[1])
    rates = [((at + 0.5) * window_s, float(num) / window_s) for at, num in enumerate(counts)]
    return Curves(len(of.at_s) / span_s, window_s, rates, prompt, output)


def curves_of_clients(of: Population) -> Curves:
    """Of clients that are described by distributions, in the windows of their file."""
    begin_s = min(of.windows)
    rates = [(at - begin_s + WINDOW_S / 2, rate) for at, rate in sorted(of.windows.items())]
    mean_rps = sum(of.windows.values()) / len(of.windows)
    lengths = _weighted_shares(of.prompts), _weighted_shares(of.outputs)
    return Curves(mean_rps, WINDOW_S, rates, *lengths)


def _shares(values: Floats) -> Points:
    lengths, counts = np.unique(values, return_counts=True)
    return _thinned(lengths, np.cumsum(counts) / len(values))


def _weighted_shares(weights: Mapping[int, float]) -> Points:
    lengths = np.array(sorted(weights), dtype=np.float64)
    shares = np.cumsum([weights[int(one)] for one in lengths])
    return _thinned(lengths, shares / shares[-1])


def _thinned(lengths: Floats, shares: Floats) -> Points:
    """The first places at which so many equal steps of the share are reached."""
    wanted = np.linspace(shares[0], shares[-1], NUM_POINTS)
    places = np.unique(np.minimum(np.searchsorted(shares, wanted), len(lengths) - 1))
    return [(float(lengths[at]), 100 * float(shares[at])) for at in places]
