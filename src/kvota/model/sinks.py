"""Keeps what all tokens attend to where it is when values are rounded.

Attention that has nothing to look for goes to the first token of the context (Xiao et al. 2023,
"attention sinks", arXiv 2309.17453). A model makes room for it: the first token's hidden state
grows a hundred times longer than any other, and nearly the same whatever the token is (Sun et al.
2024, "massive activations", arXiv 2402.17762), and its value stays small. So what rounding does
to that one value is large, and added to every token's attention, in every layer alike.

It is known before any prompt comes. A context of one token needs no attention: its value is the
result. A few such contexts are computed here in full, layer by layer. Then of the value matrix's
codes some are moved to their other neighbour, those that lie nearly half way, until the first
token's value is what it would be unrounded:

    Σ code' · scale · q(x)  ≈  Σ w · x       x: the first token's input, q: as kernels round it
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvota.model.architecture import Architecture, WeightSource
from kvota.model.weights import Matrix, WeightFormat, decode, encode

_Floats = npt.NDArray[np.float32]

NUM_FIRST: Final = 16  # contexts; what matters is common to all
_MOVES_MAX: Final = 64  # of codes of one output
_CODE_MAX: Final = 127
_quietly = np.errstate(over="ignore", invalid="ignore")  # weights beyond f32 are told of elsewhere


def first_inputs(source: WeightSource) -> Iterator[_Floats]:
    """For each layer what q, k and v read in contexts of one token, [NUM_FIRST, hidden].

    Normalized, without the norm's gain. Reads weights as it goes.
    """
    a = source.architecture
    ids = np.linspace(0, a.vocab_size - 1, NUM_FIRST).astype(np.int64)
    hidden = source.weights["model.embed_tokens.weight"].read()[ids]
    for layer in range(a.num_layers):
        normed = _normalized(hidden, a)
        yield normed
        hidden = _after(_Layer(source, f"model.layers.{layer}."), hidden, normed)


@_quietly
def encode_steered(values: _Floats, group: int, inputs: _Floats) -> Matrix:
    """`values` [n, k] in int8, with the outputs for the mean of `inputs` [m, k] what they were."""
    matrix = encode(values, WeightFormat.INT8, group)
    assert matrix.scales is not None
    scales = matrix.scales.astype(np.float32)
    rounded = _as_rounded(inputs, matrix.codes.shape[2])
    missing = (inputs @ values.T - rounded @ decode(matrix).T).mean(axis=0)
    in_codes = values.reshape(matrix.codes.shape) / np.maximum(scales, np.finfo(np.float32).tiny)
    offset = np.asarray(in_codes - matrix.codes.astype(np.float32), np.float32)
    toward = np.where(offset > 0, np.float32(1), np.float32(-1))
    cost = ((1 - 2 * np.abs(offset)) * scales**2).reshape(values.shape)  # in squared error
    effect = (toward * scales).reshape(values.shape) * rounded.mean(axis=0)
    can = np.abs(matrix.codes + toward).reshape(values.shape) <= _CODE_MAX
    moved = _cheapest(cost, np.where(can, effect, 0), missing).reshape(matrix.codes.shape)
    codes = matrix.codes + np.where(moved, toward, 0).astype(np.int8)
    return replace(matrix, codes=codes.astype(np.int8))


def _cheapest(cost: _Floats, effect: _Floats, missing: _Floats) -> npt.NDArray[np.bool_]:
    """Which of the moves [n, k] to make so that each row's effects add up to what it misses.

    Greedy: those first that cost least for what they do, as long as none does too much.
    """
    does = effect * np.sign(missing)[:, None]
    price = np.where(does > 0, cost / np.maximum(does, np.finfo(np.float32).tiny), np.inf)
    count = min(_MOVES_MAX, price.shape[1])
    order = np.argsort(price, axis=1)[:, :count]
    rows = np.arange(len(price))
    left = np.abs(missing)
    chosen = np.zeros(price.shape, np.bool_)
    for place in order.T:
        own = does[rows, place]
        takes = (own > 0) & (own <= left)
        chosen[rows, place] = takes
        left = left - np.where(takes, own, 0)
    return chosen


def _as_rounded(inputs: _Floats, group: int) -> _Floats:
    """What the kernel multiplies with: int8 by groups of each row."""
    grouped = inputs.reshape(len(inputs), -1, group)
    scales = np.abs(grouped).max(axis=-1, keepdims=True) / _CODE_MAX
    scales = np.maximum(scales, np.finfo(np.float32).tiny)
    return np.asarray(np.rint(grouped / scales) * scales, np.float32).reshape(inputs.shape)


def _normalized(x: _Floats, a: Architecture) -> _Floats:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + a.rms_epsilon))


class _Layer:
    """Products with one layer's weights."""

    def __init__(self, source: WeightSource, prefix: str) -> None:
        self.architecture = source.architecture
        self._weights = source.weights
        self._prefix = prefix

    def vector(self, name: str) -> _Floats:
        return self._weights[self._prefix + name].read()

    def product(self, name: str, x: _Floats, *, has_bias: bool) -> _Floats:
        y: _Floats = x @ self.vector(f"{name}.weight").T
        return y + self.vector(f"{name}.bias") if has_bias else y


@_quietly
def _after(layer: _Layer, hidden: _Floats, normed: _Floats) -> _Floats:
    """The hidden state behind a layer, of contexts of one token: its own value is all there is."""
    a = layer.architecture
    x = normed * layer.vector("input_layernorm.weight")
    values = layer.product("self_attn.v_proj", x, has_bias=a.qkv_bias)
    by_head = values.reshape(len(x), a.num_kv_heads, a.head_size)
    attended = by_head.repeat(a.num_heads // a.num_kv_heads, axis=1).reshape(len(x), -1)
    hidden = hidden + layer.product("self_attn.o_proj", attended, has_bias=a.output_bias)
    x = _normalized(hidden, a) * layer.vector("post_attention_layernorm.weight")
    gate, up = (layer.product(f"mlp.{n}_proj", x, has_bias=a.mlp_bias) for n in ("gate", "up"))
    gated = gate / (1 + np.exp(-np.maximum(gate, -80))) * up
    return hidden + layer.product("mlp.down_proj", gated, has_bias=a.mlp_bias)
