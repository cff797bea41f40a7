"""Where the memory of one device goes: weights, activations, the engine, and what is left for KV.

GPU, as vLLM accounts for it (`kvota.sizing.vllm` holds that arithmetic, and the flags use it too):

    utilization × device − weights − activations − outside torch = KV
    activations    the profiling step: max_num_batched_tokens rows of the hidden state four times
                   and of the MLP's three inner rows, in 16 bits; and max_num_seqs rows of logits
                   with the sampler's sorted copies and indices, 18 bytes a vocabulary entry
    graphs         20 MiB a layer on one device, 38 MiB over several

The last two are fitted to two published start-up logs (Qwen2.5-7B-AWQ on 16 GB: 1.04 GiB and
0.48 GiB; Qwen3-235B-FP8 on 4 × L40S: 1.4 GiB and 3.45 GiB): estimates, unlike weights and KV.

CPU, as kvota's own engine holds weights (OpenVINO 2026.4.1, AVX-512): the plugin keeps the encoded
matrix and packs it again for its kernels. Of resident memory:

    weights        bytes a parameter times parameters, by storage and by what a matrix is for
    each layer     1 MB: its nodes and kernels; in int4, with twice the products, 2.2 MB
    fixed          48 MB, and 1,000 bytes a vocabulary entry: tokenizer and grammar

Fitted to loads of Llamas of 2 to 30 layers, hidden sizes 512 to 2048 and MLPs of 1536 to 8192 in
f32, int8 and int4 (six of them), and of SmolLM2-135M with its own vocabulary in these and f16. All
are met within 5 %.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvota.core.errors import ConfigError
from kvota.kv.layout import CacheType
from kvota.sizing.vllm import VllmBill
from kvota.tools.plan.hardware import Hardware
from kvota.tools.plan.matrices import Matrix, Role
from kvota.tools.plan.methods import Method
from kvota.tools.plan.shape import ModelShape

_MIB: Final = 2**20
_OUTSIDE_TORCH: Final = 60 * _MIB
_OUTSIDE_TORCH_PARALLEL: Final = 215 * _MIB  # with NCCL's buffers
_GRAPH_PER_LAYER: Final = 20 * _MIB
_GRAPH_PER_LAYER_PARALLEL: Final = 38 * _MIB
_SAMPLER_BYTES: Final = 18

_HELD_FIXED: Final = 48 * 10**6
_HELD_PER_LAYER: Final = 10**6
_HELD_PER_TOKEN: Final = 1000


@dataclass(frozen=True, slots=True)
class _Held:
    """Resident bytes a parameter. `head`: tied or not; `embedding`: one beside the head."""

    layer: float
    head: float
    embedding: float
    beside_layer: int = _HELD_PER_LAYER  # bytes, whatever the size of its matrices


_HELD: Final[Mapping[str, _Held]] = MappingProxyType(
    {
        "f32": _Held(8.0, 8.48, 4.03),
        "f16": _Held(10.02, 10.55, 2.0),
        "int8": _Held(2.28, 2.45, 1.13),
        "int4": _Held(1.455, 2.85, 1.15, beside_layer=22 * 10**5),
    }
)
# Of `kvota node` without a model. A gateway's child is 30 MB smaller: it knows no other commands.
PROCESS_BYTES: Final = 132 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How large a step of the engine may be."""

    max_num_batched_tokens: int
    max_num_seqs: int


def stored_bytes(matrices: tuple[Matrix, ...], method: Method) -> int:
    """Of the whole model, as in its file."""
    is_tied = _is_tied(matrices)
    return round(sum(method.num_bytes(matrix, is_tied=is_tied) for matrix in matrices))


def device_weights(
    shape: ModelShape, matrices: tuple[Matrix, ...], method: Method, tensor_parallel: int
) -> int:
    """Of each device, with what every one of them repeats."""
    is_tied = _is_tied(matrices)
    held = (
        method.num_bytes(matrix, is_tied=is_tied)
        * matrix.share_held(tensor_parallel, shape.num_kv_heads)
        for matrix in matrices
    )
    return round(sum(held))


def resident_weights(shape: ModelShape, matrices: tuple[Matrix, ...], method: Method) -> int:
    """What kvota's own engine holds once a model is loaded, beyond the empty process."""
    rates = _HELD[method.name]
    held = float(_HELD_FIXED + rates.beside_layer * shape.num_layers)
    held += _HELD_PER_TOKEN * shape.vocab_size
    for matrix in matrices:
        if matrix.role is Role.HEAD:
            held += rates.head * matrix.num_multiplied_at_most
        elif matrix.role is Role.EMBEDDING:
            held += 0 if shape.tied_embeddings else rates.embedding * matrix.num_params
        else:
            held += rates.layer * matrix.num_params
    return round(held)


def check_parallel(shape: ModelShape, tensor_parallel: int) -> None:
    """Raises ConfigError when the heads cannot be spread over so many devices."""
    if tensor_parallel < 1 or shape.num_heads % tensor_parallel:
        raise ConfigError(
            f"{shape.num_heads} attention heads cannot be spread over {tensor_parallel} devices; "
            "tensor parallel must divide the number of heads."
        )
    shape.kv_layout(tensor_parallel=tensor_parallel)


def vllm_bill(
    shape: ModelShape,
    hardware: Hardware,
    *,
    weight_bytes: int,
    limits: StepLimits,
    cache_type: CacheType,
    tensor_parallel: int,
    longest_tokens: int,
) -> VllmBill:
    """What vLLM will count on each device. KV of windowed layers at `longest_tokens` each."""
    is_parallel = tensor_parallel > 1
    graph = _GRAPH_PER_LAYER_PARALLEL if is_parallel else _GRAPH_PER_LAYER
    layout = shape.kv_layout(cache_type, tensor_parallel=tensor_parallel)
    return VllmBill(
        device_bytes=hardware.memory_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes(shape, limits, tensor_parallel),
        outside_torch_bytes=_OUTSIDE_TORCH_PARALLEL if is_parallel else _OUTSIDE_TORCH,
        graph_bytes=graph * shape.num_layers,
        kv_bytes_per_token=-(-layout.bytes_of(longest_tokens) // longest_tokens),
    )


def activation_bytes(shape: ModelShape, limits: StepLimits, tensor_parallel: int) -> int:
    inner = shape.mlp_size
    if shape.experts is not None:
        inner = max(shape.experts.num_active * shape.experts.size, shape.experts.shared_size)
    row = 4 * shape.hidden_size + 3 * inner // tensor_parallel
    logits = limits.max_num_seqs * shape.vocab_size * _SAMPLER_BYTES
    return 2 * limits.max_num_batched_tokens * row + logits


def _is_tied(matrices: tuple[Matrix, ...]) -> bool:
    return any(matrix.is_tied for matrix in matrices)
