"""How a weight matrix is kept in memory, and how the graph gets numbers back out of it.

    f32, f16   the numbers themselves
    int8       w ≈ scale · code               one f16 scale for every 32 inputs of an output
    int4       w ≈ scale · (code − zero)      16 levels, with a zero point between levels

An [n, k] matrix in groups of g is stored as codes [n, k/g, g] and scales [n, k/g, 1]. The CPU
plugin recognizes the nodes built here and multiplies straight from the codes, never holding the
numbers at full width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset13 as ops
from openvino import Node, Type

_Floats = npt.NDArray[np.float32]

GROUP = 32
_LEAST_F16 = np.float32(2.0**-24)
_SLICE_ELEMENTS = 4_000_000  # rows are encoded this many numbers at a time, to bound temporaries


class WeightFormat(StrEnum):
    """What the operator asks for; `auto` is the best default (see `precision.py`)."""

    AUTO = "auto"
    F32 = "f32"
    F16 = "f16"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class Matrix:
    """An [n, k] matrix in one of the formats above.

    `codes` is f32, f16 or int8; for int4 it is uint8 with two codes a byte, the low half first.
    """

    shape: tuple[int, int]
    codes: npt.NDArray[np.generic]
    scales: npt.NDArray[np.float16] | None = None  # [n, k/g, 1]
    zeros: npt.NDArray[np.float16] | None = None  # [n, k/g, 1], int4 only

    @property
    def num_bytes(self) -> int:
        kept = (self.codes, self.scales, self.zeros)
        return sum(part.nbytes for part in kept if part is not None)


def group_size(num_inputs: int) -> int:
    """Inputs that share a scale: 32, or all of them where 32 does not divide."""
    return GROUP if num_inputs % GROUP == 0 else num_inputs


def encode(values: _Floats, weight_format: WeightFormat) -> Matrix:
    """Store `values` [n, k]. `auto` is not a format of storage; resolve it first."""
    shape = (values.shape[0], values.shape[1])
    match weight_format:
        case WeightFormat.F32:
            return Matrix(shape, values)
        case WeightFormat.F16:
            return Matrix(shape, values.astype(np.float16))
        case WeightFormat.INT8:
            return _encode_int8(values, group_size(shape[1]))
        case WeightFormat.INT4 if group_size(shape[1]) < shape[1]:
            return _encode_int4(values, group_size(shape[1]))
        case WeightFormat.INT4:  # one scale for a whole row is too coarse for 16 levels
            return _encode_int8(values, group_size(shape[1]))
        case WeightFormat.AUTO:
            raise AssertionError("auto must be resolved to a format before anything is encoded")


def stacked(parts: list[Matrix]) -> Matrix:
    """One matrix whose outputs are those of `parts`, in order. All share format and inputs."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    scales = [part.scales for part in parts if part.scales is not None]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Matrix(
        shape,
        np.concatenate([part.codes for part in parts]),
        np.concatenate(scales) if scales else None,
        np.concatenate(zeros) if zeros else None,
    )


def decode(matrix: Matrix) -> _Floats:
    """The numbers that the graph multiplies with: `encode` and its rounding undone in numpy."""
    if matrix.scales is None:
        return matrix.codes.astype(np.float32)
    if matrix.zeros is None:
        grouped = matrix.codes.astype(np.float32)
    else:
        codes = _unpacked(matrix.codes).reshape(*matrix.scales.shape[:2], -1)
        grouped = codes.astype(np.float32) - matrix.zeros.astype(np.float32)
    return (grouped * matrix.scales.astype(np.float32)).reshape(matrix.shape)


def matrix_node(matrix: Matrix) -> Node:
    """Nodes that yield `matrix` as f32 [n, k], sharing the codes' memory where it can."""
    if matrix.scales is None:
        constant = ops.constant(matrix.codes, shared_memory=True)
        return constant if matrix.codes.dtype == np.float32 else ops.convert(constant, Type.f32)
    codes = ops.convert(_codes_constant(matrix), Type.f16)
    if matrix.zeros is not None:
        codes = ops.subtract(codes, ops.constant(matrix.zeros, shared_memory=True))
    scaled = ops.multiply(codes, ops.constant(matrix.scales, shared_memory=True))
    flat = ops.reshape(scaled, ops.constant(np.array(matrix.shape, np.int64)), False)
    return ops.convert(flat, Type.f32)


def _codes_constant(matrix: Matrix) -> Node:
    assert matrix.scales is not None
    num_outputs, num_groups, _ = matrix.scales.shape
    if matrix.zeros is None:
        return ops.constant(matrix.codes, shared_memory=True)
    return _int4_constant(matrix.codes, (num_outputs, num_groups, matrix.shape[1] // num_groups))


def _int4_constant(packed: npt.NDArray[np.generic], shape: tuple[int, ...]) -> Node:
    # A constant over numpy memory of a sub-byte type would not keep that memory alive.
    owned = ov.Tensor(Type.u4, ov.Shape(shape))
    owned.data[...] = packed.reshape(owned.data.shape)
    return ops.constant(owned, shared_memory=True)


def _packed(levels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pairs of neighbours on the last axis, which has even length, as one byte each."""
    low, high = levels[..., ::2], levels[..., 1::2]
    return low + np.uint8(16) * high


def _unpacked(packed: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    low_and_high = packed.view(np.uint8).ravel()[:, None] >> np.array([0, 4], np.uint8)
    return (low_and_high & 15).astype(np.uint8).ravel()


def _row_slices(shape: tuple[int, ...]) -> Iterator[slice]:
    rows = max(1, _SLICE_ELEMENTS // shape[1])
    return (slice(first, first + rows) for first in range(0, shape[0], rows))


def _encode_int8(values: _Floats, group: int) -> Matrix:
    num_outputs, num_inputs = values.shape
    codes = np.empty((num_outputs, num_inputs // group, group), np.int8)
    scales = np.empty((num_outputs, num_inputs // group, 1), np.float16)
    for rows in _row_slices(values.shape):
        grouped = values[rows].reshape(-1, num_inputs // group, group)
        scales[rows] = _int8_scales(grouped)
        codes[rows] = np.rint(grouped * _inverse(scales[rows]))
    return Matrix((num_outputs, num_inputs), codes, scales)


def _int8_scales(grouped: _Floats) -> npt.NDArray[np.float16]:
    """For each group the better of two scales: the finest, and one that meets 16 levels."""
    low, high = _bounds(grouped)
    largest: _Floats = np.maximum(-low, high)
    finest = _rounded_up(largest / 127.0)
    meeting = _level_scales(low, high)
    is_closer = _squared_error(grouped, meeting) < _squared_error(grouped, finest)
    return np.where(is_closer, meeting, finest)


def _level_scales(low: _Floats, high: _Floats) -> npt.NDArray[np.float16]:
    """Scales whose multiples meet 16 even levels from `low` to `high`, where GGUF's Q4_1 has them.

    With a whole number of codes from level to level all levels miss their codes by as much as
    `low` does. Of the numbers that keep within ±127 take the one by which it misses least.
    """
    step = (high - low) / 15.0
    codes_per_level = np.arange(1, 17, dtype=np.float32)  # ±127 hold 8 to 16 times 15, as 0 is in
    codes_per_number = codes_per_level / np.maximum(step, _LEAST_F16)
    low_codes = low * codes_per_number
    missed = np.abs(low_codes - np.rint(low_codes)) / codes_per_level
    missed[np.maximum(-low, high) * codes_per_number > 127.0] = np.inf
    best = missed.argmin(axis=-1, keepdims=True)
    per_level: _Floats = codes_per_level[best]
    return _rounded_up(step / per_level)


def _squared_error(grouped: _Floats, scales: npt.NDArray[np.float16]) -> _Floats:
    """What rounding to multiples of its scale does to each group, [n, k/g, 1]."""
    missed = grouped * _inverse(scales)
    missed -= np.rint(missed)
    in_codes = np.einsum("ngk,ngk->ng", missed, missed)[..., None]
    return np.asarray(in_codes * scales.astype(np.float32) ** 2)


def _encode_int4(values: _Floats, group: int) -> Matrix:
    """Levels from the least to the largest number of a group, 0 included.

    A whole zero point would move every number of a group by up to half a level. As it is not
    whole, a matrix that was stored in this way before (GGUF's Q4_1) comes out as it was.
    """
    num_outputs, num_inputs = values.shape
    num_groups = num_inputs // group
    codes = np.empty((num_outputs, num_inputs // 2), np.uint8)
    scales = np.empty((num_outputs, num_groups, 1), np.float16)
    zeros = np.empty((num_outputs, num_groups, 1), np.float16)
    for rows in _row_slices(values.shape):
        grouped = values[rows].reshape(-1, num_groups, group)
        low, high = _bounds(grouped)
        scales[rows] = (high - low) / 15.0
        inverse = _inverse(scales[rows])
        zeros[rows] = -low * inverse
        levels = np.clip(np.rint((grouped - low) * inverse), 0, 15).astype(np.uint8)
        codes[rows] = _packed(levels.reshape(-1, num_inputs))
    return Matrix((num_outputs, num_inputs), codes, scales, zeros)


def _bounds(grouped: _Floats) -> tuple[_Floats, _Floats]:
    """The least and the largest number of each group, 0 included, [n, k/g, 1]."""
    low = np.minimum(grouped.min(axis=-1, keepdims=True), 0.0)
    high = np.maximum(grouped.max(axis=-1, keepdims=True), 0.0)
    return low, high


def _rounded_up(scales: _Floats) -> npt.NDArray[np.float16]:
    """To f16, never down: the largest code of a group must not overflow."""
    rounded = scales.astype(np.float16)
    too_small = rounded.astype(np.float32) < scales
    return np.where(too_small, np.nextafter(rounded, np.float16(np.inf)), rounded)


def _inverse(scales: npt.NDArray[np.float16]) -> _Floats:
    wide = scales.astype(np.float32)
    return np.divide(1.0, wide, out=np.zeros_like(wide), where=wide > 0)
