"""The same model in other axes, in which rounding to int8 loses less.

A few channels of a model's hidden state are many times larger than the rest, and what shares a
scale with one of them is rounded coarsely. An orthogonal R spreads each channel over its block:

    hidden' = hidden · R          R: a Hadamard matrix, as often along the diagonal as it fits

RMS norms without a gain do not notice, as lengths stay what they were. So each norm's gain moves
into the matrices that read behind it, and R into all that read or write the hidden state (Ashkboos
et al. 2024, QuaRot, arXiv 2404.00456). Values turn likewise between v and o, each head by an H of
its size, since attention only adds values of one head up:

    reads     q k gate up, own head      W' = W · diag(gain) · R
    embeds    embedding                  E' = E · R
    writes    down                       W' = Rᵀ · W, b' = b · R
    both      v                          W' = Hᵀ · W · diag(gain) · R, b' = b · H
              o                          W' = Rᵀ · W · H, b' = b · R
    tied head                            E' once more, behind Rᵀ · diag(gain) · R

In exact arithmetic nothing changes. `precision.py` has what it is worth. The inputs of down are
products of two matrices' outputs, number by number, and cannot turn.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvota.model.architecture import Architecture, Weight, WeightSource
from kvota.model.sinks import first_inputs

_Floats = npt.NDArray[np.float32]

BLOCKS: Final = (128, 96, 64)  # inputs that share a scale: the fewer scales, the less work
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
VALUES: Final = "self_attn.v_proj.weight"
_VALUES: Final = "self_attn.v_proj."  # weight and bias
_VALUE_READER: Final = "self_attn.o_proj.weight"


def block_of(a: Architecture) -> int | None:
    """The largest block that every product of the model has whole ones of as inputs."""
    inputs = (a.hidden_size, a.num_heads * a.head_size, a.mlp_size)
    return next((block for block in BLOCKS if all(size % block == 0 for size in inputs)), None)


def turned(x: _Floats, block: int) -> _Floats:
    """x · R for the last axis of x, whole blocks of it."""
    blocks: _Floats = np.matmul(x.reshape(*x.shape[:-1], -1, block), hadamard(block))
    return blocks.reshape(x.shape)


@cache
def hadamard(order: int) -> _Floats:
    """An orthogonal matrix of numbers that are all as large, for a power of 2 or 12 times one.

    Sylvester's doubling, from 1 or from Paley's matrix of 12.
    """
    matrix = _paley(11) if order % 3 == 0 else np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    assert len(matrix) == order, "there is no such matrix"
    return np.asarray(matrix / np.sqrt(order), np.float32)


def _paley(prime: int) -> npt.NDArray[np.float64]:
    """Hadamard's matrix of `prime` + 1, for a prime that leaves 3 when divided by 4."""
    squares = {number * number % prime for number in range(1, prime)}
    signs = np.array([0, *(1 if number in squares else -1 for number in range(1, prime))])
    matrix = np.ones((prime + 1, prime + 1))
    matrix[1:, 0] = -1
    matrix[1:, 1:] = signs[np.subtract.outer(np.arange(prime), np.arange(prime)) % prime]
    np.fill_diagonal(matrix, 1)
    return matrix


class TurnedSource:
    """A source whose weights are those of the same model with a hidden state turned by R.

    Its norms have no gain. The tied head wants `head_turn` before it.
    """

    def __init__(self, source: WeightSource, block: int) -> None:
        self._source = source
        self.block = block
        self.weights = _TurnedWeights(source.weights, block, _head_block(source.architecture))

    @property
    def origin(self) -> str:
        return self._source.origin

    @property
    def architecture(self) -> Architecture:
        return self._source.architecture

    def head_turn(self) -> _Floats:
        """Rᵀ · diag(gain of the last norm) · R, [hidden, hidden]."""
        gain = np.diag(self.weights.gain(LAST_NORM).read())
        return turned(turned(gain, self.block).T, self.block)

    def first_inputs(self) -> Iterator[_Floats]:
        """As `sinks.first_inputs`, turned."""
        return (turned(inputs, self.block) for inputs in first_inputs(self._source))


def _head_block(a: Architecture) -> int:
    """The largest power of 2 in a head; 3 times it where the head has a 3 and four times 2."""
    power = a.head_size & -a.head_size
    return 3 * power if a.head_size % 3 == 0 and power % 4 == 0 else power


@dataclass(frozen=True, slots=True)
class _Changed:
    """A weight that will be read as another."""

    weight: Weight

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def stored_as(self) -> str:
        return self.weight.stored_as


@dataclass(frozen=True, slots=True)
class _TurnedWeight(_Changed):
    """A matrix [n, k] whose inputs are turned by blocks of `inputs`, outputs by `outputs`.

    A vector has outputs only.
    """

    inputs: int | None = None
    outputs: int | None = None
    gain: "_Once | None" = None

    def read(self) -> _Floats:
        values = self.weight.read()
        if self.gain is not None:
            values = values * self.gain.read()
        if self.inputs is not None:
            values = turned(values, self.inputs)
        if self.outputs is not None:
            values = np.ascontiguousarray(turned(np.ascontiguousarray(values.T), self.outputs).T)
        return values


@dataclass(frozen=True, slots=True)
class _NoGain(_Changed):
    """A norm whose gain has moved elsewhere."""

    def read(self) -> _Floats:
        return np.ones(self.shape, np.float32)


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
    def __init__(self, weights: Mapping[str, Weight], block: int, head_block: int) -> None:
        self._weights = weights
        self._block = block
        self._head_block = head_block
        self._gains: dict[str, _Once] = {}

    def __getitem__(self, name: str) -> Weight:
        weight = self._weights[name]
        if name == EMBEDDING:
            return _TurnedWeight(weight, inputs=self._block)  # its rows are hidden states
        if name == HEAD:
            return _TurnedWeight(weight, inputs=self._block, gain=self.gain(LAST_NORM))
        if name.endswith(tuple(_READERS.values())) or name == LAST_NORM:
            return _NoGain(weight)
        layer, own = _split(name)
        inputs = outputs = gain = None
        if own in _READERS:
            inputs, gain = self._block, self.gain(layer + _READERS[own])
        elif own == _VALUE_READER:
            inputs = self._head_block
        if own.startswith(_VALUES):
            outputs = self._head_block
        elif own.startswith(_WRITERS):
            outputs = self._block
        return _TurnedWeight(weight, inputs, outputs, gain)

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
