"""GGUF: the header says what Hugging Face's config says, and the bytes are the file's own."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvota.core.errors import ModelError
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, fetch
from kvota.tools.plan.footprint import stored_bytes
from kvota.tools.plan.gguf_shape import read_gguf
from kvota.tools.plan.hf_shape import read_config
from kvota.tools.plan.matrices import matrices_of, num_params
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import FAMILIES, tiny_architecture, write_safetensors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_and_a_config_of_one_model_have_the_same_shape(
    family: str, tied: bool, tmp_path: Path
) -> None:
    # A GGUF converter drops the windows of these families.
    architecture = tiny_architecture(family, tied_embeddings=tied, sliding_window=None)
    written = write_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    write_safetensors(tmp_path / "hf", architecture=architecture)
    from_gguf, _ = read_gguf(written.path)
    from_config = read_config(tmp_path / "hf")
    assert from_gguf.kv_layout() == from_config.kv_layout()
    assert matrices_of(from_gguf) == matrices_of(from_config)
    number = sum(weight.size for weight in written.weights.values())
    assert num_params(matrices_of(from_gguf)) == number


def test_weights_take_what_the_tensors_take(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "tiny.gguf", architecture=tiny_architecture("llama"))
    shape, method = read_gguf(written.path)
    four_bytes = 4 * sum(weight.size for weight in written.weights.values())
    assert stored_bytes(matrices_of(shape), method) == four_bytes
    assert method.title == "as in the file, mostly F32"


@pytest.mark.model
def test_the_default_model_takes_what_its_file_takes() -> None:
    path = fetch(DEFAULT_MODEL, cache_dir_of(os.environ))
    shape, method = read_gguf(path)
    assert shape.kv_layout().bytes_per_token == 23_040
    assert num_params(matrices_of(shape)) == 134_515_008
    file_bytes = path.stat().st_size
    # The rest of the file is its vocabulary and other metadata.
    assert 0.97 < stored_bytes(matrices_of(shape), method) / file_bytes < 1


def split(source: Path, folder: Path) -> list[Path]:
    """The model in two files, as `llama-gguf-split` names and marks them: tensors by turns."""
    reader = gguf.GGUFReader(source)
    paths = [folder / f"tiny-{number:05}-of-00002.gguf" for number in (1, 2)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            for key in (
                "block_count", "context_length", "embedding_length", "feed_forward_length",
                "attention.head_count", "attention.head_count_kv",
            ):  # fmt: skip
                writer.add_uint32(f"llama.{key}", int(reader.fields[f"llama.{key}"].contents()))
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


@pytest.mark.parametrize("named", [0, 1])
def test_a_model_in_parts_is_all_of_them_whichever_is_named(named: int, tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "whole.gguf", architecture=tiny_architecture("llama"))
    parts = split(written.path, tmp_path)
    shape, method = read_gguf(parts[named])
    whole, whole_method = read_gguf(written.path)
    assert matrices_of(shape) == matrices_of(whole)
    assert stored_bytes(matrices_of(shape), method) == stored_bytes(
        matrices_of(whole), whole_method
    )


def test_a_missing_or_renamed_part_is_named(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "whole.gguf", architecture=tiny_architecture("llama"))
    first, second = split(written.path, tmp_path)
    second.unlink()
    with pytest.raises(ModelError, match=r"tiny-00002-of-00002\.gguf: cannot be read"):
        read_gguf(first)
    renamed = first.rename(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=r"one of 2 parts.*must keep its name"):
        read_gguf(renamed)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ModelError, match=r"x\.gguf: not a GGUF file"):
        read_gguf(file)


@pytest.mark.parametrize("num_layers", [0, 2**31])
def test_a_number_of_layers_that_cannot_be_is_named(num_layers: int, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint32("llama.block_count", num_layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"llama\.block_count is .*from 1 to 10,000"):
        read_gguf(tmp_path / "x.gguf")
