"""Settings: built-in defaults, then `kvota.toml`, then `KVOTA_*` variables, then flags.

Every name is unique, so a setting is written the same everywhere: `max_running_requests` in the
file's `[engine]` section, `KVOTA_MAX_RUNNING_REQUESTS` in the environment,
`--max-running-requests` on the command line. Unknown names are refused with the nearest valid
one, and relations between settings are checked, before anything starts. Whatever is refused is
called what the operator wrote: the variable, the flag, or the file's section and name.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

from kvota.core.errors import ConfigError
from kvota.gateway.settings import Fleet, GatewaySettings, read_fleet
from kvota.node.options import (
    DeskOptions,
    EmbeddingOptions,
    EngineSettings,
    ModelSettings,
    ServerSettings,
    desk_settings,
)
from kvota.sizing.memory import parse_size

ENVIRONMENT_PREFIX: Final = "KVOTA_"
# Read by other parts of kvota, not settings of a server.
OTHER_VARIABLES: Final = frozenset({"KVOTA_CONFIG", "KVOTA_URL", "KVOTA_API_KEY"})
SHOWN_CHARACTERS_MAX: Final = 80


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    desk: DeskOptions = DeskOptions()
    embeddings: EmbeddingOptions = EmbeddingOptions()
    server: ServerSettings = ServerSettings()
    gateway: GatewaySettings = GatewaySettings()
    fleet: Fleet = Fleet()  # [[backends]] and [[models]], which only a file can hold


TABLES: Final = frozenset({"backends", "models"})
SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "model": ModelSettings,
    "engine": EngineSettings,
    "desk": DeskOptions,
    "embeddings": EmbeddingOptions,
    "server": ServerSettings,
    "gateway": GatewaySettings,
}
_SECTION_OF: Final = {
    field.name: section
    for section, struct in SECTIONS.items()
    for field in msgspec.structs.fields(struct)
}
_TYPE_OF: Final = {
    field.name: field.type
    for struct in SECTIONS.values()
    for field in msgspec.structs.fields(struct)
}
_WANTED: Final = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# Kubernetes sets these in every pod beside a Service called kvota, for example
# KVOTA_PORT=tcp://10.0.0.7:8000. They look like our settings and are none.
_KUBERNETES_NAME: Final = re.compile(r"KVOTA_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP))")
_KUBERNETES_VALUE: Final = re.compile(r"(tcp|udp)://")
_KUBERNETES_ADVICE: Final = (
    " Kubernetes sets it for a Service called kvota: put `enableServiceLinks: false` into the pod."
)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value somebody set. `label` is what its author calls it, as the subject of a sentence."""

    value: Any
    label: str


def load(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The settings of one process. Raises ConfigError, which names the setting and its source.

    `flags` are values by setting name; None means the flag was not given.
    """
    content = _read(file) if file is not None else {}
    given = _from_file(file, content) if file is not None else {}
    given |= _from_environment(environment or {})
    given |= _from_flags(flags or {})
    settings: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, one in given.items():
        settings[_SECTION_OF[name]][name] = _converted(name, one)
    config = msgspec.convert(settings, Config)
    tables = {name: rows for name, rows in content.items() if name in TABLES}
    config = msgspec.structs.replace(config, fleet=read_fleet(tables, str(file)))
    _check(config, _Labels({name: one.label for name, one in given.items()}))
    return config


def _from_file(file: Path, content: Mapping[str, Any]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for section, values in content.items():
        if section in TABLES:
            continue
        if not isinstance(values, dict):
            raise ConfigError(_outside(file, section))
        if section not in SECTIONS:
            raise ConfigError(f"{file}: unknown section [{section}]{_nearest(section, SECTIONS)}")
        for name, value in values.items():
            if name not in _SECTION_OF:
                near = _nearest(name, _SECTION_OF)
                raise ConfigError(f"{file}: unknown setting {name} in [{section}]{near}")
            if _SECTION_OF[name] != section:
                raise ConfigError(
                    f"{file}: {name} is in [{section}]; it belongs into [{_SECTION_OF[name]}]."
                )
            given[name] = _Given(value, f"{file}: {name} in [{section}]")
    return given


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}.") from error


def _outside(file: Path, name: str) -> str:
    """What to say of a value that stands above the first section."""
    if name in SECTIONS:
        return f"{file}: {name} is a section: write [{name}] and its settings below."
    if name in _SECTION_OF:
        return f"{file}: {name} stands in no section; it belongs into [{_SECTION_OF[name]}]."
    return f"{file}: unknown setting {name}{_nearest(name, _SECTION_OF)}"


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if _KUBERNETES_NAME.match(variable) or _KUBERNETES_VALUE.match(value):
            raise ConfigError(f'{variable} is "{_cut(value)}", no setting.{_KUBERNETES_ADVICE}')
        if name not in _SECTION_OF:
            variables = [ENVIRONMENT_PREFIX + known.upper() for known in _SECTION_OF]
            raise ConfigError(f"Unknown variable {variable}{_nearest(variable, variables)}")
        given[name] = _Given(
            value.split(",") if get_origin(_TYPE_OF[name]) is tuple else value, variable
        )
    return given


def _from_flags(flags: Mapping[str, Any]) -> dict[str, _Given]:
    labels = {"model": "MODEL", "cors_origins": "--cors-origin"}
    return {
        name: _Given(value, labels.get(name, "--" + name.replace("_", "-")))
        for name, value in flags.items()
        if value is not None
    }


def _converted(name: str, given: _Given) -> Any:
    """The value in its setting's type. The environment has only text, so "8000" is a number."""
    try:
        return msgspec.convert(given.value, _TYPE_OF[name], strict=False)
    except msgspec.ValidationError as error:
        wanted = _wanted(_TYPE_OF[name])
        raise ConfigError(
            f"{given.label} is {_shown(given.value)}; it must be {wanted}."
        ) from error


def _wanted(kind: Any) -> str:
    """A type in an operator's words."""
    if isinstance(kind, UnionType):  # "or None" is what a setting is when nobody sets it
        [kind] = [one for one in get_args(kind) if one is not NoneType]
    origin = get_origin(kind)
    if origin is Literal:
        *others, last = get_args(kind)
        return f"{', '.join(others)} or {last}"
    if origin is tuple:
        return "a list of texts"
    if origin is dict:
        return "a table of numbers, which only a file can hold"
    return _WANTED[kind]


def _shown(value: Any) -> str:
    """A value as its author wrote it, more or less."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{_cut(value)}"' if isinstance(value, str) else _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + "…"


def _nearest(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else "."


class _Labels(dict[str, str]):
    """What to call a setting in a sentence: as its author did, or plainly when it is a default."""

    def __missing__(self, name: str) -> str:
        return name


def _check(config: Config, labels: _Labels) -> None:
    _check_each(config, labels)
    engine = config.engine
    _check_desk(config.desk, engine.max_running_requests, labels)
    if engine.max_num_batched_tokens <= engine.max_running_requests:
        raise ConfigError(
            f"{labels['max_num_batched_tokens']} is {engine.max_num_batched_tokens}; it must be "
            f"more than {labels['max_running_requests']}, which is {engine.max_running_requests}: "
            "every running request takes one token of each step, and prompts need the rest."
        )
    if engine.kv_memory is not None:
        parse_size(engine.kv_memory, labels["kv_memory"])


def _check_each(config: Config, labels: _Labels) -> None:
    model, engine, desk, server = config.model, config.engine, config.desk, config.server
    positive = {
        "threads": model.threads,
        "max_model_len": model.max_model_len,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_running_requests": engine.max_running_requests,
        "request_timeout_s": desk.request_timeout_s,
        "queue_timeout_s": desk.queue_timeout_s,
        "heartbeat_s": server.heartbeat_s,
        "send_timeout_s": server.send_timeout_s,
        "stuck_after_s": server.stuck_after_s,
        "max_body_bytes": server.max_body_bytes,
    }
    for name, value in positive.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{labels[name]} is {value}; it must be more than 0.")
    for name, share in {
        "kv_budget_ratio": engine.kv_budget_ratio,
        "long_prefill_share": engine.long_prefill_share,
    }.items():
        if not 0 < share <= 1:
            raise ConfigError(f"{labels[name]} is {share}; it must be more than 0 and at most 1.")
    if engine.speculative_tokens < 0:
        raise ConfigError(
            f"{labels['speculative_tokens']} is {engine.speculative_tokens}; it must not be "
            "negative. 0 guesses nothing."
        )
    if not 0 <= server.port <= 65535:
        raise ConfigError(
            f"{labels['port']} is {server.port}; it must be 0 (any free one) to 65535."
        )
    if not server.drain_timeout_s >= 0:
        raise ConfigError(
            f"{labels['drain_timeout_s']} is {server.drain_timeout_s}; it must not be negative."
        )


def _check_desk(options: DeskOptions, max_running_requests: int, labels: _Labels) -> None:
    """The desk's own checks; each begins its message with the setting's name."""
    try:
        desk_settings(options, max_running_requests)
    except ConfigError as error:
        message = re.sub(r"^\w+", lambda name: labels[name[0]], error.message)
        raise ConfigError(f"{message}.") from error
