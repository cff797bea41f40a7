"""What a running server says of itself, and what the system says of it."""

import http.client
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.client import BenchFailed

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Page:
    """One scrape of /metrics."""

    samples: dict[tuple[str, Labels], float]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples of that name that carry these labels; 0 when none of them does.

        Raises KeyError for a name that is not on the page: that is no zero.
        """
        found = [(carried, value) for (one, carried), value in self.samples.items() if one == name]
        if not found:
            raise KeyError(name)
        wanted = set(labels.items())
        return sum(value for carried, value in found if wanted <= carried)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of that name, by the value of one label, without zeros."""
        found: dict[str, float] = {}
        for (sample, carried), value in self.samples.items():
            if sample == name and value:
                key = dict(carried)[label]
                found[key] = found.get(key, 0.0) + value
        return found


def scrape(port: int) -> Page:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise BenchFailed(f"GET /metrics: {response.status}")
    return parsed(text)


def parsed(text: str) -> Page:
    return Page(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


def resident_bytes(pid: int) -> int:
    """Memory of a process and of those it has started that is in RAM now."""
    own = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (own, *own.children(recursive=True)))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of y over x."""
    num = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / num, sum(y for _, y in points) / num
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
