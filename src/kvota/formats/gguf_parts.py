"""A GGUF model in one file, or in the parts that llama.cpp's splitter made of it.

    NAME-00001-of-00003.gguf    the keys of the model, and its first tensors
    NAME-00002-of-00003.gguf    more tensors, and no keys but split.*; and so on

Every part is a GGUF file of its own, whose offsets count from its own start; any of them stands for
the model. `split.no` counts from 0. (llama.cpp, tools/gguf-split; gguf-py, gguf_writer.py.)
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvota.core.errors import ModelError
from kvota.formats.gguf_header import GgufHeader, TensorEntry, read_header
from kvota.formats.settings import Settings

_PART: Final = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}\.gguf")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What all files of a model say together. Nothing is checked against the files' sizes."""

    metadata: dict[str, Any]
    tensors: Mapping[str, TensorEntry]  # by ggml's name
    files: Mapping[str, Path]  # where each tensor lies


def read_model(path: Path) -> GgufModel:
    """Read the headers of all files of the model that `path` belongs to.

    Raises ModelError naming the part that is missing, damaged or not of this model.
    """
    parts = list(_parts(path))
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, Path] = {}
    for part, header in parts:
        for name, entry in header.tensors.items():
            if name in files:
                raise ModelError(f"{part}: the tensor {name!r} is also in {files[name].name}.")
            tensors[name], files[name] = entry, part
    return GgufModel(parts[0][1].metadata, tensors, files)


def read_keys(path: Path) -> dict[str, Any]:
    """The model's keys. Its other parts may be missing, and all tensors.

    Raises ModelError when the file with the keys is missing or damaged.
    """
    _, header = next(_parts(path))
    return header.metadata


def model_name(path: Path) -> str:
    """The file's name without its ending, and without the number of a part."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match["stem"]


def _parts(path: Path) -> Iterator[tuple[Path, GgufHeader]]:
    """The files of the model in order, each read when it is asked for."""
    named = read_header(path)
    count = _num_parts(named, path)
    if count < 2:
        yield path, named
        return
    match = _PART.fullmatch(path.name)
    if match is None:
        raise ModelError(
            f"{path}: is one of {count} parts of a model, so it must keep its name, "
            f"NAME-00001-of-{count:05}.gguf, to find the others."
        )
    for number in range(1, count + 1):
        part = path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        header = read_header(part)
        _check_place(header, part, number, count)
        yield part, header


def _num_parts(header: GgufHeader, path: Path) -> int:
    keys = Settings(header.metadata, str(path))
    count = keys.whole("split.count", 1)
    if count < 0:
        raise keys.wrong("split.count", "a number of parts")
    return count


def _check_place(header: GgufHeader, part: Path, number: int, count: int) -> None:
    keys = Settings(header.metadata, str(part))
    says = keys.whole("split.no") + 1, _num_parts(header, part)
    if says != (number, count):
        raise ModelError(
            f"{part}: says of itself that it is part {says[0]} of {says[1]}, but lies where "
            f"part {number} of {count} belongs."
        )
