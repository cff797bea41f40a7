"""Matrices of 16 even levels: what 4 bits can hold, and what some files store.

w = step · level + least        level 0 … 15; a step and a least for 32 inputs of an output
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvota.model.architecture import Weight

_Floats = npt.NDArray[np.float32]

GROUP = 32
LEVEL_MAX = 15
_SLICE_ELEMENTS = 4_000_000  # rows are fitted this many numbers at a time, to bound temporaries


@dataclass(frozen=True, slots=True)
class Levels:
    """An [n, k] matrix in groups of 32."""

    levels: npt.NDArray[np.uint8]  # [n, k/32, 32]
    steps: _Floats  # [n, k/32, 1]
    least: _Floats  # [n, k/32, 1]

    @property
    def shape(self) -> tuple[int, int]:
        num_outputs, num_groups, _ = self.levels.shape
        return num_outputs, num_groups * GROUP

    def values(self) -> _Floats:
        """The numbers, [n, k]."""
        return (self.steps * self.levels + self.least).reshape(self.shape)


@runtime_checkable
class LeveledWeight(Weight, Protocol):
    """A tensor of a file that has types of 16 levels."""

    @property
    def has_levels(self) -> bool: ...  # whether this tensor is of such a type

    def read_levels(self) -> Levels:
        """The numbers as they are stored, where `has_levels`. Raises ModelError as `read` does."""


def fitted(values: _Floats) -> Levels:
    """The nearest levels between the least and the largest number of each group, 0 included."""
    num_outputs, num_inputs = values.shape
    num_groups = num_inputs // GROUP
    levels = np.empty((num_outputs, num_groups, GROUP), np.uint8)
    steps = np.empty((num_outputs, num_groups, 1), np.float32)
    least = np.empty((num_outputs, num_groups, 1), np.float32)
    for rows in row_slices(values.shape):
        grouped = values[rows].reshape(-1, num_groups, GROUP)
        least[rows], high = bounds(grouped)
        steps[rows] = ((high - least[rows]) / LEVEL_MAX).astype(np.float16)
        in_steps = (grouped - least[rows]) * inverse(steps[rows])
        levels[rows] = np.clip(np.rint(in_steps), 0, LEVEL_MAX)
    return Levels(levels, steps, least)


def row_slices(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the rows of a matrix of this shape, each of few enough numbers."""
    rows = max(1, _SLICE_ELEMENTS // shape[1])
    return (slice(first, first + rows) for first in range(0, shape[0], rows))


def bounds(grouped: _Floats) -> tuple[_Floats, _Floats]:
    """The least and the largest number of each group, 0 included, [n, k/g, 1]."""
    low = np.minimum(grouped.min(axis=-1, keepdims=True), 0.0)
    high = np.maximum(grouped.max(axis=-1, keepdims=True), 0.0)
    return low, high


def inverse(steps: npt.NDArray[np.floating]) -> _Floats:
    """1 / step; 0 where the step is 0."""
    wide = steps.astype(np.float32)
    return np.divide(1.0, wide, out=np.zeros_like(wide), where=wide > 0)
