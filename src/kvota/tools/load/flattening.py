"""Where more at once stops to bring more. Pure."""

from collections.abc import Mapping
from math import exp2, log2

GAIN_MIN = 0.1  # per doubling of the batch


def flattening_point(tokens_per_s: Mapping[int, float]) -> int | None:
    """The smallest batch from which no larger one brings a tenth more per doubling.

    The gain of a batch over a smaller one is (tokens_per_s ratio) ** (1 / doublings) − 1, so
    batches need not be powers of two. None when the largest still gains: the flat part has not
    been seen.
    """
    sizes = sorted(tokens_per_s)
    for at, size in enumerate(sizes[:-1]):
        if all(_gain(tokens_per_s, size, larger) < GAIN_MIN for larger in sizes[at + 1 :]):
            return size
    return None


def _gain(tokens_per_s: Mapping[int, float], size: int, larger: int) -> float:
    ratio = tokens_per_s[larger] / tokens_per_s[size]
    return exp2(log2(ratio) / log2(larger / size)) - 1
