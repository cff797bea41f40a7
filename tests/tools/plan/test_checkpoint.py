"""A checkpoint that is quantized already is planned as it is stored."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvota.core.errors import ConfigError, ModelError
from kvota.tools.plan import words
from kvota.tools.plan.catalogue import known_device, known_model
from kvota.tools.plan.checkpoint import note, on, stored_method
from kvota.tools.plan.footprint import stored_bytes
from kvota.tools.plan.hardware import Arithmetic
from kvota.tools.plan.matrices import matrices_of
from kvota.tools.plan.methods import Method
from kvota.tools.plan.question import Question, read_model, varied
from kvota.tools.plan.snippets import vllm_serve
from tests.support.plan_machine import CPU
from tests.tools.plan.test_hf_shape import LLAMA

GB, GIB = 10**9, 2**30
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
PER_CHANNEL_FP8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None},
            "input_activations": {"num_bits": 8, "type": "float"},
        }
    },
    "ignore": ["lm_head"],
}
W4A16 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True},
            "input_activations": None,
        }
    },
}


def method(quantization: dict[str, Any]) -> Method:
    found = stored_method({"quantization_config": quantization}, "config.json")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "quantization", "gigabytes"),
    [
        ("qwen2.5-7b", AWQ, 5.57),  # Qwen/Qwen2.5-7B-Instruct-AWQ
        ("llama-2-7b", {"quant_method": "gptq", "bits": 4, "group_size": 128}, 3.90),  # TheBloke's
        ("llama-3.1-8b", PER_CHANNEL_FP8, 9.09),  # neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8
        ("llama-3.1-8b", {"quant_method": "fp8"}, 9.09),
    ],
)
def test_it_is_as_large_as_the_published_one(
    model: str, quantization: dict[str, Any], gigabytes: float
) -> None:
    size = stored_bytes(matrices_of(known_model(model)), method(quantization))
    assert size / GB == pytest.approx(gigabytes, rel=0.005)


# OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", table 1: checkpoint sizes.
@pytest.mark.parametrize(("model", "gibibytes"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_gpt_oss_is_planned_in_the_mxfp4_that_it_was_published_in(
    model: str, gibibytes: float
) -> None:
    shape, stored = read_model(model)
    assert stored is not None
    assert stored_bytes(matrices_of(shape), stored) / GIB == pytest.approx(gibibytes, abs=0.05)
    asked = Question(shape=shape, stored=stored, hardware=known_device("h100-sxm"))
    answer = asked.answer()
    assert answer.plan.choice.method.name == "checkpoint"
    assert "weights as in its checkpoint (experts in mxfp4" in words.verdict(answer.plan)
    assert (vllm_serve(answer.plan) or "").startswith(f"vllm serve openai/{model} \\")


def test_deepseek_v3_has_a_byte_a_parameter_and_coarser_ones_are_compared() -> None:
    shape, stored = read_model("deepseek-v3")
    assert stored is not None
    linear = 671_026_419_200 - 2 * 129_280 * 7168
    size = stored_bytes(matrices_of(shape), stored)
    assert size == pytest.approx(linear + 4 * 129_280 * 7168, rel=0.001)
    asked = Question(shape=shape, stored=stored, hardware=known_device("h200"))
    compared = [plan.choice.method.name for plan in asked.answer().compared]
    assert compared == ["checkpoint", "int8", "awq", "gptq"]


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (W4A16, 4 + 16 / 128),
        (AWQ | {"group_size": 32}, 4 + 20 / 32),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
    ],
)
def test_bits_of_a_number_with_what_lies_beside(quantization: dict[str, Any], bits: float) -> None:
    matrix = next(one for one in matrices_of(known_model("llama-3.1-8b")) if one.name == "ffn_down")
    found = method(quantization).num_bytes(matrix, is_tied=False)
    assert 8 * found / matrix.num_params == pytest.approx(bits, rel=1e-9)


def test_a_group_of_all_inputs_has_one_scale_an_output() -> None:
    layer = method({"quant_method": "gptq", "bits": 8, "group_size": -1}).layer
    assert (layer.group, layer.output_bits, layer.input_bits) == (None, 24, 32)


def test_a_device_without_the_arithmetic_multiplies_in_16_bits() -> None:
    fp8 = method({"quant_method": "fp8"})
    assert on(known_device("h100-sxm"), fp8) is fp8
    assert on(known_device("a100-80"), fp8).arithmetic is Arithmetic.F16
    assert "multiplied in fp16" in on(known_device("a100-80"), fp8).title


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (AWQ | {"bits": "4"}, r"quantization_config\.bits is '4'; it must be a whole number"),
        (AWQ | {"bits": 0}, "at least 1"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is"),
    ],
)
def test_a_wrong_field_is_named(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        method(quantization)


def test_what_is_not_known_is_said_and_planned_as_if_it_were_not_quantized() -> None:
    values = {"quantization_config": {"quant_method": "aqlm"}}
    assert stored_method(values, "config.json") is None
    assert note(values, None) == (
        "its checkpoint is quantized with 'aqlm', not known here: planned as if it were not",
    )
    assert stored_method({}, "config.json") is None
    assert note({}, None) == ()


def written(folder: Path, quantization: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": quantization}))
    return str(folder)


def test_other_weights_need_another_checkpoint(tmp_path: Path) -> None:
    shape, stored = read_model(written(tmp_path, AWQ))
    assert shape.notes == ("its checkpoint is quantized: AWQ 4 bit, groups of 128",)
    asked = Question(shape=shape, stored=stored, hardware=known_device("l4"))
    assert asked.answer().reasons[0].why == "as its checkpoint has them: AWQ 4 bit, groups of 128"
    other = varied(asked, "weights=fp8").answer()
    command = vllm_serve(other.plan) or ""
    assert command.startswith("# Name a checkpoint with fp8 weights:\nvllm serve")
    assert "--quantization" not in command


def test_kvotas_own_engine_does_not_read_it(tmp_path: Path) -> None:
    shape, stored = read_model(written(tmp_path, AWQ))
    with pytest.raises(ConfigError, match=r"quantized \(AWQ 4 bit.*reads F32, F16 and BF16"):
        Question(shape=shape, stored=stored, hardware=CPU).answer()
