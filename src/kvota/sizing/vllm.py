"""Flags for `vllm serve`, computed from a memory bill, each with its reason in words.

vLLM's own account of one GPU, as its start-up log states it:

    gpu_memory_utilization × device
      − weights − peak activation − memory outside torch  =  KV memory
    KV memory ÷ (bytes per token × block size)            =  blocks, whole

CUDA graphs are captured beside that, so they and whoever else uses the device set how high the
utilization may be. What is settled here:

1. utilization: as high as others, graphs and a margin allow;
2. cache dtype: fp8 only where the device can, and only if the longest request would not fit
   without it, or fewer than a handful of typical ones;
3. longest request: what was wished, else the model's own limit, cut to what fits;
4. sequences at once: as many typical requests as fit, so that vLLM runs out of neither and whoever
   has no room waits at the desk, where he can be told how long.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvota.core.errors import InsufficientMemory

BLOCK_SIZE: Final = 16  # vLLM's default on NVIDIA GPUs
UTILIZATION_MAX: Final = 0.95
MARGIN: Final = 0.02  # of the device: fragmentation, and libraries that allocate late
TYPICAL_AT_ONCE_MIN: Final = 8  # fewer than this: fp8 is worth it
NUM_SEQS_MAX: Final = 1024
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBill:
    """One GPU's share, after tensor parallelism. Bytes as vLLM measures them."""

    device_bytes: int
    weight_bytes: int
    activation_bytes: int  # peak, at max_num_batched_tokens
    outside_torch_bytes: int = 0  # NCCL, cuBLAS, the context
    graph_bytes: int = 0  # CUDA graphs
    others_bytes: int = 0  # other processes on the device
    kv_bytes_per_token: int  # 2 × layers × KV heads here × head size × 2 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    context_max: int  # the model's own limit
    max_model_len: int | None = None  # None: as long as fits
    typical_tokens: int = 2048  # prompt and output of an ordinary request
    has_fp8: bool = False  # the device and the attention backend can
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    value: str
    reason: str


def vllm_flags(bill: VllmBill, wishes: Wishes) -> Sequence[Flag]:
    """Raises InsufficientMemory, saying which of the numbers would help."""
    share = utilization(bill)
    memory = kv_memory(bill, share)
    wanted = wishes.max_model_len or wishes.context_max
    is_fp8 = wishes.has_fp8 and _needs_fp8(bill, memory, wanted, wishes.typical_tokens)
    tokens = kv_tokens(memory, bill.kv_bytes_per_token // (2 if is_fp8 else 1))
    length = _length(wishes, tokens, memory)
    num_seqs = min(max(tokens // min(wishes.typical_tokens, length), 1), NUM_SEQS_MAX)
    flags = [
        Flag("--gpu-memory-utilization", f"{share:.2f}", why_utilization(bill, memory)),
        Flag("--max-model-len", str(length), _why_length(wishes, length, tokens)),
        Flag("--max-num-seqs", str(num_seqs), _why_num_seqs(wishes, length, tokens)),
        Flag("--kv-cache-dtype", "fp8" if is_fp8 else "auto", _why_dtype(wishes, is_fp8)),
    ]
    if wishes.tensor_parallel > 1:
        reason = f"the model is spread over {wishes.tensor_parallel} GPUs"
        flags.append(Flag("--tensor-parallel-size", str(wishes.tensor_parallel), reason))
    return flags


def arguments(flags: Sequence[Flag]) -> list[str]:
    """As a command line has them."""
    return [part for flag in flags for part in (flag.name, flag.value)]


def kv_tokens(kv_bytes: int, bytes_per_token: int) -> int:
    """In whole blocks."""
    return kv_bytes // (bytes_per_token * BLOCK_SIZE) * BLOCK_SIZE


def kv_bytes(bill: VllmBill, utilization: float) -> int:
    """What vLLM gives to KV under a utilization; may be negative."""
    used = bill.weight_bytes + bill.activation_bytes + bill.outside_torch_bytes
    return int(utilization * bill.device_bytes) - used


def utilization(bill: VllmBill) -> float:
    """The share of the device that vLLM may be given, in whole hundredths."""
    beside = bill.others_bytes + bill.graph_bytes + int(MARGIN * bill.device_bytes)
    return min(math.floor(100 * (1 - beside / bill.device_bytes)) / 100, UTILIZATION_MAX)


def kv_memory(bill: VllmBill, utilization: float) -> int:
    """As `kv_bytes`. Raises InsufficientMemory when nothing is left."""
    memory = kv_bytes(bill, utilization)
    if memory <= 0:
        others = f" and {_gib(bill.others_bytes)} other processes'" if bill.others_bytes else ""
        raise InsufficientMemory(
            f"The model leaves no memory for KV: of {_gib(bill.device_bytes)}, "
            f"{_gib(bill.weight_bytes)} are weights, {_gib(bill.activation_bytes)} activations"
            f"{others}. Use more or larger GPUs, or smaller weights (quantization)"
            f"{', or end the other processes' if others else ''}."
        )
    return memory


def _needs_fp8(bill: VllmBill, memory: int, wanted: int, typical_tokens: int) -> bool:
    tokens = kv_tokens(memory, bill.kv_bytes_per_token)
    return tokens < wanted or tokens < TYPICAL_AT_ONCE_MIN * typical_tokens


def _length(wishes: Wishes, tokens: int, memory: int) -> int:
    wanted = wishes.max_model_len
    if wanted is not None and wanted > wishes.context_max:
        raise InsufficientMemory(
            f"max_model_len is {wanted} and the model reads at most {wishes.context_max} tokens."
        )
    if tokens < BLOCK_SIZE or (wanted is not None and wanted > tokens):
        raise InsufficientMemory(
            f"One request of {wanted or BLOCK_SIZE} tokens does not fit: {_gib(memory)} of KV "
            f"memory hold {tokens}. Lower max_model_len, use more GPUs, or smaller weights"
            + ("." if wishes.has_fp8 else ", or an fp8 cache where the device has one.")
        )
    return wanted or min(wishes.context_max, tokens)


def why_utilization(bill: VllmBill, memory: int) -> str:
    """In words: what stays free, and what is left for KV."""
    beside = f"{_gib(bill.graph_bytes)} of CUDA graphs"
    if bill.others_bytes:
        beside += f", {_gib(bill.others_bytes)} of other processes"
    return (
        f"{beside} and {MARGIN:.0%} of the device stay free; after weights "
        f"({_gib(bill.weight_bytes)}) and activations ({_gib(bill.activation_bytes)}) this leaves "
        f"{_gib(memory)} for KV"
    )


def _why_length(wishes: Wishes, length: int, tokens: int) -> str:
    fits = f"{tokens / length:.1f} such requests fit into {tokens} tokens of KV"
    if wishes.max_model_len is not None:
        return f"as asked; {fits}"
    if length == wishes.context_max:
        return f"the model's own limit; {fits}"
    return f"the model could read {wishes.context_max}, and no more than {tokens} tokens fit"


def _why_num_seqs(wishes: Wishes, length: int, tokens: int) -> str:
    each = min(wishes.typical_tokens, length)
    fit = f"{tokens} tokens of KV hold {max(tokens // each, 1)} requests of {each} tokens"
    return f"{fit}; more would only preempt each other"


def _why_dtype(wishes: Wishes, is_fp8: bool) -> str:
    if is_fp8:
        return "in 16 bits too little would fit; fp8 halves the bytes of a token"
    return "16 bits fit" if wishes.has_fp8 else "the device has no fp8 cache"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
