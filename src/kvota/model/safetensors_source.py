"""A Hugging Face directory (config.json and *.safetensors) as a source of weights.

Which files count: those that `model.safetensors.index.json` lists, and within them only the
tensors it assigns to them. Without an index, `model.safetensors`, or the only safetensors file.
Anything else in the directory is not opened.
"""

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from kvota.core.errors import ModelError
from kvota.model.architecture import Architecture
from kvota.model.hf_config import architecture_of, read_json
from kvota.model.inventory import EMBEDDING, HEAD, FileSource, take_expected, unused_warning
from kvota.model.safetensors_file import SafetensorsWeight, read_tensors

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NAME_BYTES_MAX: Final = 255  # what file systems take


def open_safetensors(directory: Path) -> FileSource:
    """Open a model directory and prove that it is whole, without reading any matrix.

    With tied embeddings an `lm_head.weight` in the file is not used; when its values differ from
    the embeddings' a warning says so.

    Raises UnsupportedModel for a kind that kvota cannot run, ModelError for missing or damaged
    files.
    """
    config_path = directory / CONFIG
    architecture = architecture_of(read_json(config_path), str(config_path))
    found = _find_tensors(directory)
    origin = str(directory)
    weights = take_expected(architecture, found, origin)
    for name in weights:
        found[name].check()
    unused = found.keys() - weights.keys() - {HEAD}
    warnings = _tie_warning(architecture, found, origin) + unused_warning(unused, origin)
    return FileSource(origin, architecture, weights, warnings)


def _find_tensors(directory: Path) -> dict[str, SafetensorsWeight]:
    index = directory / INDEX
    if index.exists():
        return _indexed_tensors(directory, read_json(index).get("weight_map"), index)
    return read_tensors(_only_file(directory))


def _only_file(directory: Path) -> Path:
    files = sorted(directory.glob("*.safetensors"))
    if directory / SINGLE in files:
        return directory / SINGLE
    if not files:
        raise ModelError(f"{directory}: has no weights: no *.safetensors file and no {INDEX}.")
    if len(files) > 1:
        raise ModelError(
            f"{directory}: has {len(files)} safetensors files, but no {INDEX} that says which "
            "belong to the model."
        )
    return files[0]


def _indexed_tensors(directory: Path, weight_map: Any, index: Path) -> dict[str, SafetensorsWeight]:
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ModelError(f"{index}: has no weight_map, so it names no tensors.")
    shards = {}
    for file_name in sorted({str(name) for name in weight_map.values()}):
        if not _is_plain(file_name):
            raise ModelError(f"{index}: the shard {file_name[:100]!r} is no plain file name.")
        if not (directory / file_name).is_file():
            raise ModelError(f"{directory}: the shard {file_name} is missing; {INDEX} lists it.")
        shards[file_name] = read_tensors(directory / file_name)
    tensors = {}
    for name, file_name in weight_map.items():
        if name not in shards[str(file_name)]:
            raise ModelError(f"{index}: assigns {name} to {file_name}, which does not have it.")
        tensors[name] = shards[str(file_name)][name]
    return tensors


def _is_plain(file_name: str) -> bool:
    """Whether it names a file of a directory, and nothing beyond."""
    fits = len(file_name.encode(errors="replace")) <= _NAME_BYTES_MAX and "\0" not in file_name
    return fits and PurePath(file_name).name == file_name


def _tie_warning(
    architecture: Architecture, found: Mapping[str, SafetensorsWeight], origin: str
) -> tuple[str, ...]:
    if not architecture.tied_embeddings or HEAD not in found:
        return ()
    found[HEAD].check()
    if found[HEAD].has_values_of(found[EMBEDDING]):
        return ()
    return (
        f"{origin}: {HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true: the "
        "embeddings are used for the output.",
    )
