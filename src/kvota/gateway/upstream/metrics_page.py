"""A Prometheus page read for the few numbers that are wanted. Linear, bounded, never raises.

    vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
    name                     labels                     value      (a timestamp may follow)

Lines that are not of this form are passed over, as are values that are no finite number.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

PAGE_BYTES_MAX: Final = 8 * 2**20
_LINE_BYTES_MAX: Final = 16 * 1024
_ESCAPES: Final = {"n": "\n", '"': '"', "\\": "\\"}


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


Samples = Mapping[str, list[Sample]]


def read_samples(page: bytes, wanted: Collection[str]) -> Samples:
    """The samples of the wanted names, in order. A name that is not there has an empty list."""
    found: dict[str, list[Sample]] = {name: [] for name in wanted}
    names = {name.encode(): name for name in wanted}
    for line in page[:PAGE_BYTES_MAX].split(b"\n"):
        name = line.partition(b" ")[0].partition(b"{")[0]
        if name in names and len(line) <= _LINE_BYTES_MAX:
            sample = _sample(line[len(name) :].decode("utf-8", "replace"))
            if sample is not None:
                found[names[name]].append(sample)
    return found


def total(samples: Samples, *names: str) -> float | None:
    """The sum over all label sets of the first of the names that is there; None if none is."""
    for name in names:
        if samples.get(name):
            return sum(sample.value for sample in samples[name])
    return None


def _sample(rest: str) -> Sample | None:
    rest = rest.strip()
    labels: Mapping[str, str] = {}
    if rest.startswith("{"):
        read = _labels(rest)
        if read is None:
            return None
        labels, rest = read
    value, *_ = rest.split() or [""]
    try:
        number = float(value)
    except ValueError:
        return None
    return Sample(labels, number) if math.isfinite(number) else None


def _labels(text: str) -> tuple[Mapping[str, str], str] | None:
    """The labels at the beginning of `text`, and what follows them."""
    labels: dict[str, str] = {}
    at = 1
    while True:
        while at < len(text) and text[at] in ", ":
            at += 1
        if at >= len(text):
            return None
        if text[at] == "}":
            return labels, text[at + 1 :]
        equals = text.find('="', at)
        if equals < 0:
            return None
        value = _quoted(text, equals + 2)
        if value is None:
            return None
        labels[text[at:equals].strip()], at = value


def _quoted(text: str, at: int) -> tuple[str, int] | None:
    """A label's value that begins at `at`, and where its closing quote ends."""
    parts: list[str] = []
    while at < len(text):
        if text[at] == '"':
            return "".join(parts), at + 1
        if text[at] == "\\" and at + 1 < len(text):
            parts.append(_ESCAPES.get(text[at + 1], "\\" + text[at + 1]))
            at += 2
        else:
            parts.append(text[at])
            at += 1
    return None
