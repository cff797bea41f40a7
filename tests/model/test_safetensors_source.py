import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.model.inventory import FileSource
from kvota.model.safetensors_file import SafetensorsWeight, read_tensors
from kvota.model.safetensors_source import open_safetensors
from tests.support.family_cases import family_cases
from tests.support.tiny_models import (
    FloatType,
    Weights,
    random_weights,
    tiny_architecture,
    write_safetensors,
    write_safetensors_file,
)

UP = "model.layers.1.mlp.up_proj.weight"


def assert_holds(source: FileSource, weights: Weights) -> None:
    assert source.weights.keys() == weights.keys()
    for name, values in weights.items():
        read = source.weights[name].read()
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, values, err_msg=name)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_come_back_as_they_were_written(
    tmp_path: Path, dtype: FloatType, shards: int
) -> None:
    tiny = write_safetensors(tmp_path, "qwen3", dtype=dtype, shards=shards)
    source = open_safetensors(tmp_path)
    assert source.architecture == tiny.architecture
    assert source.warnings == ()
    assert source.weights[UP].stored_as == dtype
    assert_holds(source, tiny.weights)


@pytest.mark.parametrize("name", family_cases())
def test_every_family_opens_whole(tmp_path: Path, name: str) -> None:
    tiny = write_safetensors(tmp_path, architecture=family_cases()[name])
    assert_holds(open_safetensors(tmp_path), tiny.weights)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_files_of_the_safetensors_package_are_read(tmp_path: Path, dtype: Any) -> None:
    values = {"a": np.arange(6, dtype=dtype).reshape(2, 3), "b": np.array(2.5, dtype=dtype)}
    save_file(values, tmp_path / "x")
    tensors = read_tensors(tmp_path / "x")
    for name, expected in values.items():
        assert tensors[name].shape == expected.shape
        np.testing.assert_array_equal(tensors[name].read(), expected.astype(np.float32))


# J01: what is missing is noticed, what is stray is not read.


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "fp8"}}])
def test_a_missing_shard_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    write_safetensors(tmp_path, shards=2, config=config)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors|fp8"):
        open_safetensors(tmp_path)


def test_an_index_that_names_a_tensor_no_shard_has_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.x"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"assigns model\.layers\.9\.x to model-00001-of-00002"):
        open_safetensors(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        open_safetensors(tmp_path)


def test_only_indexed_files_are_read(tmp_path: Path) -> None:
    tiny = write_safetensors(tmp_path, shards=2)
    other = random_weights(tiny.architecture, seed=1)
    write_safetensors_file(tmp_path / "model.safetensors", other)
    (tmp_path / "stray.safetensors").write_bytes(b"garbage")
    assert_holds(open_safetensors(tmp_path), tiny.weights)


def test_without_an_index_the_usual_file_counts_and_strays_do_not(tmp_path: Path) -> None:
    tiny = write_safetensors(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"garbage")
    assert_holds(open_safetensors(tmp_path), tiny.weights)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="2 safetensors files, but no"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    "weight_map",
    [None, {}, {UP: "../model.safetensors"}, {UP: "a\0b"}, {UP: "a" * 300}, {UP: 10**400}],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, weight_map: Any) -> None:
    write_safetensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"no weight_map|is no plain file name"):
        open_safetensors(tmp_path)


# J02: the tie flag against lm_head.weight.


def written(tmp_path: Path, *, tie: bool | None, head: str) -> Weights:
    """A model whose config says `tie` and whose file's head is absent, equal or different."""
    architecture = tiny_architecture("llama", tied_embeddings=head == "absent")
    weights = dict(random_weights(architecture))
    if head == "equal":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    write_safetensors(
        tmp_path,
        architecture=architecture,
        weights=weights,
        config={"tie_word_embeddings": tie},
    )
    return weights


def test_tied_without_a_head_is_tied(tmp_path: Path) -> None:
    weights = written(tmp_path, tie=True, head="absent")
    source = open_safetensors(tmp_path)
    assert source.architecture.tied_embeddings
    assert source.warnings == ()
    assert_holds(source, weights)


@pytest.mark.parametrize(("head", "num_warnings"), [("equal", 0), ("different", 1)])
def test_tied_with_a_head_is_tied_and_warns_when_it_differs(
    tmp_path: Path, head: str, num_warnings: int
) -> None:
    written(tmp_path, tie=True, head=head)
    source = open_safetensors(tmp_path)
    assert source.architecture.tied_embeddings
    assert "lm_head.weight" not in source.weights
    assert len(source.warnings) == num_warnings
    assert all("lm_head.weight differs" in warning for warning in source.warnings)


@pytest.mark.parametrize("tie", [False, None])
@pytest.mark.parametrize("head", ["equal", "different"])
def test_untied_or_unsaid_uses_the_head(tmp_path: Path, tie: bool | None, head: str) -> None:
    weights = written(tmp_path, tie=tie, head=head)
    source = open_safetensors(tmp_path)
    assert not source.architecture.tied_embeddings
    assert_holds(source, weights)


@pytest.mark.parametrize("tie", [False, None])
def test_untied_or_unsaid_without_a_head_is_refused(tmp_path: Path, tie: bool | None) -> None:
    written(tmp_path, tie=tie, head="absent")
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing.*tie_word_embeddings"):
        open_safetensors(tmp_path)


def test_a_head_of_another_type_with_the_same_values_is_equal(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_safetensors_file(tmp_path / "a", {"t": values}, "F32")
    write_safetensors_file(tmp_path / "b", {"t": values}, "BF16")
    write_safetensors_file(tmp_path / "c", {"t": values.T}, "F32")
    a, b, c = (read_tensors(tmp_path / name)["t"] for name in "abc")
    assert a.has_values_of(b)
    assert not a.has_values_of(c)


# Damage.


def test_extra_tensors_are_ignored_with_a_warning_unless_known_to_be_harmless(
    tmp_path: Path,
) -> None:
    weights = dict(random_weights(tiny_architecture("llama")))
    expected = dict(weights)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, dtype=np.float32)
    write_safetensors(tmp_path, weights=weights)
    assert open_safetensors(tmp_path).warnings == ()
    weights["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, dtype=np.float32)
    write_safetensors(tmp_path, weights=weights)
    source = open_safetensors(tmp_path)
    assert "q_proj.bias" in source.warnings[0]
    assert_holds(source, expected)


def test_a_missing_tensor_is_named_and_counted(tmp_path: Path) -> None:
    weights = dict(random_weights(tiny_architecture("llama")))
    del weights[UP], weights["model.norm.weight"]
    write_safetensors(tmp_path, weights=weights)
    with pytest.raises(ModelError, match=rf"{UP} is missing \(and 1 more\)"):
        open_safetensors(tmp_path)


def test_a_wrong_shape_names_both(tmp_path: Path) -> None:
    weights = dict(random_weights(tiny_architecture("llama"))) | {UP: np.zeros((95, 64), "f4")}
    write_safetensors(tmp_path, weights=weights)
    with pytest.raises(ModelError, match=rf"{UP} has shape \[95, 64\].*\[96, 64\]"):
        open_safetensors(tmp_path)


def test_a_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors: the tensor .* truncated"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 8, 100])
def test_a_file_cut_in_its_header_is_named(tmp_path: Path, kept: int) -> None:
    write_safetensors(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file"):
        open_safetensors(tmp_path)


def test_a_git_lfs_pointer_is_recognized(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "model.safetensors").write_text(text)
    with pytest.raises(ModelError, match="Git LFS pointer"):
        open_safetensors(tmp_path)


def with_entry(tmp_path: Path, **changes: Any) -> None:
    """A tiny model whose header describes UP with these fields changed."""
    write_safetensors(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[UP] |= changes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize("stored_as", ["F8_E4M3", "I8", "U4"])
def test_a_type_that_cannot_be_read_is_refused(tmp_path: Path, stored_as: str) -> None:
    with_entry(tmp_path, dtype=stored_as)
    with pytest.raises(UnsupportedModel, match=rf"{UP} is stored as {stored_as}.*F32, F16, BF16"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"data_offsets": [0, 4]},
        {"data_offsets": [8, 0]},
        {"data_offsets": "x"},
        {"data_offsets": [0, float("inf")]},
        {"data_offsets": [-4, 24572]},
        {"shape": [1, 1]},
        {"shape": [-96, -64]},
        {"shape": None},
        {"shape": [10**400, 64]},
    ],
)
def test_an_entry_that_makes_no_sense_names_the_tensor(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with_entry(tmp_path, **changes)
    with pytest.raises(ModelError, match=UP) as caught:
        open_safetensors(tmp_path)
    assert len(caught.value.message) < 400


def test_a_header_that_is_no_table_is_refused(tmp_path: Path) -> None:
    for text in (b"[]", b"{{", b"\xff\xff"):
        (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(ModelError, match="header"):
            read_tensors(tmp_path / "x")


def test_a_weight_that_vanishes_while_open_is_a_model_error(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    source = open_safetensors(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(ModelError, match=f"the file ends inside the tensor {UP}"):
        source.weights[UP].read()
    path.unlink()
    with pytest.raises(ModelError, match=f"cannot read {UP}"):
        source.weights[UP].read()


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e30])
def test_a_weight_that_is_no_number_is_named(
    tmp_path: Path, dtype: FloatType, wrong: float
) -> None:
    """As a flipped bit in an exponent makes it. Answers from it would be noise."""
    weights = dict(random_weights(tiny_architecture("llama")))
    weights[UP] = weights[UP].copy()
    write_safetensors(tmp_path, weights=weights, dtype=dtype)
    weight = open_safetensors(tmp_path).weights[UP]
    assert isinstance(weight, SafetensorsWeight)
    content = bytearray(weight.path.read_bytes())
    bits = np.float32(wrong).tobytes()
    part = bits if dtype == "F32" else bits[2:]
    content[weight.offset + 40 : weight.offset + 40 + len(part)] = part
    weight.path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"model\.safetensors: the tensor {UP} holds numbers"):
        weight.read()


def test_the_largest_number_of_half_precision_is_one(tmp_path: Path) -> None:
    weights = dict(random_weights(tiny_architecture("llama")))
    weights[UP] = np.where(weights[UP] > 0, np.float32(65504), np.float32(-65504))
    write_safetensors(tmp_path, weights=weights)
    assert open_safetensors(tmp_path).weights[UP].read().max() == 65504
