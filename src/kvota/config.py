"""Settings: built-in defaults, then `kvota.toml`, then `KVOTA_*` variables, then flags.

Every name is unique, so a setting is written the same everywhere: `max_running_requests` in the
file's `[engine]` section, `KVOTA_MAX_RUNNING_REQUESTS` in the environment,
`--max-running-requests` on the command line. Unknown names are refused with the nearest valid
one, and relations between settings are checked, before anything starts.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvota.core.errors import ConfigError
from kvota.node.memory import parse_size
from kvota.node.options import (
    DeskOptions,
    EngineSettings,
    ModelSettings,
    ServerSettings,
    desk_settings,
)

ENVIRONMENT_PREFIX = "KVOTA_"
# Read by other parts of kvota, not settings of a server.
OTHER_VARIABLES = frozenset({"KVOTA_CONFIG", "KVOTA_URL", "KVOTA_API_KEY"})


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    desk: DeskOptions = DeskOptions()
    server: ServerSettings = ServerSettings()


SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "model": ModelSettings,
    "engine": EngineSettings,
    "desk": DeskOptions,
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
    model, engine, desk, server = config.model, config.engine, config.desk, config.server
    positive = {
        "threads": model.threads,
        "max_model_len": model.max_model_len,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_running_requests": engine.max_running_requests,
        "request_timeout_s": desk.request_timeout_s,
        "queue_timeout_s": desk.queue_timeout_s,
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
    if server.drain_timeout_s < 0:
        raise ConfigError("drain_timeout_s must not be negative.")
    desk_settings(desk, engine.max_running_requests)
    if engine.max_num_batched_tokens <= engine.max_running_requests:
        raise ConfigError(
            f"max_num_batched_tokens ({engine.max_num_batched_tokens}) must be more than "
            f"max_running_requests ({engine.max_running_requests}): every running request takes "
            "one token of each step, and prompts need the rest."
        )
    if engine.kv_memory is not None:
        parse_size(engine.kv_memory, "kv_memory")
