import contextlib
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.formats.gguf_header import read_header
from kvota.model.gguf_source import open_gguf, read_gguf_metadata
from tests.support.tiny_gguf import write_gguf


def bare_gguf(*keys: bytes, version: int = 3, num_tensors: int = 0, tensors: bytes = b"") -> bytes:
    """A header written by hand, for what the gguf package refuses to write."""
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, len(keys)) + b"".join(keys) + tensors


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_every_key_and_tensor_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", quant="Q8_0").path
    header, reference = read_header(path), gguf.GGUFReader(path)
    expected = {
        name: field.contents()
        for name, field in reference.fields.items()
        if not name.startswith("GGUF.")
    }
    assert header.metadata == expected
    assert {key: type(value) for key, value in header.metadata.items()} == {
        key: type(value) for key, value in expected.items()
    }
    assert {t.name: (t.offset, t.ggml_type) for t in header.tensors.values()} == {
        t.name: (t.data_offset, int(t.tensor_type)) for t in reference.tensors
    }


def test_every_scalar_type_and_nested_arrays_become_plain_python_values(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("words", ["a", "ü", ""])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf_metadata(tmp_path / "k.gguf")
    numbers = {"u8": 200, "i8": -5, "u16": 60000, "i16": -30000, "u64": 2**63, "i64": -(2**62)}
    others = {"f64": 0.1, "yes": True, "words": ["a", "ü", ""], "flags": [True, False]}
    assert metadata == {"general.architecture": "llama"} | numbers | others


def test_an_array_of_arrays_is_a_list_of_lists(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2i", 5, 2, 7, -7)
    key = string(b"grid") + struct.pack("<IIQ", 9, 9, 2) + inner + inner
    path = written(tmp_path / "n.gguf", bare_gguf(key))
    assert read_gguf_metadata(path) == {"grid": [[7, -7], [7, -7]]}


def test_metadata_does_not_need_the_weights(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf").path
    header = read_header(path)
    end = min(tensor.offset for tensor in header.tensors.values())
    cut = written(tmp_path / "cut.gguf", path.read_bytes()[:end])
    assert read_gguf_metadata(cut) == header.metadata


def test_a_header_cut_anywhere_is_one_clear_line(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "m.gguf", with_tokenizer=False).path.read_bytes()
    end = min(t.offset for t in read_header(tmp_path / "m.gguf").tensors.values())
    header = content[: end - 40]  # past the padding
    for length in range(4, len(header), 7):
        cut = written(tmp_path / "cut.gguf", header[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf: the file ends inside .* truncated"):
            read_header(cut)


@settings(max_examples=200, deadline=None)
@given(position=st.integers(4, 1500), byte=st.integers(0, 255))
def test_a_damaged_byte_raises_a_model_error_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    content = bytearray(write_gguf(folder / "m.gguf", with_tokenizer=False).path.read_bytes())
    content[position] = byte
    damaged = written(folder / "damaged.gguf", bytes(content))
    with contextlib.suppress(ModelError):
        open_gguf(damaged)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GGML" + b"\0" * 40, "does not start with 'GGUF'"),
        (bare_gguf(string(b"k") + struct.pack("<I", 99)), "the value of 'k' has the unknown type"),
        (bare_gguf(string(b"k\xff")), "is not valid UTF-8"),
        (bare_gguf(string(b"k" * 2000)), "key 1 of 1 has a name of over 1024 bytes"),
        (bare_gguf(*[string(b"k") + struct.pack("<II", 4, 1)] * 2), "'k' appears twice"),
        (bare_gguf(string(b"k") + struct.pack("<IIQ", 9, 4, 2**60)), "truncated"),
        (bare_gguf(num_tensors=1, tensors=string(b"t") + struct.pack("<I", 9)), "9 dimensions"),
        (
            bare_gguf(num_tensors=2, tensors=(string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2),
            "tensor 't' appears twice",
        ),
        (
            bare_gguf(string(b"general.alignment") + struct.pack("<II", 4, 24)),
            "general.alignment is 24",
        ),
    ],
)
def test_a_damaged_header_names_the_file_and_what_is_wrong(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_header(written(tmp_path / "bad.gguf", content))
    assert caught.value.message.startswith(str(tmp_path / "bad.gguf"))


@pytest.mark.parametrize(("version", "message"), [(1, "version 1"), (3 << 24, "big-endian")])
def test_other_versions_and_byte_orders_are_unsupported(
    tmp_path: Path, version: int, message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_header(written(tmp_path / "v.gguf", bare_gguf(version=version)))


def test_a_file_that_is_not_there_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path / "absent.gguf")
