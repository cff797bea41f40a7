"""The bill of a GPU against what vLLM has printed at start, as users have published it."""

from dataclasses import replace

import pytest

from kvota.kv.layout import CacheType
from kvota.sizing.vllm import VllmBill, kv_bytes, kv_tokens
from kvota.tools.plan.catalogue import known_device, known_model
from kvota.tools.plan.footprint import (
    StepLimits,
    activation_bytes,
    device_weights,
    resident_weights,
    vllm_bill,
)
from kvota.tools.plan.matrices import matrices_of
from kvota.tools.plan.methods import CPU_METHODS, GPU_METHODS

GIB = 2**30


def bill(model: str, method: str, *, tensor_parallel: int, device: str, tokens: int) -> VllmBill:
    shape = known_model(model)
    weights = device_weights(shape, matrices_of(shape), GPU_METHODS[method], tensor_parallel)
    return vllm_bill(
        shape,
        known_device(device),
        weight_bytes=weights,
        limits=StepLimits(max_num_batched_tokens=tokens, max_num_seqs=256),
        cache_type=CacheType.F16,
        tensor_parallel=tensor_parallel,
        longest_tokens=32_768,
    )


def test_qwen_7b_awq_on_16_gb_leaves_the_kv_that_vllm_printed() -> None:
    """15.99 GiB at 0.9: weights 5.29, activations 1.04, KV 8.0 GiB, 149,712 tokens."""
    small = bill("qwen2.5-7b", "awq", tensor_parallel=1, device="t4", tokens=2048)
    assert small.weight_bytes / GIB == pytest.approx(5.29, rel=0.03)
    assert small.activation_bytes / GIB == pytest.approx(1.04, rel=0.15)
    assert small.graph_bytes / GIB == pytest.approx(0.48, rel=0.15)
    on_16_gb = kv_bytes(small, 0.9) + int(0.9 * (15.99 * GIB - small.device_bytes))
    assert on_16_gb / GIB == pytest.approx(8.0, rel=0.05)
    assert kv_tokens(on_16_gb, small.kv_bytes_per_token) == pytest.approx(149_712, rel=0.05)


def test_devices_share_weights_and_inner_rows_but_not_logits() -> None:
    one, four = (
        bill("llama-3.3-70b", "fp8", tensor_parallel=devices, device="h100-sxm", tokens=8192)
        for devices in (1, 4)
    )
    assert four.weight_bytes == pytest.approx(one.weight_bytes / 4, rel=0.01)
    assert one.activation_bytes / 4 < four.activation_bytes < one.activation_bytes
    assert four.kv_bytes_per_token == one.kv_bytes_per_token // 4


def test_larger_steps_take_more_activations() -> None:
    shape = known_model("llama-3.1-8b")
    sizes = [
        activation_bytes(shape, StepLimits(max_num_batched_tokens=tokens, max_num_seqs=seqs), 1)
        for tokens, seqs in ((512, 1), (8192, 1), (8192, 1024))
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3


# Resident memory that `load_model` added to a process, MB.
@pytest.mark.parametrize(
    ("method", "megabytes"), [("f32", 1210), ("f16", 1479), ("int8", 435), ("int4", 398)]
)
def test_the_default_model_is_held_as_was_measured(method: str, megabytes: float) -> None:
    shape = known_model("smollm2-135m")
    held = resident_weights(shape, matrices_of(shape), CPU_METHODS[method])
    assert held / 1e6 == pytest.approx(megabytes, rel=0.02)


@pytest.mark.parametrize(
    ("layers", "hidden", "mlp", "method", "megabytes"),
    [
        (12, 512, 1536, "int8", 152.3),
        (12, 512, 1536, "int4", 135.9),
        (6, 1024, 1536, "int4", 142.3),
        (8, 1024, 4096, "f32", 1133.1),
        (6, 2048, 5632, "int8", 762.4),
        (6, 2048, 5632, "int4", 513.7),
        (12, 768, 4096, "int4", 284.3),
        (4, 2048, 8192, "int4", 454.5),
    ],
)
def test_llamas_of_other_sizes_are_held_as_was_measured(
    layers: int, hidden: int, mlp: int, method: str, megabytes: float
) -> None:
    heads = hidden // 64
    shape = replace(
        known_model("smollm2-135m"),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        mlp_size=mlp,
        vocab_size=320,
    )
    held = resident_weights(shape, matrices_of(shape), CPU_METHODS[method])
    assert held / 1e6 == pytest.approx(megabytes, rel=0.02)
