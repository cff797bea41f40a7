"""A BERT encoder as an OpenVINO graph: token ids of many texts in, one vector for each out.

    ids [B, T] ─▶ embeddings ─▶ layer × N ─▶ pooling over mask ─▶ unit length ─▶ vectors [B, H]

Devlin et al. 2018, arXiv:1810.04805; pooling as sentence-transformers does it (Reimers and
Gurevych 2019, arXiv:1908.10084).
"""

import numpy as np
import openvino as ov
import openvino.opset13 as op
from openvino import Node

from kvota.model.encoder_source import (
    POSITIONS,
    WORDS,
    Array,
    EncoderShape,
    EncoderSource,
    Pooling,
)

IDS, MASK = "input_ids", "attention_mask"
_MASKED = -1e9  # added to a score before the softmax


def build_encoder(source: EncoderSource) -> ov.Model:
    """Inputs: `input_ids` [B, T] i32 and `attention_mask` [B, T] f32, 1 where there is a token."""
    shape = source.shape
    ids = op.parameter([-1, -1], np.int32, IDS)
    mask = op.parameter([-1, -1], np.float32, MASK)
    ids.output(0).set_names({IDS})
    mask.output(0).set_names({MASK})
    hidden = _embeddings(source, ids)
    # [B, 1, 1, T]: every query of every head sees the same keys.
    masked = op.multiply(op.subtract(_constant(1.0), mask), _constant(_MASKED))
    bias = op.unsqueeze(masked, op.constant([1, 2], np.int64))
    for number in range(shape.num_layers):
        hidden = _layer(source, f"encoder.layer.{number}", hidden, bias)
    vectors = _pool(shape, hidden, mask)
    if shape.is_normalized:
        vectors = op.normalize_l2(vectors, op.constant([1], np.int64), 1e-12, "max")
    return ov.Model([vectors], [ids, mask], "encoder")


def _embeddings(source: EncoderSource, ids: Node) -> Node:
    shape, size = source.shape, source.shape.hidden_size
    words = source.read(WORDS, source.rows_of(WORDS), size)
    positions = source.read(POSITIONS, source.rows_of(POSITIONS), size)
    kinds = "embeddings.token_type_embeddings.weight"
    first_kind = source.read(kinds, source.rows_of(kinds), size)[0]
    axis = op.constant(0, np.int64)
    length = op.gather(op.shape_of(ids, "i32"), op.constant(1, np.int32), axis)
    places = op.range(op.constant(0, np.int32), length, op.constant(1, np.int32), "i32")
    found = op.add(op.gather(_constant(words), ids, axis), _constant(first_kind))
    placed = op.add(found, op.gather(_constant(positions), places, axis))
    return _layer_norm(source, "embeddings.LayerNorm", placed, shape)


def _layer(source: EncoderSource, name: str, hidden: Node, bias: Node) -> Node:
    shape = source.shape
    size, inner = shape.hidden_size, shape.intermediate_size
    seen = _attention(source, f"{name}.attention.self", hidden, bias)
    seen = _linear(source, f"{name}.attention.output.dense", seen, size, size)
    hidden = op.add(hidden, seen)
    hidden = _layer_norm(source, f"{name}.attention.output.LayerNorm", hidden, shape)
    wide = _linear(source, f"{name}.intermediate.dense", hidden, size, inner)
    narrow = _linear(source, f"{name}.output.dense", _activated(shape, wide), inner, size)
    return _layer_norm(source, f"{name}.output.LayerNorm", op.add(hidden, narrow), shape)


def _attention(source: EncoderSource, name: str, hidden: Node, bias: Node) -> Node:
    shape = source.shape
    size = shape.hidden_size
    split = op.constant([0, 0, shape.num_heads, shape.head_size], np.int64)
    order = op.constant([0, 2, 1, 3], np.int64)
    query, key, value = (
        op.transpose(
            op.reshape(_linear(source, f"{name}.{part}", hidden, size, size), split, True), order
        )
        for part in ("query", "key", "value")
    )
    seen = op.scaled_dot_product_attention(query, key, value, bias)
    joined = op.constant([0, 0, size], np.int64)
    return op.reshape(op.transpose(seen, order), joined, True)


def _activated(shape: EncoderShape, wide: Node) -> Node:
    if shape.activation == "relu":
        return op.relu(wide)
    return op.gelu(wide, "erf" if shape.activation == "gelu" else "tanh")


def _pool(shape: EncoderShape, hidden: Node, mask: Node) -> Node:
    """[B, T, H] to [B, H]."""
    if shape.pooling is Pooling.CLS:
        return op.gather(hidden, op.constant(0, np.int64), op.constant(1, np.int64))
    axis = op.constant([1], np.int64)
    weighted = op.multiply(hidden, op.unsqueeze(mask, op.constant([2], np.int64)))
    return op.divide(op.reduce_sum(weighted, axis), op.reduce_sum(mask, axis, True))


def _linear(source: EncoderSource, name: str, hidden: Node, num_in: int, num_out: int) -> Node:
    weight = source.read(f"{name}.weight", num_out, num_in)
    bias = source.read(f"{name}.bias", num_out)
    return op.add(op.matmul(hidden, _constant(weight), False, True), _constant(bias))


def _layer_norm(source: EncoderSource, name: str, hidden: Node, shape: EncoderShape) -> Node:
    axis = op.constant([-1], np.int64)
    level = op.mvn(hidden, axis, True, shape.layer_norm_eps, "inside_sqrt")
    scaled = op.multiply(level, _constant(source.read(f"{name}.weight", shape.hidden_size)))
    return op.add(scaled, _constant(source.read(f"{name}.bias", shape.hidden_size)))


def _constant(value: Array | float) -> Node:
    return op.constant(np.asarray(value, np.float32))
