"""A metrics page that can be narrowed to some labels."""

from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvota.tools.top.samples import Samples


class Page(Samples):
    def __init__(self, samples: Sequence[Sample] = ()) -> None:
        super().__init__(samples)

    @classmethod
    def parse(cls, text: str) -> "Page":
        """Raises ValueError for what is not a Prometheus page."""
        families = text_string_to_metric_families(text)
        return cls([sample for family in families for sample in family.samples])

    def where(self, **labels: str) -> "Page":
        """Only the samples that carry all of these labels."""
        wanted: Mapping[str, str] = labels
        return Page([one for one in self._samples if wanted.items() <= one.labels.items()])

    def largest(self, name: str) -> float | None:
        """The largest value over all labels; None when the page has no such sample."""
        return max((one.value for one in self._samples if one.name == name), default=None)
