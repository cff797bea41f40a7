import os
from pathlib import Path

import numpy as np
import pytest

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.model.architecture import WeightSource
from kvota.model.source import ModelKind, kind_of, open_source
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import write_safetensors


def written(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


def test_both_kinds_open_to_the_same_model(tmp_path: Path) -> None:
    directory = write_safetensors(tmp_path / "hf", "qwen2").path
    file = write_gguf(tmp_path / "m.gguf", "qwen2").path
    assert kind_of(directory) is ModelKind.SAFETENSORS
    assert kind_of(file) is ModelKind.GGUF
    first: WeightSource = open_source(directory)
    second: WeightSource = open_source(file)
    assert first.origin == str(directory)
    assert first.weights.keys() == second.weights.keys()
    for name, weight in first.weights.items():
        np.testing.assert_array_equal(weight.read(), second.weights[name].read())


def test_a_gguf_file_is_known_by_its_content_and_not_by_its_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf").path.rename(tmp_path / "weights")
    assert kind_of(path) is ModelKind.GGUF


def test_an_openvino_directory_is_recognized_and_not_a_source(tmp_path: Path) -> None:
    folder = written(tmp_path / "ir", "openvino_model.xml", "openvino_model.bin", "config.json")
    assert kind_of(folder) is ModelKind.OPENVINO_IR
    with pytest.raises(UnsupportedModel, match="no plain weights"):
        open_source(folder)


def test_an_index_alone_is_enough_to_be_safetensors_so_that_the_lost_shard_is_named(
    tmp_path: Path,
) -> None:
    folder = write_safetensors(tmp_path / "hf", shards=2).path
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(ModelError, match=r"the shard model-00001-of-00002\.safetensors is missing"):
        open_source(folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"pytorch_model\.bin.*convert them to safetensors"),
        (["config.json"], r"has config\.json, but no weights"),
        (["model.safetensors"], r"safetensors, but no config\.json"),
        (["a.gguf", "b.gguf"], r"2 GGUF files; give the file, such as a\.gguf"),
        (["openvino_tokenizer.xml", "openvino_tokenizer.bin"], "holds no model"),
        (["a.gguf"], r"give the GGUF file in it, a\.gguf"),
        (["blobs", "refs", "snapshots"], "the directory in its snapshots/"),
        ([], "holds no model"),
    ],
)
def test_another_directory_is_refused_with_what_to_do(
    tmp_path: Path, names: list[str], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message) as caught:
        kind_of(written(tmp_path / "d", *names))
    assert "Supported: a GGUF file, a Hugging Face directory" in caught.value.message


def test_another_file_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "d", "model.safetensors", "notes.txt", "empty")
    (folder / "empty").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="give its directory"):
        kind_of(folder / "model.safetensors")
    for name in ("notes.txt", "empty"):
        with pytest.raises(UnsupportedModel, match="not a GGUF file"):
            kind_of(folder / name)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsupportedModel, match="neither a file nor a directory"):
        kind_of(tmp_path / "pipe")


def test_a_directory_of_hugging_faces_cache_is_read_through_its_links(tmp_path: Path) -> None:
    whole = write_safetensors(tmp_path / "blobs", shards=2)
    snapshot = tmp_path / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for number, blob in enumerate(sorted(whole.path.iterdir())):
        hashed = blob.rename(blob.with_name(f"{number:064x}"))
        (snapshot / blob.name).symlink_to(Path("../../blobs") / hashed.name)
    source = open_source(snapshot)
    assert source.weights.keys() == whole.weights.keys()
    (tmp_path / "blobs" / f"{0:064x}").unlink()  # config.json, the first by name
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: No such file"):
        open_source(snapshot)


def test_nothing_there_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        open_source(tmp_path / "absent")
