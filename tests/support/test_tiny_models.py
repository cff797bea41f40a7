"""The tiny models are what the public libraries of their formats read, and worth testing with."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.reference import greedy_tokens, reference_logits, rope_table, rotate
from tests.support.tiny_gguf import gguf_name, paired_rows, write_gguf
from tests.support.tiny_models import (
    FAMILIES,
    fixed_tokens,
    random_weights,
    rounded,
    tiny_architecture,
    weight_shapes,
    write_safetensors,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_spread_and_greedy_text_moves(family: str) -> None:
    architecture = tiny_architecture(family)
    weights = random_weights(architecture)
    prompt = fixed_tokens(12, architecture.vocab_size)
    assert 0.8 < reference_logits(architecture, weights, prompt).std() < 4
    assert len(set(greedy_tokens(architecture, weights, prompt, 40))) >= 10


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_the_safetensors_library_reads_the_same_values(tmp_path: Path, dtype: Any) -> None:
    tiny = write_safetensors(tmp_path, "qwen3", dtype=dtype)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tiny.weights.keys()
    for name, values in tiny.weights.items():
        np.testing.assert_array_equal(found[name].astype(np.float32), values)


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even() -> None:
    """Eight bits of mantissa: steps of 1/128 above one."""
    values = np.array([1.0, 1 + 1 / 300, 1 + 1 / 256, 1 + 3 / 256, -3.14159], dtype=np.float32)
    expected = [1.0, 1.0, 1.0, 1 + 4 / 256, -3.140625]
    np.testing.assert_array_equal(rounded(values, "BF16"), np.array(expected, dtype=np.float32))


def test_the_shards_and_the_index_hold_every_tensor_once(tmp_path: Path) -> None:
    tiny = write_safetensors(tmp_path, "llama", shards=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tiny.weights.keys()
    assert not (tmp_path / "model.safetensors").exists()
    for shard in sorted(set(index.values())):
        assert {name for name in index if index[name] == shard} == load_file(
            tmp_path / shard
        ).keys()


def test_a_config_key_can_be_replaced_or_left_out(tmp_path: Path) -> None:
    overrides = {"tie_word_embeddings": None, "rope_theta": 5.0}
    write_safetensors(tmp_path, "llama", config=overrides, with_tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "tie_word_embeddings" not in config
    assert config["rope_theta"] == 5.0
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_the_gguf_library_reads_the_same_values(tmp_path: Path, quant: str) -> None:
    tiny = write_gguf(tmp_path / "tiny.gguf", "qwen2", quant=quant)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny.path).tensors}
    assert found.keys() == {gguf_name(name) for name in tiny.weights}
    for name, values in tiny.weights.items():
        tensor = found[gguf_name(name)]
        read = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(read.reshape(values.shape), values)


def test_llama_rows_are_paired_in_gguf_and_qwen_rows_are_not(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    for family, is_paired in (("llama", True), ("mistral", True), ("qwen2", False)):
        tiny = write_gguf(tmp_path / f"{family}.gguf", family)
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny.path).tensors}
        stored = tensors["blk.0.attn_k.weight"].data
        expected = paired_rows(tiny.weights[name], 2) if is_paired else tiny.weights[name]
        np.testing.assert_array_equal(stored, expected)


def test_paired_rows_turn_pairwise_as_the_others_turn_in_halves() -> None:
    """The one reason for the reordering: llama.cpp rotates neighbours, Hugging Face halves."""
    architecture = tiny_architecture("llama")
    cos, sin = rope_table(architecture, 9)
    x = np.random.RandomState(0).standard_normal((9, 16))
    paired = paired_rows(x.T.astype(np.float32), 1).T
    even, odd = paired[:, 0::2], paired[:, 1::2]
    neighbours = np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    halves = paired_rows(rotate(x, cos, sin).T.astype(np.float32), 1).T
    np.testing.assert_allclose(neighbours.reshape(9, 16), halves, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_a_gguf_name_of_its_own(family: str) -> None:
    names = list(weight_shapes(tiny_architecture(family)))
    assert len({gguf_name(name) for name in names}) == len(names)
