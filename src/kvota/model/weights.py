"""How a weight matrix is kept in memory, and how the graph gets numbers back out of it.

    f32, f16   the numbers themselves
    int8       w ≈ scale · code                      one f16 scale for 32 inputs of an output, or 64
    int4       w ≈ scale · (code − zero) + rest      16 levels, the zero point is one of them

An [n, k] matrix in groups of g is stored as codes [n, k/g, g] and scales [n, k/g, 1]. The CPU
plugin recognizes the nodes built here and multiplies straight from the codes, never holding the
numbers at full width.

Its int8 dot products (VNNI) take whole zero points only, but files have 0 between two levels. What
is left, at most half a step where 0 lies among the levels, is the same for all inputs of a group:

    x · wᵀ = x · (scale · (code − zero))ᵀ + s · restᵀ      s [T, k/g]: the sum of x over each group

`rest` [n, k/g] is a matrix in int8: a 32nd of the work, with an error of at most 1/508 of the
largest step of 32 neighbouring groups. Where the file's zero points are whole (Q4_0) there is none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset13 as ops
from openvino import Node, Type

from kvota.model.levels import GROUP, LEVEL_MAX, Levels, bounds, fitted, inverse, row_slices

_Floats = npt.NDArray[np.float32]

_LEAST_F16 = np.float32(2.0**-24)


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
    zeros: npt.NDArray[np.uint8] | None = None  # [n, k/g, 1], int4 only
    rest: "Matrix | None" = None  # [n, k/g, rounded up to whole groups], int4 only

    @property
    def num_bytes(self) -> int:
        kept = (self.codes, self.scales, self.zeros)
        beside = 0 if self.rest is None else self.rest.num_bytes
        return sum(part.nbytes for part in kept if part is not None) + beside


def group_size(num_inputs: int, wanted: int = GROUP) -> int:
    """Inputs that share a scale: as many as wanted, or all where that does not divide them."""
    return wanted if num_inputs % wanted == 0 else num_inputs


def encode(values: _Floats, weight_format: WeightFormat, int8_group: int = GROUP) -> Matrix:
    """Store `values` [n, k]. `auto` is not a format of storage; resolve it first."""
    shape = (values.shape[0], values.shape[1])
    match weight_format:
        case WeightFormat.F32:
            return Matrix(shape, values)
        case WeightFormat.F16:
            return Matrix(shape, values.astype(np.float16))
        case WeightFormat.INT8:
            return _encode_int8(values, group_size(shape[1], int8_group))
        case WeightFormat.INT4 if group_size(shape[1]) < shape[1]:
            return encode_levels(fitted(values))
        case WeightFormat.INT4:  # one scale for a whole row is too coarse for 16 levels
            return _encode_int8(values, group_size(shape[1]))
        case WeightFormat.AUTO:
            raise AssertionError("auto must be resolved to a format before anything is encoded")


def encode_levels(levels: Levels) -> Matrix:
    """Store a matrix of 16 levels in int4, level by level as it is."""
    scales = levels.steps.astype(np.float16)
    zeros = np.clip(np.rint(-levels.least * inverse(scales)), 0, LEVEL_MAX).astype(np.uint8)
    left = levels.least + zeros * scales.astype(np.float32)
    codes = _packed(levels.levels.reshape(levels.shape))
    return Matrix(levels.shape, codes, scales, zeros, _encode_rest(left[..., 0]))


def _encode_rest(left: _Floats) -> Matrix | None:
    if not left.any():
        return None
    num_outputs, num_groups = left.shape
    padded = np.zeros((num_outputs, _whole_groups(num_groups)), np.float32)
    padded[:, :num_groups] = left
    return _encode_int8(padded, GROUP)


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
        _stacked_rest(parts),
    )


def _stacked_rest(parts: list[Matrix]) -> Matrix | None:
    if all(part.rest is None for part in parts):
        return None
    num_groups = _whole_groups(parts[0].shape[1] // GROUP)
    return stacked([part.rest or _no_rest(part.shape[0], num_groups) for part in parts])


def _no_rest(num_outputs: int, num_groups: int) -> Matrix:
    return _encode_int8(np.zeros((num_outputs, num_groups), np.float32), GROUP)


def _whole_groups(num_inputs: int) -> int:
    return -(-num_inputs // GROUP) * GROUP


def decode(matrix: Matrix) -> _Floats:
    """The numbers that the graph multiplies with: `encode` and its rounding undone in numpy."""
    if matrix.scales is None:
        return matrix.codes.astype(np.float32)
    scales = matrix.scales.astype(np.float32)
    if matrix.zeros is None:
        return (matrix.codes.astype(np.float32) * scales).reshape(matrix.shape)
    codes = _unpacked(matrix.codes).reshape(*scales.shape[:2], -1).astype(np.float32)
    values = (codes - matrix.zeros) * scales
    if matrix.rest is not None:
        values += decode(matrix.rest)[:, : scales.shape[1], None]
    return values.reshape(matrix.shape)


def product(x: Node | ov.Output, matrix: Matrix) -> Node:
    """Nodes for x · matrixᵀ, [T, n] in f32, from x [T, k]. Shares memory as `matrix_node`."""
    y = ops.matmul(x, _codes_node(matrix), False, True)
    if matrix.rest is None:
        return y
    sums = _group_sums(x, matrix.shape[1] // GROUP)
    return ops.add(y, ops.matmul(sums, _codes_node(matrix.rest), False, True))


def matrix_node(matrix: Matrix) -> Node:
    """Nodes that yield `matrix` as f32 [n, k], sharing the codes' memory where it can.

    Not for int4 with a rest, which has to be multiplied apart: `product`.
    """
    assert matrix.rest is None, "a matrix with a rest is known by its products only"
    return _codes_node(matrix)


def _codes_node(matrix: Matrix) -> Node:
    if matrix.scales is None:
        constant = ops.constant(matrix.codes, shared_memory=True)
        return constant if matrix.codes.dtype == np.float32 else ops.convert(constant, Type.f32)
    if matrix.zeros is None:
        codes = ops.convert(ops.constant(matrix.codes, shared_memory=True), Type.f16)
    else:
        zeros = _int4_constant(_packed(matrix.zeros.reshape(1, -1)), matrix.zeros.shape)
        grouped = (*matrix.zeros.shape[:2], GROUP)
        codes = ops.convert(_int4_constant(matrix.codes, grouped), Type.f16)
        codes = ops.subtract(codes, ops.convert(zeros, Type.f16))
    scaled = ops.multiply(codes, ops.constant(matrix.scales, shared_memory=True))
    flat = ops.reshape(scaled, ops.constant(np.array(matrix.shape, np.int64)), False)
    return ops.convert(flat, Type.f32)


def _group_sums(x: Node | ov.Output, num_groups: int) -> Node:
    """The sum of x [T, k] over each group, with zeros up to a whole group of groups."""
    grouped = ops.reshape(x, ops.constant(np.array([-1, num_groups, GROUP], np.int64)), False)
    sums = ops.reduce_sum(grouped, ops.constant(np.array([-1], np.int64)), False)
    missing = _whole_groups(num_groups) - num_groups
    if not missing:
        return sums
    before, after = (ops.constant(np.array([0, count], np.int64)) for count in (0, missing))
    return ops.pad(sums, before, after, "constant", ops.constant(np.float32(0)))


def _int4_constant(packed: npt.NDArray[np.generic], shape: tuple[int, ...]) -> Node:
    # A constant over numpy memory of a sub-byte type would not keep that memory alive.
    owned = ov.Tensor(Type.u4, ov.Shape(shape))
    owned.data[...] = packed.reshape(owned.data.shape)
    return ops.constant(owned, shared_memory=True)


def _packed(levels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pairs of neighbours on the last axis as one byte each; a last one without neighbour too."""
    packed = levels[..., ::2].copy()
    packed[..., : levels.shape[-1] // 2] |= levels[..., 1::2] << 4
    return packed


def _unpacked(packed: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    low_and_high = packed.view(np.uint8).ravel()[:, None] >> np.array([0, 4], np.uint8)
    return (low_and_high & 15).astype(np.uint8).ravel()


def _encode_int8(values: _Floats, group: int) -> Matrix:
    num_outputs, num_inputs = values.shape
    codes = np.empty((num_outputs, num_inputs // group, group), np.int8)
    scales = np.empty((num_outputs, num_inputs // group, 1), np.float16)
    for rows in row_slices(values.shape):
        grouped = values[rows].reshape(-1, num_inputs // group, group)
        scales[rows] = _int8_scales(grouped)
        codes[rows] = np.rint(grouped * inverse(scales[rows]))
    return Matrix((num_outputs, num_inputs), codes, scales)


def _int8_scales(grouped: _Floats) -> npt.NDArray[np.float16]:
    """For each group the best of some scales: the finest, and others that may meet its numbers.

    A group as files have them may hold 16 levels. Where it does not, a scale up to 3 % coarser is
    often closer by chance: of eight the best has a tenth less error than the finest.
    """
    low, high = bounds(grouped)
    finest = np.asarray(np.maximum(-low, high) / 127.0, np.float32)
    is_as_in_files = grouped.shape[-1] == GROUP
    others = [_level_scales(low, high)] if is_as_in_files else _coarser(finest)
    best = _rounded_up(finest)
    error = _squared_error(grouped, best)
    for scales in others:
        own = _squared_error(grouped, scales)
        best, error = np.where(own < error, scales, best), np.minimum(own, error)
    return best


def _coarser(finest: _Floats) -> Iterator[npt.NDArray[np.float16]]:
    return (_rounded_up(finest * np.float32(1 + step / 256)) for step in range(1, 8))


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
    missed = grouped * inverse(scales)
    missed -= np.rint(missed)
    in_codes = np.einsum("ngk,ngk->ng", missed, missed)[..., None]
    return np.asarray(in_codes * scales.astype(np.float32) ** 2)


def _rounded_up(scales: _Floats) -> npt.NDArray[np.float16]:
    """To f16, never down: the largest code of a group must not overflow."""
    rounded = scales.astype(np.float16)
    too_small = rounded.astype(np.float32) < scales
    return np.where(too_small, np.nextafter(rounded, np.float16(np.inf)), rounded)
