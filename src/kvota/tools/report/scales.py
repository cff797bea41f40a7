"""From values to pixels, and the round numbers that stand at an axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Scale:
    """`low` is drawn at pixel `start`, `high` at `end`. A logarithmic one needs `low` above 0."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, place = self.low, self.high, value
        if self.is_log:
            low, high, place = log10(low), log10(high), log10(value)
        return self.start + (place - low) / (high - low) * (self.end - self.start)

    def shows(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self) -> list[float]:
        """Round values within the scale, ascending."""
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high)


def linear(values: Sequence[float], start: float, end: float, *, from_zero: bool = True) -> Scale:
    """Between round values: from 0 (or the lowest, when below), or from just below the lowest."""
    zero = [0.0] if from_zero or not values else []
    low, high = min([*zero, *values]), max([*zero, *values])
    if high == low:
        high = low + (abs(low) or 1.0)
    step = _step(low, high)
    return Scale(floor(low / step) * step, ceil(high / step - 1e-9) * step, start, end)


def logarithmic(values: Sequence[float], start: float, end: float) -> Scale:
    """From the lowest positive value to the highest, with a little air."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    if high == low:
        low, high = low / 2, high * 2
    air = (high / low) ** 0.04
    return Scale(low / air, high * air, start, end, is_log=True)


def ticks(low: float, high: float) -> list[float]:
    """About five multiples of 1, 2 or 5 times a power of ten."""
    step = _step(low, high)
    first = ceil(low / step - 1e-9)
    last = floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten; over three decades and more, the powers alone."""
    factors = (1,) if high / low >= 1000 else (1, 2, 5)
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    values = [factor * 10.0**decade for decade in decades for factor in factors]
    return [value for value in values if low <= value <= high]


def _step(low: float, high: float) -> float:
    rough = (high - low) / NUM_TICKS
    power: float = 10.0 ** floor(log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
