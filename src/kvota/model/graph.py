"""Builds the arithmetic of a decoder-only model, with paged attention, from its weights.

    ids ─▶ embed
        ─▶ [ norm ─ qkv ─ rope ─ paged attention ─ out ─ + ─ norm ─ gated MLP ─ + ] × layers
        ─▶ norm ─▶ head ─▶ logits

q, k, v are one matrix: a larger product is a faster one. Gate and up are two: what parts their
product again costs more than it gains, 3 % of a step of 64 sequences or of a prompt. Tokens of all
sequences lie one after another on the first axis; only the attention op knows where one starts.
What follows the last attention is computed for the rows to sample only: nothing else reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Node, PartialShape, Type
from openvino.op import _PagedAttentionExtension

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.model.architecture import Architecture, Weight, WeightSource
from kvota.model.levels import LeveledWeight
from kvota.model.paged import KEY_CACHE, VALUE_CACHE, PagedModel
from kvota.model.precision import (
    format_of,
    input_group,
    int8_group,
    turned_block,
    vocabulary_format,
)
from kvota.model.rope import Rotation, rotation
from kvota.model.sinks import encode_steered
from kvota.model.turned import EMBEDDING, HEAD, LAST_NORM, VALUES, TurnedSource
from kvota.model.weights import (
    Matrix,
    WeightFormat,
    encode,
    encode_levels,
    matrix_node,
    product,
    stacked,
)


def build_graph(
    source: WeightSource, weight_format: WeightFormat, *, context_len: int | None = None
) -> PagedModel:
    """The paged graph of `source`, matrices stored as `weight_format`.

    `context_len` is the longest context that will be served; it matters only to rotary rules that
    depend on the length. Reads one weight at a time. Raises ModelError for a missing or misshapen
    weight and UnsupportedModel for arithmetic that kvota does not have.
    """
    block = turned_block(weight_format, source)
    if block is not None:
        source = TurnedSource(source, block)
    return _GraphBuilder(source, weight_format, context_len).build()


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """The graph's inputs, and what all layers compute from them alike."""

    parameters: Mapping[str, Node]
    cos: Node
    sin: Node

    def __getitem__(self, name: str) -> Node:
        return self.parameters[name]


class _Weights:
    """Reads weights of a source by name, checks shapes, and turns them into nodes."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def _find(self, name: str, shape: tuple[int, ...]) -> Weight:
        weight = self._source.weights.get(name)
        if weight is None:
            raise ModelError(f"{self._source.origin}: the weight {name} is missing")
        if weight.shape != shape:
            raise ModelError(
                f"{self._source.origin}: {name} has shape {weight.shape}, expected {shape}"
            )
        return weight

    def vector(self, names: Mapping[str, int]) -> Node:
        """The f32 vectors of these names and lengths, joined, as a constant [1, n]."""
        parts = [self._find(name, (length,)).read() for name, length in names.items()]
        return ops.constant(np.concatenate(parts)[None, :])

    def matrices(self, outputs: Mapping[str, int], num_inputs: int) -> list[Weight]:
        """The matrices of these names and output counts, still in their file."""
        return [self._find(name, (size, num_inputs)) for name, size in outputs.items()]


class _GraphBuilder:
    def __init__(
        self, source: WeightSource, weight_format: WeightFormat, context_len: int | None
    ) -> None:
        self._arch = source.architecture
        self._weights = _Weights(source)
        self._asked = weight_format
        self._turned = source if isinstance(source, TurnedSource) else None
        self._block = None if self._turned is None else self._turned.block
        self._first_inputs = iter(()) if self._turned is None else self._turned.first_inputs()
        self._formats: set[WeightFormat] = set()
        self._rotation = _rotation_of(source, context_len)

    def build(self) -> PagedModel:
        a = self._arch
        step = _step_inputs(self._rotation)
        caches: list[Node] = []
        embedding = self._vocabulary(EMBEDDING)
        hidden = ops.gather(embedding, step["input_ids"], ops.constant(np.int64(0)))
        for layer in range(a.num_layers):
            hidden = self._layer(layer, hidden, step, caches)
        hidden = self._norm(hidden, LAST_NORM)
        if self._turned is not None and a.tied_embeddings:
            hidden = ops.matmul(hidden, ops.constant(self._turned.head_turn()), False, False)
        head = embedding if a.tied_embeddings else self._vocabulary(HEAD)
        logits = ops.matmul(hidden, head, False, True)
        logits.output(0).set_names({"logits"})
        model = ov.Model([ops.result(logits)], [*step.parameters.values(), *caches], a.family)
        return PagedModel(
            model,
            a.num_layers,
            a.vocab_size,
            a.max_position,
            input_group=input_group(self._asked, self._block),
            weights=" and ".join(sorted(self._formats)),
        )

    def _vocabulary(self, name: str) -> Node:
        a = self._arch
        [weight] = self._weights.matrices({name: a.vocab_size}, a.hidden_size)
        return matrix_node(self._read(weight, vocabulary_format(self._asked)))

    def _read(self, weight: Weight, weight_format: WeightFormat) -> Matrix:
        """The matrix in this format: in int4 as the file has it, where it has 16 levels there."""
        is_kept = weight_format is WeightFormat.INT4
        if is_kept and isinstance(weight, LeveledWeight) and weight.has_levels:
            return encode_levels(weight.read_levels())
        group = int8_group(self._block)
        is_steered = self._turned is not None and weight_format is WeightFormat.INT8
        if is_steered and weight.name.endswith(VALUES):
            return encode_steered(weight.read(), group, next(self._first_inputs))
        return encode(weight.read(), weight_format, group)

    def _layer(self, layer: int, hidden: Node, step: _StepInputs, caches: list[Node]) -> Node:
        prefix = f"model.layers.{layer}."
        normed = self._norm(hidden, f"{prefix}input_layernorm.weight")
        attended = self._attention(layer, normed, step, caches)
        if layer == self._arch.num_layers - 1:
            hidden, attended = (_sampled_rows(x, step) for x in (hidden, attended))
        hidden = ops.add(hidden, self._attention_output(f"{prefix}self_attn.", attended))
        normed = self._norm(hidden, f"{prefix}post_attention_layernorm.weight")
        return ops.add(hidden, self._mlp(f"{prefix}mlp.", normed))

    def _norm(self, x: Node, name: str) -> Node:
        gain = self._weights.vector({name: self._arch.hidden_size})
        return _rms_norm(x, gain, self._arch.rms_epsilon)

    def _mlp(self, prefix: str, x: Node) -> Node:
        a = self._arch
        gate, up = (
            self._linear({f"{prefix}{name}": a.mlp_size}, a.hidden_size, a.mlp_bias, x)
            for name in ("gate_proj", "up_proj")
        )
        gated = ops.multiply(ops.swish(gate), up)
        return self._linear({f"{prefix}down_proj": a.hidden_size}, a.mlp_size, a.mlp_bias, gated)

    def _linear(self, sizes: Mapping[str, int], num_inputs: int, has_bias: bool, x: Node) -> Node:
        """One product for all of `sizes` (names without suffix to output counts)."""
        outputs = {f"{name}.weight": size for name, size in sizes.items()}
        parts = self._weights.matrices(outputs, num_inputs)
        weight_format = format_of(self._asked, parts)
        self._formats.add(weight_format)
        y = product(x, stacked([self._read(part, weight_format) for part in parts]))
        if not has_bias:
            return y
        biases = {f"{name}.bias": size for name, size in sizes.items()}
        return ops.add(y, self._weights.vector(biases))

    def _attention(self, layer: int, x: Node, step: _StepInputs, caches: list[Node]) -> Node:
        a = self._arch
        prefix = f"model.layers.{layer}.self_attn."
        kv_size = a.num_kv_heads * a.head_size
        q_size = a.num_heads * a.head_size
        sizes = {f"{prefix}q_proj": q_size, f"{prefix}k_proj": kv_size, f"{prefix}v_proj": kv_size}
        qkv = self._linear(sizes, a.hidden_size, a.qkv_bias, x)
        q, k, v = _split(qkv, -1, sizes.values())
        turns = a.rope_layers is None or a.rope_layers[layer]
        q = self._placed(q, f"{prefix}q_norm.weight", a.num_heads, step, turns)
        k = self._placed(k, f"{prefix}k_norm.weight", a.num_kv_heads, step, turns)
        cache = _cache_parameters(layer)
        caches.extend(cache)
        return _paged_attention(a, self._window(layer), (q, k, v, *cache), step)

    def _attention_output(self, prefix: str, attended: Node) -> Node:
        a = self._arch
        q_size = a.num_heads * a.head_size
        return self._linear({f"{prefix}o_proj": a.hidden_size}, q_size, a.output_bias, attended)

    def _placed(
        self, x: Node, norm_name: str, num_heads: int, step: _StepInputs, turns: bool
    ) -> Node:
        """Each head of x [T, heads · size] normalized and rotated, where the family does."""
        a = self._arch
        if not turns and not a.qk_norm:
            return x
        heads = _reshape(x, (-1, num_heads, 1, a.head_size))
        if a.qk_norm:
            gain = self._weights.vector({norm_name: a.head_size})
            heads = _rms_norm(heads, gain, a.rms_epsilon)
        if turns:
            heads = _rotate(heads, step.cos, step.sin, self._rotation.rotary_dim)
        return _reshape(heads, (-1, num_heads * a.head_size))

    def _window(self, layer: int) -> int:
        a = self._arch
        if a.sliding_window is None:
            return 0
        slides = a.sliding_layers is None or a.sliding_layers[layer]
        return a.sliding_window if slides else 0


def _rotation_of(source: WeightSource, context_len: int | None) -> Rotation:
    a = source.architecture
    try:
        return rotation(a.rope, a.head_size, context_len or a.max_position)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{source.origin}: {error.message}.") from error


def _parameter(name: str, element: Type, shape: list[int]) -> Node:
    node = ops.parameter(PartialShape(shape), element, name)
    node.output(0).set_names({name})
    return node


def _step_inputs(turn: Rotation) -> _StepInputs:
    parameters = {
        "input_ids": _parameter("input_ids", Type.i64, [-1]),
        "position_ids": _parameter("position_ids", Type.i64, [-1]),
        "past_lens": _parameter("past_lens", Type.i32, [-1]),
        "subsequence_begins": _parameter("subsequence_begins", Type.i32, [-1]),
        "block_indices": _parameter("block_indices", Type.i32, [-1]),
        "block_indices_begins": _parameter("block_indices_begins", Type.i32, [-1]),
        "max_context_len": _parameter("max_context_len", Type.i32, []),
        "sampled_tokens_indices": _parameter("sampled_tokens_indices", Type.i64, [-1]),
    }
    positions = _reshape(ops.convert(parameters["position_ids"], Type.f32), (-1, 1, 1, 1))
    frequencies = np.tile(turn.frequencies, 2).reshape(1, 1, 1, -1)
    angles = ops.multiply(positions, ops.constant(frequencies))
    scale = ops.constant(np.float32(turn.scale))
    cos, sin = ops.cos(angles), ops.sin(angles)
    if turn.scale != 1.0:
        cos, sin = ops.multiply(cos, scale), ops.multiply(sin, scale)
    return _StepInputs(parameters, cos, sin)


def _cache_parameters(layer: int) -> tuple[Node, Node]:
    """KV inputs whose type and shape the plugin fills in when it compiles."""
    shape = [-1, -1, -1, -1]
    return (
        _parameter(f"{KEY_CACHE}{layer}", Type.dynamic, shape),
        _parameter(f"{VALUE_CACHE}{layer}", Type.dynamic, shape),
    )


def _paged_attention(
    a: Architecture, window: int, operands: tuple[Node, ...], step: _StepInputs
) -> Node:
    """The plugin's op: writes k and v into the cache, attends, yields [T, heads · size]."""
    paging = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
    head = [
        *operands,
        *(step[name] for name in paging),
        ops.constant(np.float32(a.head_size**-0.5)),
        ops.constant(np.int32(window)),
        _empty(Type.f32),  # alibi slopes
        step["max_context_len"],
    ]
    op = _PagedAttentionExtension([_output(x) for x in [*head, *_unused_features()]])
    counts = {
        "num_k_heads": a.num_kv_heads,
        "k_head_size": a.head_size,
        "num_v_heads": a.num_kv_heads,
        "v_head_size": a.head_size,
    }
    for name, count in counts.items():
        op.get_rt_info()[name] = count
    return op.output(0)


def _sampled_rows(x: Node, step: _StepInputs) -> Node:
    """The rows of x [T, …] that logits are asked for."""
    return ops.gather(x, step["sampled_tokens_indices"], ops.constant(np.int64(0)))


def _unused_features() -> list[Node]:
    """Inputs 13 to 27 of the op, switched off as OpenVINO's own transformation leaves them."""
    zero = ops.constant(np.int32(0))
    integers, floats = _empty(Type.i32), _empty(Type.f32)
    score_and_rotation = [integers, integers, integers, floats]
    sparse_attention = [floats, zero, zero]
    sinks = [ops.constant(np.zeros((0, 0, 0, 0), np.float32))]
    eviction = [zero, integers, integers, integers]
    token_types_and_bias = [integers, _empty(Type.u8), integers]
    return [*score_and_rotation, *sparse_attention, *sinks, *eviction, *token_types_and_bias]


def _output(x: Node | ov.Output) -> ov.Output:
    return x if isinstance(x, ov.Output) else x.output(0)


def _empty(element: Type) -> Node:
    return ops.constant(np.zeros(0, element.to_dtype()))


def _rms_norm(x: Node, gain: Node, epsilon: float) -> Node:
    """Written in the form that the plugin fuses into one kernel."""
    square = ops.power(x, ops.constant(np.float32(2.0)))
    mean = ops.reduce_mean(square, ops.constant(np.array([-1], np.int64)), True)
    root = ops.sqrt(ops.add(mean, ops.constant(np.float32(epsilon))))
    return ops.multiply(ops.multiply(ops.divide(ops.constant(np.float32(1.0)), root), x), gain)


def _rotate(x: Node, cos: Node, sin: Node, rotary_dim: int) -> Node:
    """x · cos + rotate_half(x) · sin on the first `rotary_dim` of the last axis of x [T, H, 1, S].

    Split on axis 3 by its number and negated by a product: the form that becomes one kernel.
    """
    size = _output(x).get_partial_shape()[3].get_length()
    rest = size - rotary_dim
    turning, *still = _split(x, 3, [rotary_dim, rest]) if rest else [x]
    first, second = _split(turning, 3, [rotary_dim // 2] * 2)
    minus = ops.multiply(second, ops.constant(np.float32(-1.0)))
    swapped = ops.concat([minus, first], -1)
    turned = ops.add(ops.multiply(turning, cos), ops.multiply(swapped, sin))
    return ops.concat([turned, *still], -1) if rest else turned


def _split(x: Node, axis: int, sizes: object) -> list[Node]:
    lengths = np.array(list(sizes), np.int64)  # type: ignore[call-overload]
    parts = ops.variadic_split(x, ops.constant(np.int64(axis)), ops.constant(lengths))
    return list(parts.outputs())


def _reshape(x: Node, shape: tuple[int, ...]) -> Node:
    return ops.reshape(x, ops.constant(np.array(shape, np.int64)), False)
