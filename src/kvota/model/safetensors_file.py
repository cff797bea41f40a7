"""One .safetensors file: its header, and its tensors one at a time.

    header length u64 · JSON {name: {dtype, shape, data_offsets}} · tensor bytes

Layout: https://github.com/huggingface/safetensors#format. Read here rather than through the
`safetensors` package because that cannot hand BF16 to numpy.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvota.core.errors import ModelError
from kvota.model.inventory import check_numbers, unsupported

# BF16 is the upper half of an F32, so its bits are read as whole numbers and shifted.
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_HEADER_BYTES_MAX = 100_000_000  # the format's own bound
_COMPARE_BYTES = 16 * 2**20
_SIZE_MAX = 2**63 - 1  # JSON bounds no number
_NAME_CHARS_MAX = 1024  # messages show names


@dataclass(frozen=True, slots=True)
class SafetensorsWeight:
    """One tensor, still in its file. `offset` is in bytes from the start of the file."""

    path: Path
    name: str
    stored_as: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def check(self) -> None:
        """Raises UnsupportedModel when the type is none that can be read."""
        if self.stored_as not in _DTYPES:
            raise unsupported(
                str(self.path), f"the tensor {self.name} is stored as {self.stored_as}.", _DTYPES
            )

    def read(self) -> npt.NDArray[np.float32]:
        self.check()
        dtype = _DTYPES[self.stored_as]
        count = self.num_bytes // dtype.itemsize
        try:
            values = np.fromfile(self.path, dtype, count, offset=self.offset)
        except OSError as error:
            raise ModelError(f"{self.path}: cannot read {self.name}: {error}.") from error
        if values.size != count:
            raise ModelError(f"{self.path}: the file ends inside the tensor {self.name}.")
        if self.stored_as == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(all="ignore"):  # what is no number is refused
            values = values.astype(np.float32, copy=False).reshape(self.shape)
        check_numbers(values, str(self.path), self.name)
        return values

    def has_values_of(self, other: "SafetensorsWeight") -> bool:
        """Whether both hold the same numbers. Of equal types only a few megabytes at a time."""
        if self.shape != other.shape:
            return False
        if self.stored_as != other.stored_as:
            return bool(np.array_equal(self.read(), other.read()))
        return all(
            self._bytes(start).tobytes() == other._bytes(start).tobytes()
            for start in range(0, self.num_bytes, _COMPARE_BYTES)
        )

    def _bytes(self, start: int) -> npt.NDArray[np.uint8]:
        count = min(_COMPARE_BYTES, self.num_bytes - start)
        return np.fromfile(self.path, np.uint8, count, offset=self.offset + start)


def read_tensors(path: Path) -> dict[str, SafetensorsWeight]:
    """The file's tensors by name. Each is proven to lie inside the file and to have its size.

    Raises ModelError naming file and tensor. Types are not judged here: an unused tensor may have
    any.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(file_bytes - 8, _HEADER_BYTES_MAX):
                raise ModelError(_not_a_header(path, length, file_bytes))
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: its header is not valid JSON: {error}.") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: its header is no table of tensors.")
    return {
        name: _weight(path, name, entry, 8 + length, file_bytes)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _not_a_header(path: Path, length: int, file_bytes: int) -> str:
    if length.to_bytes(8, "little") == b"version ":
        return f"{path}: is a Git LFS pointer, not the weights. Fetch the real file (git lfs pull)."
    return (
        f"{path}: not a safetensors file, or truncated: it claims a header of {length} bytes and "
        f"has {file_bytes} in all."
    )


def _weight(path: Path, name: str, entry: Any, start: int, file_bytes: int) -> SafetensorsWeight:
    try:
        stored_as, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
        is_bounded = max(*shape, begin, end) <= _SIZE_MAX and len(name) <= _NAME_CHARS_MAX
    except (KeyError, TypeError, ValueError, OverflowError):
        is_bounded = False
    if not is_bounded:
        shown = name[:_NAME_CHARS_MAX]
        raise ModelError(f"{path}: the header's entry of {shown} is damaged. Fetch it again.")
    if start + end > file_bytes:
        raise ModelError(
            f"{path}: the tensor {name} ends at byte {start + end}, but the file has {file_bytes}: "
            "it is truncated. Fetch it again."
        )
    dtype = _DTYPES.get(stored_as)
    wanted = None if dtype is None else math.prod(shape) * dtype.itemsize
    if not 0 <= begin <= end or min(shape, default=0) < 0 or wanted not in (None, end - begin):
        raise ModelError(
            f"{path}: the tensor {name} of shape {list(shape)} in {stored_as} takes {wanted} "
            f"bytes, but the header gives it {end - begin}."
        )
    return SafetensorsWeight(path, name, stored_as, shape, start + begin, end - begin)
