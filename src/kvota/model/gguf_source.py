"""A GGUF model, in one file or in parts, as weights with Hugging Face's names and layout.

llama.cpp's converter stores the rows of q and k of Llama-family models interleaved: within a head,
row i and row i + half become neighbours, so that rope can turn neighbouring pairs. kvota's graph
turns (i, i + half), as Hugging Face's models do, so the rows are put back when they are read.
(`LlamaModel.permute` in convert_hf_to_gguf.py of llama.cpp.) Qwen's rows are stored as they were.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvota.core.errors import ModelError
from kvota.formats.gguf_header import TensorEntry
from kvota.formats.gguf_parts import GgufModel, read_keys, read_model
from kvota.model.architecture import Architecture
from kvota.model.gguf_config import FAMILIES, INTERLEAVED, architecture_of
from kvota.model.gguf_levels import has_levels, levels_of
from kvota.model.inventory import (
    FileSource,
    check_numbers,
    take_expected,
    unsupported,
    unused_warning,
)
from kvota.model.levels import Levels

_Number = TypeVar("_Number", bound=np.generic)

_OUTER: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGML_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """The model's keys as plain Python values. Works where weights are missing or damaged.

    Raises ModelError when the file is no GGUF file or its header is damaged.
    """
    return read_keys(path)


def open_gguf(path: Path) -> FileSource:
    """Open a model and prove that it is whole, without reading any matrix.

    `path` is its file, or any of its parts.

    Raises UnsupportedModel for a kind that kvota cannot run, ModelError for a damaged file.
    """
    model = read_model(path)
    origin = str(path)
    _check_has_weights(model, origin)
    entries = {
        name: entry
        for entry in model.tensors.values()
        if (name := hugging_face_name(entry.name)) is not None
    }
    shapes = {name: entry.shape for name, entry in entries.items()}
    architecture = architecture_of(model.metadata, shapes, _rope_factors(model), origin)
    found = {
        name: GgufWeight(
            model.files[entry.name], name, entry, _interleaved_heads(name, architecture)
        )
        for name, entry in entries.items()
    }
    weights = take_expected(architecture, found, origin, ggml_name)
    file_bytes = {file: file.stat().st_size for file in set(model.files.values())}
    for name in weights:
        found[name].check(file_bytes[found[name].path])
    unused = model.tensors.keys() - {entries[name].name for name in weights}
    return FileSource(origin, architecture, weights, unused_warning(unused, origin))


def hugging_face_name(name: str) -> str | None:
    """Hugging Face's name of a ggml tensor; None for one that these architectures do not have."""
    if name in _OUTER:
        return _OUTER[name]
    match = _GGML_LAYER.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return None
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def ggml_name(name: str) -> str:
    """The inverse of `hugging_face_name`, for the names that it gives."""
    for outer, theirs in _OUTER.items():
        if theirs == name:
            return outer
    match = _HF_LAYER.fullmatch(name)
    assert match is not None, f"{name} is no tensor of a known architecture"
    inner = next(ours for ours, theirs in _IN_LAYER.items() if theirs == match[2])
    return f"blk.{match[1]}.{inner}.{match[3]}"


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """One tensor of a GGUF file. `interleaved_heads`: heads whose row pairs must be put back."""

    path: Path
    name: str
    entry: TensorEntry
    interleaved_heads: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def stored_as(self) -> str:
        return _type_name(self.entry.ggml_type)

    def check(self, file_bytes: int) -> None:
        """Raises when the type cannot be read or the file ends before the tensor does."""
        if not _can_dequantize(self.entry.ggml_type):
            raise unsupported(
                str(self.path),
                f"the tensor {self.entry.name} has the quantisation type {self.stored_as}.",
                (kind.name for kind in GGMLQuantizationType if _can_dequantize(kind)),
            )
        end = self.entry.offset + self._num_bytes()
        if end > file_bytes:
            raise ModelError(
                f"{self.path}: the tensor {self.entry.name} ends at byte {end}, but the file has "
                f"{file_bytes}: it is truncated. Fetch it again."
            )

    def read(self) -> npt.NDArray[np.float32]:
        kind = GGMLQuantizationType(self.entry.ggml_type)
        with np.errstate(all="ignore"):  # what is no number is refused
            values = self._in_order(dequantize(self._rows(), kind).reshape(self.shape))
            values = np.ascontiguousarray(values, dtype=np.float32)
        check_numbers(values, str(self.path), self.entry.name)
        return values

    @property
    def has_levels(self) -> bool:
        return len(self.shape) == 2 and has_levels(self.entry.ggml_type)

    def read_levels(self) -> Levels:
        with np.errstate(all="ignore"):
            stored = levels_of(self._rows(), self.entry.ggml_type)
        for values in (stored.steps, stored.least):
            check_numbers(values, str(self.path), self.entry.name)
        return Levels(
            self._in_order(stored.levels),
            self._in_order(stored.steps),
            self._in_order(stored.least),
        )

    def _in_order(self, rows: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        heads = self.interleaved_heads
        return rows if heads is None else deinterleave(rows, heads)

    def _rows(self) -> npt.NDArray[np.uint8]:
        """[rows, bytes of a row], as they lie in the file."""
        num_bytes = self._num_bytes()
        try:
            raw = np.fromfile(self.path, np.uint8, num_bytes, offset=self.entry.offset)
        except OSError as error:
            raise ModelError(f"{self.path}: cannot read {self.entry.name}: {error}.") from error
        if raw.size != num_bytes:
            raise ModelError(f"{self.path}: the file ends inside the tensor {self.entry.name}.")
        return raw.reshape(self._num_rows(), self._row_bytes())

    def _row_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.entry.ggml_type)]
        row = self.shape[-1] if self.shape else 1
        if row % block:
            raise ModelError(
                f"{self.path}: the tensor {self.entry.name} has rows of {row} elements, which "
                f"{self.stored_as} cannot hold in blocks of {block}."
            )
        return int(row // block * block_bytes)

    def _num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    def _num_bytes(self) -> int:
        return self._num_rows() * self._row_bytes()


def deinterleave(values: npt.NDArray[_Number], num_heads: int) -> npt.NDArray[_Number]:
    """Undo the converter's order of rows: pairs (2i, 2i + 1) of a head become (i, i + half)."""
    half = values.shape[0] // num_heads // 2
    pairs = values.reshape(num_heads, half, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _interleaved_heads(name: str, architecture: Architecture) -> int | None:
    if architecture.family not in INTERLEAVED:
        return None
    if ".self_attn.q_proj." in name:
        return architecture.num_heads
    return architecture.num_kv_heads if ".self_attn.k_proj." in name else None


def _check_has_weights(model: GgufModel, origin: str) -> None:
    if not model.tensors:
        raise ModelError(
            f"{origin}: the file has no weights, only a vocabulary. Give the whole model's file."
        )
    scaled = [name for name in model.tensors if name.endswith(".scale")]
    if scaled:
        raise unsupported(
            origin,
            f"the tensor {scaled[0]} scales another tensor.",
            ["types that carry their scales in their blocks"],
        )


def _rope_factors(model: GgufModel) -> dict[str, tuple[float, ...]]:
    """The divisors of rope's frequencies, in the families where llama.cpp reads them."""
    if FAMILIES.get(str(model.metadata.get("general.architecture"))) not in INTERLEAVED:
        return {}
    factors = {}
    for name in _ROPE_FACTORS:
        if entry := model.tensors.get(name):
            weight = GgufWeight(model.files[name], name, entry)
            weight.check(weight.path.stat().st_size)
            factors[name] = tuple(float(value) for value in weight.read().ravel())
    return factors


def _type_name(ggml_type: int) -> str:
    try:
        return str(GGMLQuantizationType(ggml_type).name)
    except ValueError:
        return f"number {ggml_type}"


def _can_dequantize(ggml_type: int) -> bool:
    """Ask the gguf package by handing it one block of zeros; it publishes no list."""
    try:
        kind = GGMLQuantizationType(ggml_type)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, NotImplementedError):
        return False
    return True
