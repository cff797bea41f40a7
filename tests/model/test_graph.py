"""What the graph looks like and what it refuses. What it computes: test_families.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.core.plan import Chunk
from kvota.model import precision
from kvota.model.architecture import Rope, RopeKind
from kvota.model.compiled import KvDtype, compile_model
from kvota.model.gguf_source import open_gguf
from kvota.model.graph import build_graph
from kvota.model.paged import PagedModel
from kvota.model.sampler import Sampler
from kvota.model.weights import WeightFormat
from tests.support.memory_source import MemorySource
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import fixed_tokens, tiny_architecture

STEP_INPUTS = {
    "input_ids",
    "position_ids",
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "max_context_len",
    "sampled_tokens_indices",
}


def names(model: ov.Model) -> set[str]:
    return {port.any_name for port in model.inputs}


def logits(paged: PagedModel) -> npt.NDArray[np.float32]:
    """Of every position of one prompt, with an f32 cache."""
    tokens = fixed_tokens(20, paged.vocab_size)
    executor = compile_model(paged, kv_dtype=KvDtype.F32, num_threads=1).executor(
        2, Sampler(paged.vocab_size)
    )
    return executor.logits([Chunk(0, tokens, 0, (0,), prompt_logprobs=0, next_token=0)])


def test_inputs_are_the_agreed_ones_and_a_cache_pair_per_layer() -> None:
    paged = build_graph(MemorySource(tiny_architecture("llama")), WeightFormat.F32)
    caches = {f"{kind}_cache.{layer}" for kind in ("key", "value") for layer in range(2)}
    assert names(paged.model) == STEP_INPUTS | caches
    assert [port.any_name for port in paged.model.outputs] == ["logits"]
    assert (paged.num_layers, paged.vocab_size) == (2, 320)


def test_every_weight_is_read_once() -> None:
    source = MemorySource(tiny_architecture("qwen3"))
    build_graph(source, WeightFormat.INT8)
    assert {weight.num_reads for weight in source.weights.values()} == {1}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_norms_and_rotations_run_as_one_kernel_each(family: str) -> None:
    architecture = tiny_architecture(family)
    paged = build_graph(MemorySource(architecture), WeightFormat.INT8)
    runtime = compile_model(paged, num_threads=1).compiled_model.get_runtime_model()
    kinds = [node.get_rt_info()["layerType"].astype(str) for node in runtime.get_ops()]
    layers = architecture.num_layers
    assert kinds.count("RoPE") == 2 * layers
    assert kinds.count("RMS") == 1 + layers * (4 if architecture.qk_norm else 2)
    assert kinds.count("FullyConnected") == 1 + 5 * layers
    assert kinds.count("PagedAttention") == layers


def test_a_tied_vocabulary_is_one_constant() -> None:
    def bytes_of_codes(tied: bool) -> int:
        architecture = tiny_architecture("llama", tied_embeddings=tied)
        model = build_graph(MemorySource(architecture), WeightFormat.INT8).model
        constants = [op for op in model.get_ops() if op.get_type_name() == "Constant"]
        codes = [constant for constant in constants if constant.get_element_type() == ov.Type.i8]
        return sum(constant.get_byte_size() for constant in codes)

    vocabulary = 320 * 64
    assert bytes_of_codes(tied=False) - bytes_of_codes(tied=True) == vocabulary


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1"])
def test_a_file_in_4_bits_is_served_with_its_own_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    source = open_gguf(write_gguf(tmp_path / "m.gguf", quant=quant).path)
    monkeypatch.setattr(precision, "KEPT_SIDE_MIN", 64)
    kept = build_graph(source, WeightFormat.AUTO)
    assert kept.weights == "int4"
    exact = build_graph(source, WeightFormat.F32)
    difference = logits(replace(kept, input_group=0)) - logits(exact)
    rounded = logits(replace(build_graph(source, WeightFormat.INT8), input_group=0))
    assert np.abs(difference).max() < 2 * np.abs(rounded - logits(exact)).max()


def test_small_matrices_of_a_file_in_4_bits_become_int8(tmp_path: Path) -> None:
    source = open_gguf(write_gguf(tmp_path / "m.gguf", quant="Q4_1").path)
    assert build_graph(source, WeightFormat.AUTO).weights == "int8"


def test_a_missing_weight_is_named() -> None:
    source = MemorySource(tiny_architecture("llama"))
    del source.weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"memory: the weight model\.layers\.1\.mlp\.up_proj"):
        build_graph(source, WeightFormat.F32)


def test_rope_settings_that_make_no_sense_name_the_model() -> None:
    rope = Rope(theta=1.0, kind=RopeKind.YARN, original_max_position=64)
    source = MemorySource(tiny_architecture("llama", rope=rope))
    with pytest.raises(UnsupportedModel, match=r"^memory: rope yarn .* no frequencies"):
        build_graph(source, WeightFormat.F32)


def test_a_misshapen_weight_is_named_with_both_shapes() -> None:
    source = MemorySource(tiny_architecture("llama"))
    source.architecture = replace(source.architecture, mlp_size=100)
    with pytest.raises(ModelError, match=r"gate_proj\.weight has shape \(96, 64\), .* \(100, 64\)"):
        build_graph(source, WeightFormat.F32)
