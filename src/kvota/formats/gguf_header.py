"""The header of a GGUF file: what it says about the model, and where each tensor lies.

    magic "GGUF" · version u32 · tensor count u64 · key count u64
    keys:     name · type u32 · value                      a string is u64 length + UTF-8
    tensors:  name · rank u32 · sizes u64[rank] · type u32 · offset u64
    padding to `general.alignment` · tensor bytes

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
`gguf.GGUFReader` reads the same layout, but makes an array view of every vocabulary entry (seconds
for 50,000 tokens) and cannot read the keys of a file whose tensors are damaged.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvota.core.errors import ModelError, UnsupportedModel

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_RANK_MAX = 4  # ggml has no tensors of more dimensions
_NESTING_MAX = 4  # arrays of arrays are legal and unused
_NAME_BYTES_MAX = 1024  # of a key or tensor; ggml's own have 64 at most, and messages show them

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the header describes it. Nothing has been checked against the file's size."""

    name: str  # ggml's name, e.g. "blk.0.attn_q.weight"
    shape: tuple[int, ...]  # outermost first: ggml's sizes reversed
    ggml_type: int
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, Any]  # plain Python: str, int, float, bool, list
    tensors: Mapping[str, TensorEntry]


def read_header(path: Path) -> GgufHeader:
    """Read keys and tensor entries; the tensor bytes are not touched and may be missing.

    Raises ModelError when the header itself is damaged, UnsupportedModel for a version or byte
    order that kvota does not read.
    """
    with _open(path) as buffer:
        cursor = _Cursor(buffer, path)
        num_tensors = cursor.read_start()
        metadata = cursor.read_metadata(cursor.scalar("<Q"))
        tensors = cursor.read_tensors(num_tensors, _alignment(metadata, path))
    return GgufHeader(metadata, tensors)


def _open(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path}: the file is empty, so it is not a GGUF model.") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error


def _alignment(metadata: Mapping[str, Any], path: Path) -> int:
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment is {alignment!r}, which is no power of two.")
    return alignment


class _Cursor:
    """Reads the header front to back. Every read checks that the file is long enough."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self._buffer = buffer
        self._path = path
        self._at = 0
        self._reading = "its first bytes"

    def scalar(self, layout: str) -> int:
        value: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def read_start(self) -> int:
        """Check magic and version; the number of tensors."""
        if self._take(4) != MAGIC:
            raise ModelError(f"{self._path}: not a GGUF file (it does not start with 'GGUF').")
        version = self.scalar("<I")
        if version & 0xFFFF == 0:
            raise UnsupportedModel(f"{self._path}: big-endian GGUF. Supported: little-endian.")
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{self._path}: GGUF version {version}. Supported: versions 2 and 3."
            )
        return self.scalar("<Q")

    def read_metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            self._reading = f"key {index + 1} of {num_keys}"
            key = self._name()
            self._reading = f"the value of {key[:100]!r}"
            if key in metadata:
                raise ModelError(f"{self._path}: the key {key!r} appears twice.")
            metadata[key] = self._value(self.scalar("<I"))
        return metadata

    def read_tensors(self, num_tensors: int, alignment: int) -> dict[str, TensorEntry]:
        """All entries, with offsets counted from the start of the file."""
        entries = [self._tensor(index, num_tensors) for index in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for entry in entries:
            if entry.name in tensors:
                raise ModelError(f"{self._path}: the tensor {entry.name!r} appears twice.")
            tensors[entry.name] = TensorEntry(
                entry.name, entry.shape, entry.ggml_type, start + entry.offset
            )
        return tensors

    def _tensor(self, index: int, num_tensors: int) -> TensorEntry:
        self._reading = f"the entry of tensor {index + 1} of {num_tensors}"
        name = self._name()
        rank = self.scalar("<I")
        if rank > _RANK_MAX:
            raise ModelError(
                f"{self._path}: tensor {name!r} claims {rank} dimensions, over {_RANK_MAX}."
            )
        sizes = struct.unpack(f"<{rank}Q", self._take(8 * rank))
        return TensorEntry(name, tuple(reversed(sizes)), self.scalar("<I"), self.scalar("<Q"))

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < _NESTING_MAX:
            return self._array(depth + 1)
        return self._scalars(kind, 1)[0]

    def _array(self, depth: int) -> list[Any]:
        kind = self.scalar("<I")
        length = self.scalar("<Q")
        if kind == _STRING:
            return [self._string() for _ in range(length)]
        if kind == _ARRAY:
            return [self._value(kind, depth) for _ in range(length)]
        return self._scalars(kind, length)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise ModelError(f"{self._path}: {self._reading} has the unknown type {kind}.")
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values

    def _name(self) -> str:
        name = self._string()
        if len(name.encode()) > _NAME_BYTES_MAX:
            raise ModelError(
                f"{self._path}: {self._reading} has a name of over {_NAME_BYTES_MAX} bytes: the "
                "file is damaged. Fetch it again."
            )
        return name

    def _string(self) -> str:
        raw = self._take(self.scalar("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self._path}: {self._reading} is not valid UTF-8.") from None

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._buffer):
            raise ModelError(
                f"{self._path}: the file ends inside {self._reading}: it is truncated or damaged "
                f"({len(self._buffer)} bytes). Fetch it again."
            )
        taken = self._buffer[self._at : end]
        self._at = end
        return taken
