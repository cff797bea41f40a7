"""Which kind of model lies at a path, and opening it. A model that opens is whole."""

from enum import StrEnum
from pathlib import Path

from kvota.core.errors import ModelError
from kvota.formats.gguf_header import MAGIC
from kvota.model.gguf_source import open_gguf
from kvota.model.inventory import FileSource, unsupported
from kvota.model.safetensors_source import CONFIG, INDEX, open_safetensors

_ACCEPTED = (
    "a GGUF file",
    "a Hugging Face directory with config.json and *.safetensors",
    "a directory with an OpenVINO model (openvino_model.xml and .bin)",
)
SNAPSHOTS = "snapshots"  # models--NAME/snapshots/REVISION, links into models--NAME/blobs
_NOT_A_MODEL = ("openvino_tokenizer", "openvino_detokenizer")


class ModelKind(StrEnum):
    """The kinds of model files that kvota reads."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    OPENVINO_IR = "openvino_ir"


def kind_of(path: Path) -> ModelKind:
    """What lies at `path`, judged by content for a file and by file names for a directory.

    A directory with both safetensors and an OpenVINO model counts as safetensors.
    Raises ModelError when there is nothing, UnsupportedModel (with what is supported) for another
    kind.
    """
    if path.is_dir():
        return _kind_of_directory(path)
    if not path.exists():
        raise ModelError(f"{path}: there is no such file or directory.")
    if not path.is_file():  # a pipe, which nobody may ever write to, or a device without an end
        raise unsupported(str(path), "neither a file nor a directory.", _ACCEPTED)
    if _first_bytes(path) == MAGIC:
        return ModelKind.GGUF
    if path.suffix == ".safetensors":
        raise unsupported(str(path), "a single safetensors file; give its directory.", _ACCEPTED)
    raise unsupported(str(path), "not a GGUF file.", _ACCEPTED)


def open_source(path: Path) -> FileSource:
    """Open a GGUF file or a Hugging Face directory; see `FileSource` for what that proves.

    An OpenVINO model has its graph already and is not a source of weights: UnsupportedModel.
    """
    match kind_of(path):
        case ModelKind.GGUF:
            return open_gguf(path)
        case ModelKind.SAFETENSORS:
            return open_safetensors(path)
        case ModelKind.OPENVINO_IR:
            raise unsupported(str(path), "an OpenVINO model holds no plain weights.", _ACCEPTED[:2])


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error


def _kind_of_directory(path: Path) -> ModelKind:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    if CONFIG in names and (has_safetensors or INDEX in names):
        return ModelKind.SAFETENSORS
    graphs = [name.removesuffix(".xml") for name in names if name.endswith(".xml")]
    if any(f"{graph}.bin" in names and graph not in _NOT_A_MODEL for graph in graphs):
        return ModelKind.OPENVINO_IR
    raise unsupported(str(path), _what_is_wrong(names, has_safetensors), _ACCEPTED)


def _what_is_wrong(names: list[str], has_safetensors: bool) -> str:
    """What an operator who meant a model here most likely has to change."""
    ggufs = [name for name in names if name.endswith(".gguf")]
    pickles = [
        name
        for name in names
        if name.endswith((".bin", ".pt", ".pth")) and not name.startswith("openvino")
    ]
    if len(ggufs) == 1:
        return f"a directory; give the GGUF file in it, {ggufs[0]}."
    if ggufs:
        return f"a directory with {len(ggufs)} GGUF files; give the file, such as {ggufs[0]}."
    if SNAPSHOTS in names:
        return f"a cache of Hugging Face's; give the directory in its {SNAPSHOTS}/."
    if has_safetensors:
        return f"the directory has safetensors, but no {CONFIG}."
    if pickles:
        return f"the weights are in {pickles[0]}, which is not read; convert them to safetensors."
    if CONFIG in names:
        return f"the directory has {CONFIG}, but no weights."
    return "the directory holds no model."
