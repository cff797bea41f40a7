"""The shipped tables: well-known models (`models.toml`) and devices (`hardware.toml`)."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Final, TypeVar

import msgspec

from kvota.core.errors import ConfigError
from kvota.tools.plan.hardware import Arithmetic, Hardware
from kvota.tools.plan.hf_shape import shape_of
from kvota.tools.plan.shape import ModelShape

HERE: Final = "here"  # the hardware name that means: measure this machine
CATALOGUE: Final = "catalogue, from "  # begins the origin of a shape that was found here
_MIB: Final = 2**20
# What publishers append to a name without changing a size.
_SUFFIXES: Final = ("-instruct", "-chat", "-it", "-hf", "-base")
T = TypeVar("T", bound=msgspec.Struct)


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of models.toml."""

    repo: str
    parameters: int
    config: dict[str, Any]


class HardwareEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of hardware.toml: MiB, GB/s, TFLOPS."""

    title: str
    source: str
    memory_mib: int
    bandwidth: float
    compute: dict[Arithmetic, float]
    link: float


def models() -> Mapping[str, ModelEntry]:
    return _table("models.toml", ModelEntry)


def devices() -> Mapping[str, HardwareEntry]:
    return _table("hardware.toml", HardwareEntry)


def known_model(name: str) -> ModelShape:
    """By its name here or its repository's, in any case, with or without "-instruct".

    Raises ConfigError with the nearest names.
    """
    key, entry = known_entry(name)
    return shape_of(entry.config, name=key, origin=f"{CATALOGUE}{entry.repo}")


def known_entry(name: str) -> tuple[str, ModelEntry]:
    """Its name here, and what the table says. Raises ConfigError with the nearest names."""
    entries = models()
    by_name = {_plain(key): key for key in entries}
    by_name |= {_plain(entry.repo.split("/")[1]): key for key, entry in entries.items()}
    key = by_name.get(_plain(name.split("/")[-1]))
    if key is None:
        raise ConfigError(
            f"{name!r} is neither a path (config.json, its directory, or a GGUF file) nor a known "
            f"model. {_nearest(name, entries)}"
        )
    return key, entries[key]


def known_device(name: str) -> Hardware:
    """Raises ConfigError with the names there are."""
    entries = devices()
    entry = entries.get(name.lower())
    if entry is None:
        raise ConfigError(
            f"{name!r} is no known hardware: use {', '.join(entries)}, or {HERE!r} for this "
            "machine."
        )
    return Hardware(
        name=name.lower(),
        title=entry.title,
        source=entry.source,
        memory_bytes=entry.memory_mib * _MIB,
        memory_from="the device",
        bandwidth=entry.bandwidth * 1e9,
        compute={arithmetic: rate * 1e12 for arithmetic, rate in entry.compute.items()},
        link=entry.link * 1e9,
    )


def _table(file: str, entry: type[T]) -> dict[str, T]:
    text = resources.files("kvota.tools.plan").joinpath(file).read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, entry])  # type: ignore[valid-type]


def _plain(name: str) -> str:
    name = name.lower()
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name.removeprefix("meta-")


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(_plain(name), list(known), n=3, cutoff=0.5)
    if near:
        return f"Did you mean {', '.join(near)}?"
    return f"Known: {', '.join(known)}."
