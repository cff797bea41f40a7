from pathlib import Path

import gguf
import numpy as np
import pytest

from kvota.core.errors import ModelError
from kvota.formats.gguf_header import read_header
from kvota.formats.gguf_parts import model_name, read_keys, read_model

NUM_TENSORS = 5


def write(
    folder: Path, name: str = "tiny", *, per_part: int = 0, first_is_empty: bool = False
) -> Path:
    """A file of five tensors, or the parts that the gguf package makes of them; the first."""
    writer = gguf.GGUFWriter(
        folder / f"{name}.gguf", "llama", split_max_tensors=per_part,
        small_first_shard=first_is_empty,
    )  # fmt: skip
    writer.add_name(name)
    for number in range(NUM_TENSORS):
        writer.add_tensor(f"t{number}", np.full(8, number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob(f"{name}*.gguf"))[0]


def values(path: Path, tensor: str) -> float:
    model = read_model(path)
    return float(np.fromfile(model.files[tensor], "<f4", 1, offset=model.tensors[tensor].offset)[0])


def test_a_whole_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path)
    model = read_model(path)
    assert model.metadata == read_header(path).metadata
    assert model.tensors == read_header(path).tensors
    assert set(model.files.values()) == {path}


@pytest.mark.parametrize("first_is_empty", [False, True])
def test_parts_are_one_model_whichever_is_named(tmp_path: Path, first_is_empty: bool) -> None:
    write(tmp_path, per_part=2, first_is_empty=first_is_empty)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == (4 if first_is_empty else 3)
    for part in parts:
        model = read_model(part)
        assert model.metadata["general.name"] == "tiny"
        assert sorted(model.tensors) == [f"t{number}" for number in range(NUM_TENSORS)]
        for number in range(NUM_TENSORS):
            assert values(part, f"t{number}") == number


def test_the_keys_are_in_the_first_part_alone(tmp_path: Path) -> None:
    first = write(tmp_path, per_part=2)
    second = tmp_path / "tiny-00002-of-00003.gguf"
    assert read_keys(second)["general.name"] == "tiny"
    second.unlink()
    assert read_keys(first)["general.name"] == "tiny"


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first = write(tmp_path, per_part=2)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003\.gguf: cannot be read"):
        read_model(first)


def test_a_renamed_part_cannot_find_the_others(tmp_path: Path) -> None:
    renamed = write(tmp_path, per_part=2).rename(tmp_path / "model.gguf")
    for read in (read_model, read_keys):
        with pytest.raises(ModelError, match=r"one of 3 parts.*keep its name.*-of-00003\.gguf"):
            read(renamed)


def test_a_part_in_the_place_of_another_is_named(tmp_path: Path) -> None:
    first = write(tmp_path, per_part=2)
    third = tmp_path / "tiny-00003-of-00003.gguf"
    (tmp_path / "tiny-00002-of-00003.gguf").write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003\.gguf: .*part 3 of 3.*part 2 of 3"):
        read_model(first)


def test_a_part_of_another_model_with_the_same_tensors_is_named(tmp_path: Path) -> None:
    first = write(tmp_path, per_part=2)
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", per_part=3)
    wrong = tmp_path / "other" / "tiny-00002-of-00002.gguf"
    (tmp_path / "tiny-00002-of-00003.gguf").write_bytes(wrong.read_bytes())
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003\.gguf: .*part 2 of 2.*part 2 of 3"):
        read_model(first)


def test_a_tensor_in_two_parts_is_named(tmp_path: Path) -> None:
    first = write(tmp_path, per_part=2)
    second = tmp_path / "tiny-00002-of-00003.gguf"
    second.write_bytes(second.read_bytes().replace(b"t2", b"t0"))
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003\.gguf: the tensor 't0' is also in"):
        read_model(first)


@pytest.mark.parametrize("count", ["3", -1])
def test_a_count_that_is_none_is_refused(tmp_path: Path, count: object) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_key_value(
        "split.count", count,
        gguf.GGUFValueType.STRING if isinstance(count, str) else gguf.GGUFValueType.INT32,
    )  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"split\.count"):
        read_model(path)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("tiny-00001-of-00003.gguf", "tiny"),
        ("Qwen3-8B-Q8_0-00002-of-00002.gguf", "Qwen3-8B-Q8_0"),
        ("tiny.gguf", "tiny"),
        ("model-1-of-3.gguf", "model-1-of-3"),
    ],
)
def test_the_parts_of_a_model_share_its_name(file: str, name: str) -> None:
    assert model_name(Path("/somewhere") / file) == name
