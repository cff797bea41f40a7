"""ServeGen's clients as tenants: many small renewal processes instead of one average stream.

    client 17   |--600 s--|--600 s--|  …      each window: a rate, and a family of gaps
                 ·  · ··   ····    ·          Gamma or Weibull, as bursty as this client is

A window's gaps are drawn from its family and rescaled so that the window holds `rate_rps` times
its length of requests, in expectation exactly; the fitted mean is only near that. They are then
turned by a random part of the window, as a process seen from a random moment would be.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from kvota.traffic.arrival import Arrival
from kvota.traffic.traces import TraceError, open_trace, readable

WINDOW_S = 600.0
PERIOD_S = 21_600.0  # lengths are given per six hours


@dataclass(frozen=True, slots=True)
class Window:
    """One client's traffic in `WINDOW_S` seconds from `start_s` after midnight."""

    start_s: float
    rate_rps: float
    family: str
    shape: float
    scale_s: float

    def gap(self, rng: Random) -> float:
        if self.family == "Weibull":
            return rng.weibullvariate(self.scale_s, self.shape)
        return rng.gammavariate(self.shape, self.scale_s)


@dataclass(frozen=True, slots=True)
class Lengths:
    """An empirical distribution. Probabilities need not add up to one."""

    values: Sequence[int]
    cumulative: Sequence[float]

    def draw(self, rng: Random) -> int:
        return rng.choices(self.values, cum_weights=self.cumulative)[0]


@dataclass(frozen=True, slots=True)
class Period:
    prompt: Lengths
    output: Lengths


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    windows: Sequence[Window]
    periods: dict[float, Period] = field(repr=False)

    def period_at(self, at_s: float) -> Period:
        return self.periods[at_s // PERIOD_S * PERIOD_S]


def read_clients(path: Path) -> list[Client]:
    """Raises TraceError for a line that is not a ServeGen client."""
    with readable(path), open_trace(path) as file:
        try:
            return [_client(json.loads(line)) for line in file]
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}: not a file of ServeGen clients: {error}") from None


def servegen_arrivals(
    clients: Sequence[Client], rng: Random, *, start_s: float, end_s: float, max_tokens: int | None
) -> list[Arrival]:
    """The traffic of all clients from `start_s` to `end_s` after midnight, by time.

    Outputs over `max_tokens` are cut to it; None: each client allows what its answer has. Times in
    the result start at 0.
    """
    arrivals = [
        arrival
        for client in clients
        for window in client.windows
        if start_s < window.start_s + WINDOW_S and window.start_s < end_s
        for arrival in _arrivals(client, window, rng, start_s, end_s, max_tokens)
    ]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _arrivals(
    client: Client,
    window: Window,
    rng: Random,
    start_s: float,
    end_s: float,
    max_tokens: int | None,
) -> Iterator[Arrival]:
    period = client.period_at(window.start_s)
    for at_s in _times(window, rng):
        prompt, output = period.prompt.draw(rng), max(period.output.draw(rng), 1)
        allowed = output if max_tokens is None else max_tokens
        if start_s <= at_s < end_s:
            yield Arrival(
                at_s=at_s - start_s,
                prompt_tokens=max(prompt, 1),
                output_tokens=min(output, allowed),
                max_tokens=allowed,
                tenant=client.name,
            )


def _times(window: Window, rng: Random) -> list[float]:
    expected = window.rate_rps * WINDOW_S
    number = math.floor(expected) + (rng.random() < expected % 1)
    gaps = [window.gap(rng) for _ in range(number)]
    total = sum(gaps)
    turn_s = rng.uniform(0, WINDOW_S)
    if not total:  # no gap at all, or gaps too small for a float
        return [window.start_s + turn_s] * number
    ends = accumulate(gap * WINDOW_S / total for gap in gaps)
    return sorted(window.start_s + (turn_s + end) % WINDOW_S for end in ends)


def _client(row: dict[str, Any]) -> Client:
    windows = [
        Window(float(start), float(rate), str(family), float(shape), float(scale))
        for start, rate, _, family, shape, scale in row["windows"]
    ]
    periods = {
        float(start): Period(_lengths(fields["input_tokens"]), _lengths(fields["output_tokens"]))
        for start, fields in row["dataset"].items()
    }
    return Client(f"client-{row['client']}", windows, periods)


def _lengths(pair: list[list[float]]) -> Lengths:
    values, weights = pair
    return Lengths([int(value) for value in values], list(accumulate(weights)))
