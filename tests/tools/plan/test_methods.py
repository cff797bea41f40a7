"""Sizes of weights against published files."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import ConfigError
from kvota.tools.plan.catalogue import known_device, known_model, models
from kvota.tools.plan.footprint import device_weights, stored_bytes
from kvota.tools.plan.matrices import Matrix, Role, matrices_of
from kvota.tools.plan.methods import (
    CPU_METHODS,
    GPU_METHODS,
    Storage,
    methods_on,
    named_method,
)

GB = 10**9


def size_of(model: str, method: str) -> int:
    return stored_bytes(matrices_of(known_model(model)), GPU_METHODS[method])


@pytest.mark.parametrize(
    ("model", "method", "gigabytes"),
    [
        ("llama-3-8b", "bf16", 16.06),  # model.safetensors.index.json: 16,060,522,496
        ("llama-2-7b", "fp16", 13.48),  # the same: 13,476,839,424
        ("llama-3.1-8b", "fp8", 9.09),  # neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8
        ("llama-2-7b", "gptq", 3.90),  # TheBloke/Llama-2-7B-GPTQ, main
        ("qwen2.5-7b", "awq", 5.57),  # Qwen/Qwen2.5-7B-Instruct-AWQ
    ],
)
def test_a_checkpoint_is_as_large_as_the_published_one(
    model: str, method: str, gigabytes: float
) -> None:
    assert size_of(model, method) / GB == pytest.approx(gigabytes, rel=0.005)


# llama.cpp, tools/quantize/README.md: GiB of Llama 3.1 8B.
@pytest.mark.parametrize(
    ("method", "gibibytes"),
    [("q8_0", 7.95), ("q6_k", 6.14), ("q5_k_m", 5.33), ("q4_k_m", 4.58)],
)
def test_a_gguf_file_is_as_large_as_llama_cpp_says(method: str, gibibytes: float) -> None:
    assert size_of("llama-3.1-8b", method) / 2**30 == pytest.approx(gibibytes, abs=0.005)


@pytest.mark.parametrize(("model", "gigabytes"), [("llama-3.1-70b", 43.1), ("llama-3.1-405b", 249)])
def test_larger_ones_too(model: str, gigabytes: float) -> None:
    """The README's other table; llama.cpp stores a few more of their matrices in 5 bits."""
    assert size_of(model, "q4_k_m") / GB == pytest.approx(gigabytes, rel=0.03)


def test_groups_add_a_scale_and_a_zero_point_each() -> None:
    matrix = Matrix(name="x", role=Role.LAYER, num_outputs=10, num_inputs=300)
    bits = 10 * 300 * 4 + 10 * 3 * 20  # 300 inputs are two whole groups of 128 and a part
    assert Storage(4, group=128, group_bits=20).num_bytes(matrix) == bits / 8
    assert Storage(8, output_bits=32).num_bytes(matrix) == 10 * 300 + 10 * 4


def test_kvota_keeps_8_and_a_sixth_bits_a_number() -> None:
    shape = known_model("smollm2-135m")
    small = 61 * 576  # norms, in f32
    expected = (134_515_008 - small) * (8 + 1 / 6) / 8 + small * 4
    assert stored_bytes(matrices_of(shape), CPU_METHODS["int8"]) == pytest.approx(expected)


@settings(deadline=None)
@given(st.sampled_from(sorted(models())), st.sampled_from([1, 2, 4, 8]))
def test_devices_together_hold_the_model_at_least_once(model: str, devices: int) -> None:
    shape = known_model(model)
    matrices = matrices_of(shape)
    whole = stored_bytes(matrices, GPU_METHODS["bf16"])
    each = device_weights(shape, matrices, GPU_METHODS["bf16"], devices)
    assert whole <= devices * each + devices
    assert each <= whole


def test_a_kv_head_is_repeated_where_there_are_more_devices() -> None:
    shape = known_model("qwen2.5-7b")  # 4 KV heads
    matrices = [matrix for matrix in matrices_of(shape) if matrix.name == "attn_k"]
    assert [matrices[0].share_held(devices, 4) for devices in (1, 2, 4, 8)] == [1, 0.5, 0.25, 0.25]


def test_a_device_is_offered_only_what_it_can() -> None:
    offered = {
        name: [method.name for method in methods_on(known_device(name))]
        for name in ("t4", "a100-80", "h100-sxm")
    }
    assert offered == {
        "t4": ["fp16", "int8", "awq", "gptq"],
        "a100-80": ["bf16", "int8", "awq", "gptq"],
        "h100-sxm": ["bf16", "fp8", "int8", "awq", "gptq"],
    }


def test_what_a_device_cannot_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="NVIDIA A100 SXM 80 GB has no fp8 arithmetic"):
        named_method("fp8", known_device("a100-80"))
    with pytest.raises(ConfigError, match="'fp4'; use one of bf16"):
        named_method("fp4", known_device("b200"))
