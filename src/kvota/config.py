"""Settings: built-in defaults, then `kvota.toml`, then `KVOTA_*` variables, then flags.

Every name is unique, so a setting is written the same everywhere: `max_running_requests` in the
file's `[engine]` section, `KVOTA_MAX_RUNNING_REQUESTS` in the environment,
`--max-running-requests` on the command line. Unknown names are refused with the nearest valid
one, and relations between settings are checked, before anything starts.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvota.core.errors import ConfigError

ENVIRONMENT_PREFIX = "KVOTA_"
# Read by other parts of kvota, not settings of a server.
OTHER_VARIABLES = frozenset({"KVOTA_CONFIG"})

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": 2**10,
    "m": 10**6,
    "mb": 10**6,
    "mib": 2**20,
    "g": 10**9,
    "gb": 10**9,
    "gib": 2**30,
}


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[model]`: what is served, and how it is held in memory."""

    model: str = "smollm2-135m-instruct"  # a known name, a GGUF file, or a directory
    served_name: str | None = None  # how clients call it; None: derived from `model`
    cache_dir: str | None = None  # fetched models; None: the user's cache directory
    weights: Literal["auto", "f32", "f16", "int8", "int4"] = "auto"
    kv_cache_dtype: Literal["f16", "u8", "f32"] = "f16"
    threads: int | None = None  # None: the cores this process may use
    max_model_len: int | None = None  # tokens of prompt + output; None: the model's own limit


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine]`: memory and the shape of a step."""

    kv_memory: str | None = None  # for example "2GiB": the KV cache's size, fixed by hand
    kv_budget_ratio: float = 0.85  # share of the memory that is left which the KV cache may take
    max_num_batched_tokens: int = 512  # per step
    max_running_requests: int = 64  # choices running at once
    long_prefill_share: float = 0.5  # of a step, for long prompts while others want the step too
    prefix_cache: bool = True


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[server]`: the HTTP side. Times are seconds, sizes bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    cors_origins: tuple[str, ...] = ()
    max_waiting_queue: int = 256  # choices waiting before 503 queue_full
    queue_timeout_s: float = 30.0
    request_timeout_s: float = 120.0
    heartbeat_s: float = 10.0
    drain_timeout_s: float = 30.0
    stuck_after_s: float = 30.0  # no step for so long with work waiting: /ready says 503
    max_body_bytes: int = 8 * 2**20


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    server: ServerSettings = ServerSettings()


SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "model": ModelSettings,
    "engine": EngineSettings,
    "server": ServerSettings,
}
_SECTION_OF = {
    field.name: section
    for section, struct in SECTIONS.items()
    for field in msgspec.structs.fields(struct)
}


def load(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The settings of one process. Raises ConfigError, which names the setting and its source.

    `flags` are values by setting name; None means the flag was not given.
    """
    settings: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    if file is not None:
        _take_file(settings, file)
    _take_environment(settings, environment or {})
    for name, value in (flags or {}).items():
        if value is not None:
            settings[_section(name, _SECTION_OF, "flag")][name] = value
    try:
        config = msgspec.convert(settings, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Setting refused: {error}.") from error
    _check(config)
    return config


def parse_size(text: str, setting: str) -> int:
    """Bytes of "800MB", "2GiB" or "1.5g". Raises ConfigError naming the setting."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ConfigError(f'{setting} is "{text}", which is no size: write it like 800MB or 2GiB.')
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def _take_file(settings: dict[str, dict[str, Any]], file: Path) -> None:
    try:
        sections = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}.") from error
    for section, values in sections.items():
        if section not in SECTIONS or not isinstance(values, dict):
            raise ConfigError(f"{file}: unknown section [{section}]{_nearest(section, SECTIONS)}")
        for name, value in values.items():
            if _section(name, _SECTION_OF, f"{file}, setting") != section:
                raise ConfigError(f"{file}: {name} belongs into [{_SECTION_OF[name]}].")
            settings[section][name] = value


def _take_environment(settings: dict[str, dict[str, Any]], environment: Mapping[str, str]) -> None:
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        section = _section(name, _SECTION_OF, f"variable {variable}:")
        settings[section][name] = value.split(",") if name == "cors_origins" else value


def _section(name: str, sections: Mapping[str, str], source: str) -> str:
    if name not in sections:
        raise ConfigError(f"Unknown {source} {name}{_nearest(name, sections)}")
    return sections[name]


def _nearest(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else "."


def _check(config: Config) -> None:
    model, engine, server = config.model, config.engine, config.server
    positive = {
        "threads": model.threads,
        "max_model_len": model.max_model_len,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_running_requests": engine.max_running_requests,
        "request_timeout_s": server.request_timeout_s,
        "queue_timeout_s": server.queue_timeout_s,
        "heartbeat_s": server.heartbeat_s,
        "stuck_after_s": server.stuck_after_s,
        "max_body_bytes": server.max_body_bytes,
    }
    for name, value in positive.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}; it must be more than 0.")
    for name, share in {
        "kv_budget_ratio": engine.kv_budget_ratio,
        "long_prefill_share": engine.long_prefill_share,
    }.items():
        if not 0 < share <= 1:
            raise ConfigError(f"{name} is {share}; it must be more than 0 and at most 1.")
    if not 0 <= server.port <= 65535:
        raise ConfigError(f"port is {server.port}; it must be 0 (any free one) to 65535.")
    if server.max_waiting_queue < 0 or server.drain_timeout_s < 0:
        raise ConfigError("max_waiting_queue and drain_timeout_s must not be negative.")
    if engine.max_num_batched_tokens < engine.max_running_requests:
        raise ConfigError(
            f"max_num_batched_tokens ({engine.max_num_batched_tokens}) must be at least "
            f"max_running_requests ({engine.max_running_requests}): every running request takes "
            "one token of each step."
        )
    if engine.kv_memory is not None:
        parse_size(engine.kv_memory, "kv_memory")
