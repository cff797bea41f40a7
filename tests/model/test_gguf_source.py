import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.formats.gguf_header import read_header
from kvota.model.architecture import Architecture, RopeKind
from kvota.model.gguf_config import architecture_of
from kvota.model.gguf_source import (
    GgufWeight,
    deinterleave,
    ggml_name,
    hugging_face_name,
    open_gguf,
    read_gguf_metadata,
)
from kvota.model.inventory import expected_shapes
from kvota.model.levels import LeveledWeight
from tests.support.family_cases import family_cases, rope_cases
from tests.support.tiny_gguf import paired_rows, write_gguf
from tests.support.tiny_models import random_weights, tiny_architecture

NO_WORD_IN_GGUF = (
    "llama_dynamic", "llama_yarn_attention_factor", "llama_yarn_mscale", "smollm3_sliding",
)  # fmt: skip
CASES = {
    name: case
    for name, case in (family_cases() | rope_cases()).items()
    if name not in NO_WORD_IN_GGUF
}
QUANTS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("name", CASES)
def test_architecture_and_weights_come_back_as_they_were_written(tmp_path: Path, name: str) -> None:
    tiny = write_gguf(tmp_path / "m.gguf", architecture=CASES[name])
    source = open_gguf(tiny.path)
    assert source.architecture == tiny.architecture
    assert source.warnings == ()
    assert source.weights.keys() == tiny.weights.keys()
    for key, values in tiny.weights.items():
        np.testing.assert_array_equal(source.weights[key].read(), values, err_msg=key)
        assert source.weights[key].shape == values.shape


@pytest.mark.parametrize("rope", ["llama_llama3", "llama_longrope"])
def test_a_model_in_parts_is_read_as_one(tmp_path: Path, rope: str) -> None:
    tiny = write_gguf(
        tmp_path / "m.gguf", architecture=CASES[rope], quant="Q4_1", tensors_per_part=3
    )
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 3
    for named in (parts[0], parts[-1]):
        source = open_gguf(named)
        assert source.architecture == tiny.architecture
        assert source.warnings == ()
        assert source.weights.keys() == tiny.weights.keys()
        for key, values in tiny.weights.items():
            np.testing.assert_array_equal(source.weights[key].read(), values, err_msg=key)
        assert read_gguf_metadata(named) == read_header(parts[0]).metadata


def test_a_missing_or_truncated_part_is_named(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", tensors_per_part=3).path
    second, *_, last = sorted(tmp_path.iterdir())[1:]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"{last.name}: the tensor .* truncated"):
        open_gguf(first)
    second.unlink()
    with pytest.raises(ModelError, match=rf"{second.name}: cannot be read"):
        open_gguf(first)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantized_values_are_those_of_the_gguf_package(
    tmp_path: Path, family: str, quant: str
) -> None:
    tiny = write_gguf(tmp_path / "m.gguf", family, quant=quant)
    source = open_gguf(tiny.path)
    assert source.weights["model.layers.0.mlp.up_proj.weight"].stored_as == quant
    for key, values in tiny.weights.items():
        read = source.weights[key].read()
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, values, err_msg=key)


@pytest.mark.parametrize("quant", QUANTS)
def test_levels_are_handed_out_where_the_file_has_them_in_the_order_of_the_numbers(
    tmp_path: Path, quant: str
) -> None:
    tiny = write_gguf(tmp_path / "m.gguf", "llama", quant=quant)
    weights = open_gguf(tiny.path).weights
    leveled = {n: w for n, w in weights.items() if isinstance(w, LeveledWeight) and w.has_levels}
    is_kept = quant in ("Q4_0", "Q4_1")
    assert ("model.layers.0.self_attn.q_proj.weight" in leveled) is is_kept
    assert "model.norm.weight" not in leveled
    for name, weight in leveled.items():
        values = weight.read_levels().values()
        np.testing.assert_allclose(values, tiny.weights[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("quant", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0"])
def test_types_that_cannot_be_written_are_read_from_raw_blocks(tmp_path: Path, quant: str) -> None:
    kind = gguf.GGMLQuantizationType[quant]
    architecture = tiny_architecture("qwen2", hidden_size=256, head_size=64, mlp_size=256)
    weights = random_weights(architecture)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.RandomState(1).randint(0, 60, size=(256, block_bytes)).astype(np.uint8)
    path = _write_with(tmp_path / "m.gguf", architecture, weights, "blk.1.ffn_up.weight", raw, kind)
    weight = open_gguf(path).weights["model.layers.1.mlp.up_proj.weight"]
    assert weight.stored_as == quant
    np.testing.assert_array_equal(weight.read(), gguf.quants.dequantize(raw, kind))


def _write_with(
    path: Path, architecture: Architecture, weights: Any, name: str, raw: Any, kind: Any
) -> Path:
    """The tiny model with one matrix left out there and written here from raw blocks."""
    others = {key: value for key, value in weights.items() if ggml_name(key) != name}
    write_gguf(path, architecture=architecture, weights=others, with_tokenizer=False)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name("raw.gguf"), architecture.family)
    _copy_keys(reader, writer)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("raw.gguf")


def _copy_keys(reader: Any, writer: Any) -> None:
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)


def test_the_converters_row_order_is_undone_for_any_number_of_heads() -> None:
    for num_heads, head_size in [(1, 2), (3, 8), (9, 64)]:
        rows = num_heads * head_size
        matrix = np.arange(rows * 5, dtype=np.float32).reshape(rows, 5)
        vector = np.arange(rows, dtype=np.float32)
        for values in (matrix, vector):
            stored = paired_rows(values, num_heads)
            np.testing.assert_array_equal(deinterleave(stored, num_heads), values)


def test_llama_q_and_k_lie_in_the_file_in_another_order_and_qwens_do_not(tmp_path: Path) -> None:
    for family, is_reordered in [("llama", True), ("qwen2", False)]:
        path = write_gguf(tmp_path / f"{family}.gguf", family).path
        raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
        read = open_gguf(path).weights["model.layers.0.self_attn.k_proj.weight"].read()
        assert np.array_equal(raw["blk.0.attn_k.weight"], read) is not is_reordered


@pytest.mark.parametrize("name", sorted(family_cases()))
def test_names_translate_both_ways(name: str) -> None:
    for key in expected_shapes(family_cases()[name]):
        assert hugging_face_name(ggml_name(key)) == key


# J06: what other writers put into the file, or leave out of it.


def test_unused_rope_factors_are_ignored_and_used_ones_count(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    qwen = open_gguf(write_gguf(tmp_path / "q.gguf", "qwen2", extra_tensors=factors).path)
    assert qwen.architecture.rope.kind is RopeKind.PLAIN
    assert qwen.warnings == ()
    llama = open_gguf(write_gguf(tmp_path / "l.gguf", "llama", extra_tensors=factors).path)
    assert llama.architecture.rope.kind is RopeKind.FACTORS
    assert llama.architecture.rope.frequency_factors == tuple(range(1, 9))


def test_rope_factors_of_one_change_nothing(tmp_path: Path) -> None:
    ones = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    source = open_gguf(write_gguf(tmp_path / "l.gguf", "llama", extra_tensors=ones).path)
    assert source.architecture.rope.kind is RopeKind.PLAIN


def test_the_wrong_number_of_rope_factors_is_an_error(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.full(7, 2, dtype=np.float32)}
    path = write_gguf(tmp_path / "l.gguf", "llama", extra_tensors=factors).path
    with pytest.raises(ModelError, match="7 rope factors for 8 rotary frequencies"):
        open_gguf(path)


def test_an_extra_tensor_is_ignored_with_a_warning(tmp_path: Path) -> None:
    extra = {"blk.0.attn_gate.weight": np.zeros(4, dtype=np.float32)}
    source = open_gguf(write_gguf(tmp_path / "m.gguf", extra_tensors=extra).path)
    assert "blk.0.attn_gate.weight" in source.warnings[0]


def test_an_odd_vocabulary_keeps_its_size(tmp_path: Path) -> None:
    odd = tiny_architecture("llama", vocab_size=32003, num_layers=1)
    path = write_gguf(tmp_path / "m.gguf", architecture=odd, with_tokenizer=False).path
    source = open_gguf(path)
    assert source.architecture.vocab_size == 32003
    assert source.weights["lm_head.weight"].read().shape == (32003, 64)


def test_a_vocabulary_only_file_says_so(tmp_path: Path) -> None:
    whole = gguf.GGUFReader(write_gguf(tmp_path / "m.gguf").path)
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    _copy_keys(whole, writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"v\.gguf: the file has no weights, only a vocabulary"):
        open_gguf(tmp_path / "v.gguf")


def test_a_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf").path
    last = max(read_header(path).tensors.values(), key=lambda tensor: tensor.offset)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"m\.gguf: the tensor {last.name} .* truncated"):
        open_gguf(path)


def test_a_missing_tensor_is_named_in_the_files_own_words(tmp_path: Path) -> None:
    weights = dict(random_weights(tiny_architecture("llama")))
    del weights["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "m.gguf", weights=weights).path
    with pytest.raises(ModelError, match=r"the tensor blk\.1\.ffn_up\.weight is missing"):
        open_gguf(path)


def test_a_wrong_shape_names_the_tensor_and_both_shapes(tmp_path: Path) -> None:
    weights = dict(random_weights(tiny_architecture("llama")))
    weights["model.layers.0.mlp.down_proj.weight"] = np.zeros((64, 95), dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", weights=weights).path
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_down\.weight has shape \[64, 95\].*64, 96"):
        open_gguf(path)


@pytest.mark.parametrize(("number", "shown"), [(199, "number 199"), (9, "Q8_1"), (28, "F64")])
def test_an_unknown_quantisation_names_the_tensor_and_what_is_supported(
    tmp_path: Path, number: int, shown: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf").path
    _set_type(path, b"blk.0.ffn_up.weight", number)
    with pytest.raises(UnsupportedModel, match=rf"blk\.0\.ffn_up\.weight .* {shown}.*Q4_K") as e:
        open_gguf(path)
    assert "Supported: F32, F16, Q4_0" in e.value.message


def _set_type(path: Path, tensor: bytes, number: int) -> None:
    """Overwrite a matrix's type: name · rank u32 · two sizes u64 · type u32."""
    content = bytearray(path.read_bytes())
    at = content.index(tensor) + len(tensor) + 4 + 16
    content[at : at + 4] = struct.pack("<I", number)
    path.write_bytes(content)


def _described(tmp_path: Path, family: str, keys: Mapping[str, Any]) -> Architecture:
    """The architecture of a tiny model whose header has these keys changed (None: left out)."""
    path = write_gguf(tmp_path / "m.gguf", family, with_tokenizer=False).path
    header = read_header(path)
    merged = header.metadata | dict(keys)
    shapes = {hugging_face_name(t.name) or t.name: t.shape for t in header.tensors.values()}
    kept = {key: value for key, value in merged.items() if value is not None}
    return architecture_of(kept, shapes, {}, "m.gguf")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'.*Supported: llama"),
        ({"general.type": "adapter"}, "type 'adapter'"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"llama.logit_scale": 0.5}, "logit_scale"),
        ({"llama.rope.scaling.type": "foo"}, "rope scaling 'foo'.*Supported: none, linear, yarn"),
        ({"llama.attention.value_length": 8}, "size 16 for keys and 8 for values"),
        ({"llama.rope.dimension_count": 8}, "rope over 8 of 16"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        _described(tmp_path, "llama", keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.embedding_length": "wide"}, "llama.embedding_length is 'wide'"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv is .* one value"),
        ({"llama.attention.head_count_kv": 3}, "4 heads cannot share 3"),
        ({"llama.block_count": 10**9}, "num_layers is 1000000000"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 1e308},
            "max_position is 4611686018427387904",
        ),
        ({"llama.rope.freq_base": -1.0}, "freq_base is -1.0; it must be a number above 0"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon is missing"),
        (
            {"llama.attention.key_length": None, "llama.attention.head_count": 5},
            "64 hidden elements do not divide into 5 heads",
        ),
    ],
)
def test_a_key_that_makes_no_sense_is_named(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        _described(tmp_path, "llama", keys)


@pytest.mark.parametrize("family", ["smollm3", "qwen2"])
def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(
    tmp_path: Path, family: str
) -> None:
    keys = {f"{family}.block_count": 2**60, f"{family}.attention.sliding_window": 24}
    keys[f"{family}.attention.sliding_window_pattern"] = 2
    with pytest.raises(ModelError, match="num_layers is 1152921504606846976"):
        _described(tmp_path, family, keys)


def test_head_size_is_derived_when_the_file_does_not_state_it(tmp_path: Path) -> None:
    keys = {"llama.attention.key_length": None, "llama.attention.value_length": None}
    assert _described(tmp_path, "llama", keys).head_size == 16


def test_per_layer_lists_of_one_value_are_that_value(tmp_path: Path) -> None:
    assert (
        _described(tmp_path, "llama", {"llama.attention.head_count_kv": [2, 2]}).num_kv_heads == 2
    )


def test_yarn_stretches_the_original_length(tmp_path: Path) -> None:
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.context_length": 64,
        "llama.rope.scaling.attn_factor": 0.5,
    }
    architecture = _described(tmp_path, "llama", keys)
    assert architecture.max_position == 256
    assert architecture.rope.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


def test_a_sliding_window_is_read_with_its_pattern(tmp_path: Path) -> None:
    window = {"qwen2.attention.sliding_window": 24}
    assert _described(tmp_path, "qwen2", window).sliding_window == 24
    assert _described(tmp_path, "qwen2", window).sliding_layers is None
    every_other = _described(
        tmp_path, "qwen2", window | {"qwen2.attention.sliding_window_pattern": 2}
    )
    assert every_other.sliding_layers == (True, False)
    listed = _described(
        tmp_path, "qwen2", window | {"qwen2.attention.sliding_window_pattern": [False, True]}
    )
    assert listed.sliding_layers == (False, True)


def test_mistrals_newer_name_is_mistral(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", with_tokenizer=False).path
    metadata = {
        key.replace("llama.", "mistral3."): value
        for key, value in read_header(path).metadata.items()
    } | {"general.architecture": "mistral3"}
    shapes = {"model.embed_tokens.weight": (320, 64), "lm_head.weight": (320, 64)}
    expected = replace(open_gguf(path).architecture, family="mistral")
    assert architecture_of(metadata, shapes, {}, "m.gguf") == expected


def test_a_weight_that_vanishes_while_open_is_a_model_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf").path
    source = open_gguf(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ModelError, match=r"m\.gguf: the file ends inside the tensor"):
        source.weights["model.layers.1.mlp.up_proj.weight"].read()
    path.unlink()
    with pytest.raises(ModelError, match=r"m\.gguf: cannot read blk\.1\.ffn_up\.weight"):
        source.weights["model.layers.1.mlp.up_proj.weight"].read()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("quant", ["F16", "Q4_0", "Q4_1", "Q8_0"])
def test_a_scale_that_is_no_number_is_named(tmp_path: Path, quant: str, wrong: float) -> None:
    """Every one of these types begins with a number in half precision."""
    path = write_gguf(tmp_path / "m.gguf", quant=quant).path
    weight = open_gguf(path).weights["model.layers.1.mlp.up_proj.weight"]
    assert isinstance(weight, GgufWeight)
    content = bytearray(path.read_bytes())
    content[weight.entry.offset : weight.entry.offset + 2] = np.float16(wrong).tobytes()
    path.write_bytes(content)
    damaged = r"m\.gguf: the tensor blk\.1\.ffn_up\.weight holds numbers"
    with pytest.raises(ModelError, match=damaged):
        weight.read()
    if weight.has_levels:
        with pytest.raises(ModelError, match=damaged):
            weight.read_levels()
