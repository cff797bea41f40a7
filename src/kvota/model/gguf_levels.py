"""GGUF's types of 16 even levels, taken apart without computing the numbers.

    Q4_0   32 numbers   scale f16, 16 bytes                        step = scale, least = −8 · scale
    Q4_1   32 numbers   scale f16, least f16, 16 bytes
    Q4_K  256 numbers   scale f16, scale of the least f16, 12 bytes with 6 bits for each of eight
                        steps and leasts, 128 bytes

Two levels lie in a byte, the low half first in the row: of a run of 32 (Q4_0, Q4_1) or of 64
numbers (Q4_K), byte i holds number i and number i + half. (ggml-quants.c of llama.cpp:
dequantize_row_q4_0, _q4_1, _q4_K and get_scale_min_k4.) A scale may be negative; then the levels
are counted from the other end, so that a step never is.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from kvota.model.levels import GROUP, LEVEL_MAX, Levels

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Parts = tuple[_Bytes, _Floats, _Floats]  # levels [groups, 32], steps and leasts [groups, 1]

_SUPER_BLOCK_BYTES: Final = 144


def has_levels(ggml_type: int) -> bool:
    """Whether numbers of this type are 16 even levels in groups of 32."""
    return ggml_type in _READERS


def levels_of(rows: _Bytes, ggml_type: int) -> Levels:
    """The levels of `rows`, [n, bytes of a row] as they lie in the file."""
    levels, steps, least = _READERS[ggml_type](rows)
    is_negative = steps < 0
    return Levels(
        np.where(is_negative, LEVEL_MAX - levels, levels).reshape(rows.shape[0], -1, GROUP),
        np.abs(steps).reshape(rows.shape[0], -1, 1),
        np.where(is_negative, least + LEVEL_MAX * steps, least).reshape(rows.shape[0], -1, 1),
    )


def _q4_0(rows: _Bytes) -> _Parts:
    blocks = rows.reshape(-1, 18)
    scales = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scales, -8.0 * scales


def _q4_1(rows: _Bytes) -> _Parts:
    blocks = rows.reshape(-1, 20)
    return _nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q4_k(rows: _Bytes) -> _Parts:
    blocks = rows.reshape(-1, _SUPER_BLOCK_BYTES)
    steps, leasts = _six_bits(blocks[:, 4:16])
    return (
        _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, GROUP),
        (_halves(blocks[:, :2]) * steps).reshape(-1, 1),
        (-_halves(blocks[:, 2:4]) * leasts).reshape(-1, 1),
    )


def _halves(two_bytes: _Bytes) -> _Floats:
    return np.ascontiguousarray(two_bytes).view(np.float16).astype(np.float32)


def _nibbles(packed: _Bytes) -> _Bytes:
    """[m, b] bytes as [m, 2b] levels: all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _six_bits(packed: _Bytes) -> tuple[_Bytes, _Bytes]:
    """Eight steps and eight leasts from the 12 bytes of each super-block.

    Bytes 0 to 3 and 4 to 7 hold the first four of each in their low six bits; the upper two bits
    are the upper ones of the other four, whose lower halves lie in bytes 8 to 11.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    steps = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    leasts = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return steps, leasts


_READERS: Final[Mapping[int, Callable[[_Bytes], _Parts]]] = MappingProxyType(
    {
        GGMLQuantizationType.Q4_0: _q4_0,
        GGMLQuantizationType.Q4_1: _q4_1,
        GGMLQuantizationType.Q4_K: _q4_k,
    }
)
