"""Rotary frequencies: how fast each pair of a head's coordinates turns with the position.

A pair (i, i + half) of a query or key at position p is turned by the angle p · f_i. Stretching a
model to longer contexts changes f, and sometimes scales the result; here both are computed once.

Where a rule depends on the length of the text (dynamic NTK, LongRoPE) it is fixed for the longest
context that is served: keys lie in the KV cache already turned, shared between sequences of any
length, and cannot be turned again when one of them grows.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvota.core.errors import UnsupportedModel
from kvota.model.architecture import Rope, RopeKind

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rotation:
    """`frequencies[i]` in radians per position; cos and sin are multiplied by `scale`."""

    frequencies: npt.NDArray[np.float32]  # [rotary_dim / 2]
    scale: float

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.frequencies)


def rotation(rope: Rope, head_size: int, context_len: int) -> Rotation:
    """The rotation for a model that is served with at most `context_len` tokens.

    Raises UnsupportedModel when the file's settings are incomplete or contradict the head size.
    """
    dim = rope.rotary_dim or head_size
    if dim % 2 or dim > head_size:
        raise UnsupportedModel(f"rotary dimension {dim} does not fit a head of {head_size}")
    try:
        with np.errstate(all="ignore"):
            frequencies = _frequencies(rope, dim, context_len).astype(np.float32)
            scale = float(np.float32(_scale(rope)))
    except (ArithmeticError, ValueError) as error:
        raise UnsupportedModel(f"rope {rope.kind} gives no frequencies: {error}") from error
    if not (np.isfinite(frequencies).all() and math.isfinite(scale)):
        raise UnsupportedModel(f"rope {rope.kind} gives no frequencies, with settings like these")
    if len(frequencies) != dim // 2:
        raise UnsupportedModel(
            f"rope {rope.kind} has {len(frequencies)} factors, but {dim // 2} pairs to turn"
        )
    return Rotation(frequencies, scale)


def _frequencies(rope: Rope, dim: int, context_len: int) -> _Floats:
    plain = _powers(rope.theta, dim)
    match rope.kind:
        case RopeKind.PLAIN:
            return plain
        case RopeKind.LINEAR:
            return plain / rope.factor
        case RopeKind.DYNAMIC:
            return _powers(_ntk_theta(rope, dim, context_len), dim)
        case RopeKind.LLAMA3:
            return _llama3(rope, plain)
        case RopeKind.YARN:
            return _yarn(rope, plain)
        case RopeKind.LONGROPE:
            is_long = context_len > _original(rope)
            return _divided(plain, rope.long_factors if is_long else rope.short_factors)
        case RopeKind.FACTORS:
            return _divided(plain, rope.frequency_factors)


def _powers(theta: float, dim: int) -> _Floats:
    return np.asarray(theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim))


def _divided(plain: _Floats, factors: tuple[float, ...]) -> _Floats:
    if len(factors) != len(plain):
        raise UnsupportedModel(f"rope has {len(factors)} factors for {len(plain)} pairs")
    return plain / np.array(factors, np.float64)


def _ntk_theta(rope: Rope, dim: int, context_len: int) -> float:
    """Hugging Face's `dynamic`, evaluated at `context_len` instead of the length so far."""
    original = _original(rope)
    stretch = rope.factor * max(context_len, original) / original - (rope.factor - 1.0)
    return float(rope.theta * stretch ** (dim / (dim - 2)))


def _llama3(rope: Rope, plain: _Floats) -> _Floats:
    """Slow pairs are slowed by `factor`, fast ones kept, in between a blend (Llama 3.1)."""
    turns = _original(rope) * plain / (2.0 * math.pi)  # over the context of the training
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(blend, 0.0, 1.0)
    return np.asarray(plain * (kept + (1.0 - kept) / rope.factor))


def _yarn(rope: Rope, plain: _Floats) -> _Floats:
    """YaRN (Peng et al. 2023): a ramp over the pair index, bounds rounded outwards."""
    dim = 2 * len(plain)
    low = max(math.floor(_pair_that_turns(rope, dim, rope.beta_fast)), 0)
    high = min(math.ceil(_pair_that_turns(rope, dim, rope.beta_slow)), dim - 1)
    width = high - low or 0.001
    slowed = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return np.asarray(plain * (1.0 - slowed + slowed / rope.factor))


def _pair_that_turns(rope: Rope, dim: int, times: float) -> float:
    """The (fractional) pair index that turns `times` times over the training context."""
    return dim * math.log(_original(rope) / (times * 2 * math.pi)) / (2 * math.log(rope.theta))


def _scale(rope: Rope) -> float:
    if rope.kind not in (RopeKind.YARN, RopeKind.LONGROPE):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind is RopeKind.LONGROPE:
        return _longrope_scale(rope)
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope_scale(rope: Rope) -> float:
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(rope.factor) / math.log(_original(rope)))


def _original(rope: Rope) -> int:
    if rope.original_max_position is None:
        raise UnsupportedModel(f"rope {rope.kind} needs the context length of the training")
    return rope.original_max_position
