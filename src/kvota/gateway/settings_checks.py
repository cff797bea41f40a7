"""Whether settings make sense, before anything is made of them. Every check raises ConfigError.

Names stand in response headers and in logs, so they hold no control characters. What only its
consumer can judge, such as a block list or an address, that one checks.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from kvota.core.errors import ConfigError
from kvota.gateway.settings import (
    AUTO,
    OWN_NODE,
    BackendEntry,
    Fleet,
    GatewaySettings,
    ModelEntry,
    nearest,
)

_COUNTS: Final = (
    "prompt_characters_max", "messages_max", "nesting_max", "output_tokens_max", "choices_max",
    "inputs_max", "abuse_failures_max", "output_tokens_assumed", "num_gateways",
)  # fmt: skip
_TIMES: Final = ("probe_every_s", "abuse_block_s", "node_silent_s")


def check_gateway(settings: GatewaySettings) -> None:
    """`[gateway]` by itself."""
    for name in _COUNTS:
        _require_count(settings, name, "[gateway]")
    for name in _TIMES:
        if not 0 < (value := getattr(settings, name)) < math.inf:
            raise ConfigError(f"[gateway]: {name} is {value}; it must be a time above 0.")


def check_fleet(fleet: Fleet, *, has_own_node: bool) -> None:
    """Backends and models, and how they fit together."""
    backends = [one.name for one in fleet.backends] + [OWN_NODE] * has_own_node
    _require_names(backends, "backend")
    names = [name for model in fleet.models for name in (model.name, *model.aliases)]
    _require_names(names, "model")
    for backend in fleet.backends:
        _check_backend(backend)
    for model in fleet.models:
        _check_model(model, backends)


def check_tasks(fleet: Fleet, known: Collection[str]) -> None:
    """Models are for tasks that there are."""
    for model in fleet.models:
        for task in model.tasks:
            if task not in known:
                near = nearest(task, known)
                raise ConfigError(f"model {model.name}: there is no task {task}{near}")


def _check_backend(backend: BackendEntry) -> None:
    where = f"backend {backend.name}"
    _require_share(backend, "kv_share", where)
    for name in ("kv_tokens", "max_model_len"):
        _require_count(backend, name, where)
    for name in ("first_byte_timeout_s", "idle_timeout_s"):
        if not 0 < (value := getattr(backend, name)) < math.inf:
            raise ConfigError(f"{where}: {name} is {value}; it must be a time above 0.")
    if not backend.url.isprintable() or " " in backend.url:
        raise ConfigError(f"{where}: the url holds a space or a control character.")
    if backend.unix_socket == "":
        raise ConfigError(f"{where}: unix_socket is empty; leave it out, or name a file.")


def _check_model(model: ModelEntry, backends: Sequence[str]) -> None:
    where = f"model {model.name}"
    if model.name == AUTO or AUTO in model.aliases:
        raise ConfigError(f"{where}: the name {AUTO} is taken; it means a model by task.")
    if bool(model.backends) == bool(model.versions):
        raise ConfigError(f"{where} needs either backends or versions.")
    _require_share(model, "fallback_kv_usage", where)
    _require_count(model, "fallback_waiting", where)
    _require_names([one.name for one in model.versions], "version", f" of {where}")
    for version in model.all_versions():
        if not version.backends:
            raise ConfigError(f"{where}: version {version.name} has no backends.")
        for name in version.backends:
            if name not in backends:
                near = nearest(name, backends)
                raise ConfigError(f"{where}: there is no backend {name}{near}")
            if version.backends.count(name) > 1:
                raise ConfigError(f"{where}: backend {name} is named twice.")


def _require_count(settings: msgspec.Struct, name: str, where: str) -> None:
    value = getattr(settings, name)
    if value is not None and value < 1:
        raise ConfigError(f"{where}: {name} is {value}; it must be at least 1.")


def _require_share(settings: msgspec.Struct, name: str, where: str) -> None:
    value = getattr(settings, name)
    if value is not None and not 0 < value <= 1:
        raise ConfigError(f"{where}: {name} is {value}; it must be above 0 and at most 1.")


def _require_names(names: Sequence[str], kind: str, of: str = "") -> None:
    for name in names:
        if not name:
            raise ConfigError(f"A {kind}{of} has an empty name.")
        if not name.isprintable():
            raise ConfigError(f"The name of a {kind}{of} holds a control character: {name!r}.")
        if names.count(name) > 1:
            raise ConfigError(f"Two {kind}s{of} are called {name}.")
