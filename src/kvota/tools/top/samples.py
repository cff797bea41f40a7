"""A Prometheus page, read."""

from collections import Counter
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class Samples:
    """The samples of one page. A family may grow labels without breaking who sums over them."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    @classmethod
    def parse(cls, text: str) -> "Samples":
        """Raises ValueError for what is not a Prometheus page."""
        families = text_string_to_metric_families(text)
        return cls([sample for family in families for sample in family.samples])

    def total(self, name: str) -> float | None:
        """The sum over all labels; None when the page has no such sample."""
        values = [sample.value for sample in self._samples if sample.name == name]
        return sum(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sum for each value of one label."""
        sums: Counter[str] = Counter()
        for sample in self._samples:
            if sample.name == name:
                sums[sample.labels.get(label, "")] += sample.value  # type: ignore[assignment]
        return dict(sums)

    def label(self, name: str, label: str) -> str | None:
        """A label's value at the first sample of that name."""
        values = (sample.labels.get(label) for sample in self._samples if sample.name == name)
        return next(values, None)
