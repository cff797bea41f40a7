"""What `kvota plan` is asked, from the words on the command line, and the variations of --what-if.

kvota plan llama-3.1-8b --hardware l40s --what-if weights=awq --what-if hardware=h100-sxm,users=64
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvota.core.errors import ConfigError
from kvota.kv.layout import CacheType
from kvota.tools.plan import checkpoint
from kvota.tools.plan.catalogue import CATALOGUE, HERE, known_device, known_entry, known_model
from kvota.tools.plan.gguf_shape import read_gguf
from kvota.tools.plan.hardware import Hardware
from kvota.tools.plan.here import this_machine
from kvota.tools.plan.hf_shape import config_values, read_config
from kvota.tools.plan.methods import Method, named_method
from kvota.tools.plan.recommend import Recommendation, Wanted, recommend
from kvota.tools.plan.shape import ModelShape
from kvota.tools.plan.workload import Workload

_CACHE_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"fp8": "f8", "fp16": "f16", "bf16": "f16", "int8": "u8", "auto": "f16"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`weights` is a name, because what it means depends on the hardware."""

    shape: ModelShape
    stored: Method | None  # the weights as they lie in a GGUF file or a quantized checkpoint
    hardware: Hardware
    workload: Workload = field(default_factory=Workload)
    weights: str | None = None
    wanted: Wanted = field(default_factory=Wanted)

    def answer(self) -> Recommendation:
        """Raises ConfigError or InsufficientMemory."""
        if not self.hardware.is_gpu:
            self._require_readable()
        wanted = replace(self.wanted, method=self._method(), checkpoint=self._checkpoint())
        return recommend(self.shape, self.hardware, self.workload, wanted)

    def _method(self) -> Method | None:
        if self.weights is not None:
            method = named_method(self.weights, self.hardware)
            if self._has_quantized_checkpoint and self.hardware.is_gpu:
                return replace(method, flags=(), needs_checkpoint=True)
            return method
        return self.stored if self.hardware.is_gpu and not self._has_quantized_checkpoint else None

    def _checkpoint(self) -> Method | None:
        if self.stored is None or self.weights is not None or not self._has_quantized_checkpoint:
            return None
        return checkpoint.on(self.hardware, self.stored)

    @property
    def _has_quantized_checkpoint(self) -> bool:
        return self.stored is not None and self.stored.name == checkpoint.CHECKPOINT

    def _require_readable(self) -> None:
        """Raises ConfigError for a checkpoint that kvota's own engine does not read."""
        is_on_disk = not self.shape.origin.startswith(CATALOGUE)
        if self.stored is not None and self._has_quantized_checkpoint and is_on_disk:
            raise ConfigError(
                f"{self.shape.origin}: the checkpoint is quantized ({self.stored.title}). kvota's "
                "own engine, which serves on a CPU, reads F32, F16 and BF16, and GGUF files. Name "
                "one of those, or a GPU with --hardware."
            )


def read_model(name: str) -> tuple[ModelShape, Method | None]:
    """A GGUF file, a config.json or its directory, or a name of the catalogue.

    Raises ModelError naming the field that is wrong, or ConfigError with the nearest names.
    """
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return _with_checkpoint(read_config(path), config_values(path))
    if path.is_file() or path.suffix == ".gguf":
        return read_gguf(path)
    return _with_checkpoint(known_model(name), known_entry(name)[1].config)


def _with_checkpoint(
    shape: ModelShape, values: Mapping[str, Any]
) -> tuple[ModelShape, Method | None]:
    method = checkpoint.stored_method(values, shape.origin)
    notes = (*shape.notes, *checkpoint.note(values, method))
    return replace(shape, notes=notes), method


def read_hardware(name: str) -> Hardware:
    """A device of the catalogue, or this machine, which is then measured."""
    return this_machine() if name.lower() == HERE else known_device(name)


def cache_type(name: str) -> CacheType:
    """Of kvota's names and vLLM's. Raises ConfigError."""
    return CacheType.named(_CACHE_NAMES.get(name.lower(), name.lower()))


def varied(question: Question, text: str) -> Question:
    """The question with some answers given otherwise: "weights=awq,tp=2".

    Raises ConfigError naming what is not understood.
    """
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise ConfigError(f"--what-if {text}: write {part.strip()!r} as name=value.")
        question = _changed(question, name.strip(), value.strip())
    return question


def _changed(question: Question, name: str, value: str) -> Question:
    change = _CHANGES.get(name)
    if change is None:
        near = difflib.get_close_matches(name, list(_CHANGES), n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(_CHANGES)}."
        raise ConfigError(f"--what-if cannot change {name!r}. {hint}")
    try:
        return change(question, value)
    except ValueError as error:
        raise ConfigError(f"--what-if {name}={value}: that is no number.") from error


def _model(question: Question, value: str) -> Question:
    shape, stored = read_model(value)
    return replace(question, shape=shape, stored=stored)


def _workload(name: str, convert: Callable[[str], Any]) -> Callable[[Question, str], Question]:
    def change(question: Question, value: str) -> Question:
        workload = replace(question.workload, **{name: convert(value)})
        return replace(question, workload=workload)

    return change


def _wanted(name: str, convert: Callable[[str], Any]) -> Callable[[Question, str], Question]:
    def change(question: Question, value: str) -> Question:
        return replace(question, wanted=replace(question.wanted, **{name: convert(value)}))

    return change


_CHANGES: Final[Mapping[str, Callable[[Question, str], Question]]] = MappingProxyType(
    {
        "model": _model,
        "hardware": lambda question, value: replace(question, hardware=read_hardware(value)),
        "weights": lambda question, value: replace(question, weights=value),
        "tp": _wanted("tensor_parallel", int),
        "kv": _wanted("cache_type", cache_type),
        "devices": _wanted("devices_max", int),
        "users": _workload("users", int),
        "prompt": _workload("prompt_tokens", int),
        "output": _workload("output_tokens", int),
        "longest": _workload("longest_tokens", int),
        "ttft": _workload("ttft_s", float),
        "tpot": _workload("tpot_s", float),
    }
)
