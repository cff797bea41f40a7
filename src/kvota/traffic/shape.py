"""Measures traffic. The figures are explained in `numbers.py`.

Windows are counted from the first arrival, the last one as it is. Percentiles are interpolated
for requests, and are values of the distribution for ServeGen's clients.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvota.traffic.arrival import Arrival
from kvota.traffic.numbers import Burstiness, LengthFigures, PopulationShape, Reuse, Shape
from kvota.traffic.prefixes import ReuseCount
from kvota.traffic.servegen import WINDOW_S, Client, Lengths
from kvota.traffic.traces import TraceError

WINDOWS_S = (1, 10, 60)
LONG_TOKENS = 4096
TOP = (1, 5, 10, 25, 50)
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Gathered:
    """What is kept of requests, in the order of the file but for the times, which ascend from 0."""

    at_s: Floats
    prompt: Floats
    output: Floats
    tenants: Counter[str]
    reuse: Reuse | None


@dataclass(frozen=True, slots=True)
class Population:
    """What is kept of clients: rates by window and by client, and weights of lengths."""

    windows: dict[float, float]  # requests/s by the window's start
    busy: dict[str, float]
    prompts: dict[int, float]
    outputs: dict[int, float]


def gather(arrivals: Iterable[Arrival]) -> Gathered:
    """Walks them once and keeps three numbers of each. Raises TraceError when there is none."""
    times, prompts, outputs = array("d"), array("q"), array("q")
    tenants: Counter[str] = Counter()
    reuse = ReuseCount()
    for one in arrivals:
        times.append(one.at_s)
        prompts.append(one.prompt_tokens)
        outputs.append(one.output_tokens)
        tenants[one.tenant] += 1
        reuse.add(one)
    if not times:
        raise TraceError("No request in it generated anything, so there is nothing to describe.")
    at_s = np.sort(np.array(times))
    at_s -= at_s[0]
    prompt, output = np.array(prompts, dtype=np.float64), np.array(outputs, dtype=np.float64)
    return Gathered(at_s, prompt, output, tenants, reuse.result())


def shape_of(arrivals: Iterable[Arrival] | Gathered) -> Shape:
    """The figures of requests. Raises TraceError when there is none."""
    of = arrivals if isinstance(arrivals, Gathered) else gather(arrivals)
    at_s, prompt, output = of.at_s, of.prompt, of.output
    is_long = prompt > LONG_TOKENS
    return Shape(
        num_requests=len(at_s),
        span_s=float(at_s[-1]),
        rate_rps=len(at_s) / at_s[-1] if at_s[-1] else 0.0,
        gap_cv=_gap_cv(at_s),
        bursts=[_burstiness(at_s, window_s) for window_s in WINDOWS_S],
        prompt=_figures(prompt),
        output=_figures(output),
        prompt_to_output=float(prompt.sum() / output.sum()),
        correlation=_correlation(prompt, output),
        long_requests=float(is_long.mean()),
        long_tokens=float(prompt[is_long].sum() / prompt.sum()),
        num_tenants=len(of.tenants),
        top_tenants=_top(of.tenants),
        reuse=of.reuse,
    )


def gather_clients(clients: Iterable[Client]) -> Population:
    """What the clients' distributions say, each weighted by the rate of its windows.

    Raises TraceError when none of them has any traffic.
    """
    of = Population({}, {}, {}, {})
    for client in clients:
        of.busy[client.name] = 0.0
        for window in client.windows:
            rate = window.rate_rps
            of.windows[window.start_s] = of.windows.get(window.start_s, 0.0) + rate
            of.busy[client.name] += rate
            period = client.period_at(window.start_s)
            _weigh(of.prompts, period.prompt, rate)
            _weigh(of.outputs, period.output, rate)
    if not of.windows:
        raise TraceError("None of its clients has any traffic.")
    return of


def shape_of_clients(clients: Iterable[Client] | Population) -> PopulationShape:
    """The figures of clients. Raises TraceError when none of them has any traffic."""
    of = clients if isinstance(clients, Population) else gather_clients(clients)
    rates = of.windows.values()
    prompt, output = _weighted_figures(of.prompts), _weighted_figures(of.outputs)
    return PopulationShape(
        num_clients=len(of.busy),
        hours=len(rates) * WINDOW_S / 3600,
        rate_rps=sum(rates) / len(rates),
        lowest_rps=min(rates),
        highest_rps=max(rates),
        prompt=prompt,
        output=output,
        prompt_to_output=prompt.mean / output.mean,
        top_clients=_top(of.busy),
    )


def _figures(values: Floats) -> LengthFigures:
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return LengthFigures(float(values.mean()), float(p50), float(p95), float(p99), values.max())


def _gap_cv(at_s: Floats) -> float:
    gaps = np.diff(at_s)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return float(gaps.std()) / mean if mean else 0.0


def _burstiness(at_s: Floats, window_s: int) -> Burstiness:
    counts = np.bincount((at_s // window_s).astype(np.int64))
    mean = float(counts.mean())
    return Burstiness(window_s, float(counts.var()) / mean, float(counts.max()) / mean)


def _correlation(one: Floats, other: Floats) -> float:
    if not one.std() or not other.std():
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _top(weights: Mapping[str, float]) -> dict[int, float]:
    """The share that the heaviest so many hold; only for counts below the number of all."""
    ordered = sorted(weights.values(), reverse=True)
    total = sum(ordered)
    return {num: sum(ordered[:num]) / total for num in TOP if num < len(ordered)}


def _weigh(into: dict[int, float], lengths: Lengths, rate: float) -> None:
    """Add a distribution, normalised, times `rate`."""
    scale = rate / lengths.cumulative[-1]
    for value, (below, upto) in zip(
        lengths.values, pairwise((0.0, *lengths.cumulative)), strict=True
    ):
        into[value] = into.get(value, 0.0) + (upto - below) * scale


def _weighted_figures(weights: Mapping[int, float]) -> LengthFigures:
    ordered = np.array(sorted(weights), dtype=np.float64)
    weight = np.array([weights[int(value)] for value in ordered])
    share = np.cumsum(weight) / weight.sum()
    p50, p95, p99 = (float(ordered[np.searchsorted(share, at)]) for at in (0.5, 0.95, 0.99))
    mean = float((ordered * weight).sum() / weight.sum())
    return LengthFigures(mean, p50, p95, p99, float(ordered[-1]))
