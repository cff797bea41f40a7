"""The same model in other axes, in which rounding to int8 loses less.

A few channels of a model's hidden state are many times larger than the rest, and what shares a
scale with one of them is rounded coarsely. An orthogonal R spreads each channel over its block:

    hidden' = hidden · R          R: the Hadamard matrix of 64, along the diagonal; R = Rᵀ = R⁻¹

RMS norms without a gain do not notice, as lengths stay what they were. So each norm's gain moves
into the matrices that read behind it, and R into all that read or write the hidden state (Ashkboos
et al. 2024, QuaRot, arXiv 2404.00456):

    reads     q k v gate up, own head    W' = W · diag(gain) · R
    writes    embedding                  E' = E · R
              o down                     W' = R · W, b' = b · R
    tied head                            E' once more, behind R · diag(gain) · R

In exact arithmetic nothing changes. `precision.py` has what it is worth. Inputs of o and down are
not of the hidden state, and stay as they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvota.model.architecture import Architecture, Weight, WeightSource

_Floats = npt.NDArray[np.float32]

BLOCK: Final = 64
EMBEDDING: Final = "model.embed_tokens.weight"
LAST_NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"
_FIRST_NORM, _SECOND_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
_READERS: Final = {
    "self_attn.q_proj.weight": _FIRST_NORM,
    "self_attn.k_proj.weight": _FIRST_NORM,
    "self_attn.v_proj.weight": _FIRST_NORM,
    "mlp.gate_proj.weight": _SECOND_NORM,
    "mlp.up_proj.weight": _SECOND_NORM,
}
_WRITERS: Final = ("self_attn.o_proj.", "mlp.down_proj.")  # weight and bias


def fits(a: Architecture) -> bool:
    """Whether every product of the model has whole blocks of inputs."""
    inputs = (a.hidden_size, a.num_heads * a.head_size, a.mlp_size)
    return all(size % BLOCK == 0 for size in inputs)


def turned(x: _Floats) -> _Floats:
    """x · R for the last axis of x, whole blocks of it."""
    blocks: _Floats = np.matmul(x.reshape(*x.shape[:-1], -1, BLOCK), _hadamard())
    return blocks.reshape(x.shape)


class TurnedSource:
    """A source whose weights are those of the same model with a hidden state turned by R.

    Its norms have no gain. The tied head wants `head_turn` before it.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.weights = _TurnedWeights(source.weights)

    @property
    def origin(self) -> str:
        return self._source.origin

    @property
    def architecture(self) -> Architecture:
        return self._source.architecture

    def head_turn(self) -> _Floats:
        """R · diag(gain of the last norm) · R, [hidden, hidden]."""
        gain = np.diag(self.weights.gain(LAST_NORM).read())
        return turned(turned(gain).T)


class _Side(Enum):
    READS = 0
    WRITES = 1
    IS_NORM = 2


@dataclass(frozen=True, slots=True)
class _TurnedWeight:
    weight: Weight
    side: _Side
    gain: "_Once | None" = None

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def stored_as(self) -> str:
        return self.weight.stored_as

    def read(self) -> _Floats:
        if self.side is _Side.IS_NORM:
            return np.ones(self.shape, np.float32)
        values = self.weight.read()
        if self.gain is not None:
            values = values * self.gain.read()
        if self.side is _Side.WRITES and values.ndim == 2:
            return np.ascontiguousarray(turned(np.ascontiguousarray(values.T)).T)
        return turned(values)


class _Once:
    """A norm's gain, which several matrices share: read once."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._values: _Floats | None = None

    def read(self) -> _Floats:
        if self._values is None:
            self._values = self._weight.read()
        return self._values


class _TurnedWeights(Mapping[str, Weight]):
    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._weights = weights
        self._gains: dict[str, _Once] = {}

    def __getitem__(self, name: str) -> Weight:
        weight = self._weights[name]
        if name == EMBEDDING:
            return _TurnedWeight(weight, _Side.READS)  # its rows are hidden states
        if name == HEAD:
            return _TurnedWeight(weight, _Side.READS, self.gain(LAST_NORM))
        if name.endswith(tuple(_READERS.values())) or name == LAST_NORM:
            return _TurnedWeight(weight, _Side.IS_NORM)
        layer, own = _split(name)
        if own in _READERS:
            return _TurnedWeight(weight, _Side.READS, self.gain(layer + _READERS[own]))
        return _TurnedWeight(weight, _Side.WRITES) if own.startswith(_WRITERS) else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def gain(self, name: str) -> _Once:
        """Of the norm called so. Raises KeyError where there is none."""
        if name not in self._gains:
            self._gains[name] = _Once(self._weights[name])
        return self._gains[name]


def _split(name: str) -> tuple[str, str]:
    """ "model.layers.7." and the rest; the name itself as the rest elsewhere."""
    parts = name.split(".", 3)
    is_layer = len(parts) == 4 and parts[:2] == ["model", "layers"]
    return (f"model.layers.{parts[2]}.", parts[3]) if is_layer else ("", name)


@cache
def _hadamard() -> _Floats:
    """Sylvester's matrix of `BLOCK`, with rows of length 1."""
    matrix: _Floats = np.ones((1, 1), np.float32)
    while len(matrix) < BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(np.float32(BLOCK)), np.float32)
