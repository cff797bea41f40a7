"""Every weight matrix of a model: how large, how often, and how devices share it.

The parameter count of a published model is their sum, exactly; that is how the shapes here, and
the configs of the catalogue, are tested.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from kvota.tools.plan.shape import Experts, Latent, ModelShape


class Role(Enum):
    """What a matrix is for, which decides how a quantization method stores it."""

    EMBEDDING = auto()  # looked up: a row a token
    HEAD = auto()  # multiplied once for every token that is sampled
    LAYER = auto()
    ROUTER = auto()  # chooses experts; never quantized
    SMALL = auto()  # norms and biases; never quantized


class Split(Enum):
    """How tensor parallelism divides a matrix."""

    EVEN = auto()
    KV_HEADS = auto()  # by KV head, which are repeated where there are more devices than heads
    WHOLE = auto()  # every device holds all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """`count` matrices [num_outputs, num_inputs] of one kind.

    Of `num_experts` equal ones a token takes `num_active`; `count` counts all of them.
    """

    name: str  # as GGUF names it: "attn_q", "ffn_down"…
    role: Role
    num_outputs: int
    num_inputs: int
    count: int = 1
    split: Split = Split.EVEN
    num_experts: int = 1
    num_active: int = 1
    is_tied: bool = False  # the same numbers as another one: multiplied, stored there

    @property
    def num_params(self) -> int:
        """Numbers stored."""
        return 0 if self.is_tied else self.num_multiplied_at_most

    @property
    def num_multiplied_at_most(self) -> int:
        return self.num_outputs * self.num_inputs * self.count

    @property
    def num_active_params(self) -> float:
        """Numbers that one token is multiplied with."""
        return self.num_multiplied_at_most * self.num_active / self.num_experts

    def share_read(self, num_tokens: float) -> float:
        """The part of it that a step of so many tokens reads: all, or the experts that any token
        takes, 1 − (1 − active/experts)^tokens of them when tokens choose independently."""
        return float(1.0 - (1.0 - self.num_active / self.num_experts) ** max(num_tokens, 0.0))

    def share_held(self, devices: int, num_kv_heads: int) -> float:
        """The part of it on each of `devices`."""
        if self.split is Split.WHOLE:
            return 1.0
        if self.split is Split.KV_HEADS:
            return -(-num_kv_heads // devices) / num_kv_heads
        return 1.0 / devices


def matrices_of(shape: ModelShape) -> tuple[Matrix, ...]:
    return tuple(_matrices(shape))


def num_params(matrices: tuple[Matrix, ...]) -> int:
    return sum(matrix.num_params for matrix in matrices)


def num_active_params(matrices: tuple[Matrix, ...]) -> float:
    """As model cards count "active parameters": with the embedding and the head."""
    return sum(
        matrix.num_params if matrix.role is Role.EMBEDDING else matrix.num_active_params
        for matrix in matrices
        if not matrix.is_tied
    )


def _matrices(shape: ModelShape) -> Iterator[Matrix]:
    hidden, vocab = shape.hidden_size, shape.vocab_size
    yield Matrix(name="token_embd", role=Role.EMBEDDING, num_outputs=vocab, num_inputs=hidden)
    yield Matrix(
        name="output",
        role=Role.HEAD,
        num_outputs=vocab,
        num_inputs=hidden,
        is_tied=shape.tied_embeddings,
    )
    if shape.latent is not None:
        yield from _latent_attention(shape, shape.latent)
    else:
        yield from _head_attention(shape)
    num_dense = shape.num_layers if shape.experts is None else shape.experts.num_dense_layers
    if num_dense:
        yield from _mlp(hidden, shape.mlp_size, num_dense, "")
    if shape.experts is not None and shape.num_layers > num_dense:
        yield from _experts(hidden, shape.experts, shape.num_layers - num_dense)
    yield Matrix(
        name="norms",
        role=Role.SMALL,
        num_outputs=1,
        num_inputs=_num_small(shape),
        split=Split.WHOLE,
    )


def _layers(name: str, outputs: int, inputs: int, count: int, split: Split = Split.EVEN) -> Matrix:
    return Matrix(
        name=name,
        role=Role.LAYER,
        num_outputs=outputs,
        num_inputs=inputs,
        count=count,
        split=split,
    )


def _head_attention(shape: ModelShape) -> Iterator[Matrix]:
    hidden, layers = shape.hidden_size, shape.num_layers
    width = shape.num_heads * shape.head_size
    kv_width = shape.num_kv_heads * shape.head_size
    yield _layers("attn_q", width, hidden, layers)
    yield _layers("attn_k", kv_width, hidden, layers, Split.KV_HEADS)
    yield _layers("attn_v", kv_width, hidden, layers, Split.KV_HEADS)
    yield _layers("attn_output", hidden, width, layers)


def _latent_attention(shape: ModelShape, latent: Latent) -> Iterator[Matrix]:
    hidden, layers, heads = shape.hidden_size, shape.num_layers, shape.num_heads
    query_width = heads * (latent.nope_size + latent.rope_size)
    if latent.query_rank is None:
        yield _layers("attn_q", query_width, hidden, layers)
    else:
        yield _layers("attn_q_a", latent.query_rank, hidden, layers, Split.WHOLE)
        yield _layers("attn_q_b", query_width, latent.query_rank, layers)
    kv_width = latent.kv_rank + latent.rope_size
    yield _layers("attn_kv_a", kv_width, hidden, layers, Split.WHOLE)
    back_width = heads * (latent.nope_size + latent.value_size)
    yield _layers("attn_kv_b", back_width, latent.kv_rank, layers)
    yield _layers("attn_output", hidden, heads * latent.value_size, layers)


def _mlp(hidden: int, size: int, layers: int, suffix: str) -> Iterator[Matrix]:
    yield _layers(f"ffn_gate{suffix}", size, hidden, layers)
    yield _layers(f"ffn_up{suffix}", size, hidden, layers)
    yield _layers(f"ffn_down{suffix}", hidden, size, layers)


def _experts(hidden: int, experts: Experts, layers: int) -> Iterator[Matrix]:
    yield Matrix(
        name="ffn_gate_inp",
        role=Role.ROUTER,
        num_outputs=experts.num_experts,
        num_inputs=hidden,
        count=layers,
        split=Split.WHOLE,
    )
    sizes = (
        ("ffn_gate_exps", experts.size, hidden),
        ("ffn_up_exps", experts.size, hidden),
        ("ffn_down_exps", hidden, experts.size),
    )
    for name, outputs, inputs in sizes:
        yield Matrix(
            name=name,
            role=Role.LAYER,
            num_outputs=outputs,
            num_inputs=inputs,
            count=layers * experts.num_experts,
            num_experts=experts.num_experts,
            num_active=experts.num_active,
        )
    if experts.shared_size:
        yield from _mlp(hidden, experts.shared_size, layers, "_shexp")


def _num_small(shape: ModelShape) -> int:
    """Norms and biases of the whole model."""
    per_layer = shape.norms_per_layer * shape.hidden_size
    per_layer += _attention_small(shape)
    if shape.mlp_bias:
        per_layer += 2 * shape.mlp_size + shape.hidden_size
    experts = _experts_small(shape.experts, shape.hidden_size) if shape.experts else 0
    num_moe = shape.num_layers - shape.experts.num_dense_layers if shape.experts else 0
    return shape.num_layers * per_layer + num_moe * experts + shape.hidden_size


def _attention_small(shape: ModelShape) -> int:
    if shape.latent is not None:
        return shape.latent.kv_rank + (shape.latent.query_rank or 0)
    width = shape.num_heads * shape.head_size
    small = 2 * shape.head_size if shape.qk_norm else 0
    small += width + 2 * shape.num_kv_heads * shape.head_size if shape.qkv_bias else 0
    small += shape.hidden_size if shape.output_bias else 0
    return small + (shape.num_heads if shape.has_sinks else 0)


def _experts_small(experts: Experts, hidden: int) -> int:
    small = experts.num_experts if experts.has_router_bias else 0
    small += hidden if experts.has_shared_gate else 0
    if experts.has_expert_bias:
        small += experts.num_experts * (2 * experts.size + hidden)
    return small
