"""Counters and histograms that one thread feeds: no locks, and a search among sorted bounds.

The pages are those of prometheus_client, whose own classes may be fed by any thread: there an
observation takes two locks and looks at the bounds one by one, about ten times what it takes here.
A request at the gateway makes fourteen.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Count:
    """One row of a Counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """`amount` is not below 0."""
        self.value += amount


class Counter(Collector):
    """Counts by label values. Without labels it has one row, from the start."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._rows: dict[tuple[str, ...], Count] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Count:
        row = self._rows.get(values)
        if row is None:
            assert len(values) == len(self._labels), values
            row = self._rows[values] = Count()
        return row

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, row in list(self._rows.items()):
            family.add_metric(values, row.value)
        yield family


class Spread:
    """One row of a Histogram."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        reached = zip(self._bounds, accumulate(self._counts), strict=True)
        buckets = [("+Inf" if bound == inf else str(bound), float(num)) for bound, num in reached]
        family.add_metric(labels, buckets, self._sum)


class Histogram(Collector):
    """Values by label values. `buckets` are upper bounds, rising; the last, infinity, is added."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = (*map(float, buckets), inf)
        self._rows: dict[tuple[str, ...], Spread] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Spread:
        row = self._rows.get(values)
        if row is None:
            assert len(values) == len(self._labels), values
            row = self._rows[values] = Spread(self._bounds)
        return row

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, row in list(self._rows.items()):
            row.add_to(family, values)
        yield family
