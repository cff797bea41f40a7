"""The shipped tables: every model's sizes add up to its published parameter count."""

import pytest

from kvota.core.errors import ConfigError
from kvota.tools.plan.catalogue import devices, known_device, known_model, models
from kvota.tools.plan.hardware import Arithmetic
from kvota.tools.plan.matrices import matrices_of, num_active_params, num_params

GIB = 2**30


@pytest.mark.parametrize("name", models())
def test_the_matrices_of_a_model_add_up_to_its_published_parameters(name: str) -> None:
    assert num_params(matrices_of(known_model(name))) == models()[name].parameters


# As the model cards state them.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39.1),
        ("qwen3-30b-a3b", 3.35),
        ("qwen3-235b-a22b", 22.2),
        ("deepseek-v2", 21.4),
        ("deepseek-v3", 37.6),
    ],
)
def test_active_parameters_are_those_of_the_model_card(name: str, billions: float) -> None:
    active = num_active_params(matrices_of(known_model(name))) / 1e9
    assert active == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-2-7b", 512 * 1024),
        ("llama-3-8b", 128 * 1024),
        ("mistral-7b-v0.3", 128 * 1024),
        ("llama-3-70b", 320 * 1024),
        ("deepseek-v2-lite", 31_104),
        ("deepseek-v3", 576 * 2 * 61),
        ("smollm2-135m", 23_040),
    ],
)
def test_kv_of_a_token_is_the_published_figure(name: str, bytes_per_token: int) -> None:
    assert known_model(name).kv_layout().bytes_per_token == bytes_per_token


# K and V of 2 bytes, in each layer of every KV head: layers, KV heads and head size as the model
# cards and papers state them. Of latent attention one row of 512 + 64.
@pytest.mark.parametrize(
    ("name", "layers", "kv_heads", "head"),
    [
        ("llama-2-13b", 40, 40, 128),
        ("llama-3.1-405b", 126, 8, 128),
        ("llama-3.2-1b", 16, 8, 64),
        ("llama-3.2-3b", 28, 8, 128),
        ("mistral-nemo-12b", 40, 8, 128),
        ("mistral-small-24b", 40, 8, 128),
        ("mixtral-8x7b", 32, 8, 128),
        ("mixtral-8x22b", 56, 8, 128),
        ("qwen2.5-0.5b", 24, 2, 64),
        ("qwen2.5-7b", 28, 4, 128),
        ("qwen2.5-32b", 64, 8, 128),
        ("qwen2.5-72b", 80, 8, 128),
        ("qwen3-0.6b", 28, 8, 128),
        ("qwen3-4b", 36, 8, 128),
        ("qwen3-30b-a3b", 48, 4, 128),
        ("qwen3-235b-a22b", 94, 4, 128),
        ("gemma-2-9b", 42, 8, 256),
        ("gemma-2-27b", 46, 16, 128),
        ("gemma-3-1b", 26, 1, 256),
        ("gemma-3-12b", 48, 8, 256),
        ("phi-3-mini-4k", 32, 32, 96),
        ("phi-4", 40, 10, 128),
        ("gpt-oss-20b", 24, 8, 64),
        ("gpt-oss-120b", 36, 8, 64),
    ],
)
def test_kv_of_a_token_is_two_rows_a_layer_and_head(
    name: str, layers: int, kv_heads: int, head: int
) -> None:
    assert known_model(name).kv_layout().bytes_per_token == 2 * 2 * layers * kv_heads * head


def test_of_deepseek_v2_a_token_takes_a_row_of_its_latent() -> None:
    assert known_model("deepseek-v2").kv_layout().bytes_per_token == 60 * (512 + 64) * 2


def test_32_sequences_of_8192_tokens_at_128_kib_take_32_gib() -> None:
    assert 32 * known_model("llama-3-8b").kv_layout().bytes_of(8192) == 32 * GIB


def test_windowed_layers_of_gemma_keep_their_window_only() -> None:
    gemma_2 = known_model("gemma-2-9b")
    assert (gemma_2.num_windowed, gemma_2.num_layers) == (21, 42)
    gemma_3 = known_model("gemma-3-27b")
    assert (gemma_3.num_windowed, gemma_3.num_layers) == (52, 62)
    per_layer = 2 * 16 * 128 * 2
    kept = 10 * 100_000 + 52 * 1024
    assert gemma_3.kv_layout().bytes_of(100_000) == kept * per_layer


@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", "Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B", "LLAMA-3.1-8B"],
)
def test_a_model_is_found_however_people_write_it(name: str) -> None:
    assert known_model(name).name == "llama-3.1-8b"


def test_the_default_model_of_kvota_is_known() -> None:
    assert known_model("smollm2-135m-instruct").name == "smollm2-135m"


def test_an_unknown_model_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean qwen3-8b"):
        known_model("qwen3-9b")
    with pytest.raises(ConfigError, match="Known: llama-2-7b"):
        known_model("zzz")


def test_an_unknown_device_is_refused_with_all_there_are() -> None:
    with pytest.raises(ConfigError, match=r"use t4, l4, .*or 'here'"):
        known_device("h1000")


def test_devices_are_in_bytes_and_operations_a_second() -> None:
    h100 = known_device("H100-SXM")
    assert 79 * GIB < h100.memory_bytes < 80 * GIB
    assert h100.bandwidth == 3.35e12
    assert h100.compute[Arithmetic.F8] == 1.979e15


@pytest.mark.parametrize("name", devices())
def test_narrower_arithmetic_is_never_slower(name: str) -> None:
    compute = known_device(name).compute
    assert compute[Arithmetic.I8] >= compute[Arithmetic.F16]
    assert compute.get(Arithmetic.F8, compute[Arithmetic.I8]) >= compute[Arithmetic.F16]
