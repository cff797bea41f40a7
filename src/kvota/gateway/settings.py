"""What a gateway can be told: `[gateway]`, and the tables `[[backends]]` and `[[models]]`.

    [[backends]]                          [[models]]
    name = "gpu-1"                        name = "chat"
    url = "http://10.0.0.5:8000"          aliases = ["gpt-4o-mini"]
    kind = "vllm"                         backends = ["gpu-1", "gpu-2"]
                                          served_as = "Qwen/Qwen3-8B"
                                          fallback = "small"

Frozen, complete, and checked before anything starts. Times are seconds.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec

from kvota.core.errors import ConfigError
from kvota.gateway.upstream.kinds import BackendKind

OWN_NODE: Final = "node"  # the name of the backend that `kvota serve` starts
AUTO: Final = "auto"  # the model name that means: whatever suits the task
T = TypeVar("T", bound=msgspec.Struct)


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway]`: keys, limits, filters, and how patient to be with backends."""

    engine: Literal["kvota", "vllm"] = "kvota"  # what `kvota serve` starts behind the gateway
    # The model follows. Where that does not start, the module: see docs/gateway.md.
    vllm_command: tuple[str, ...] = ("vllm", "serve")
    vllm_arguments: tuple[str, ...] = ()  # after those that are computed, so these win
    database: str | None = None  # URL of keys and usage; None: a file in the state directory
    state_dir: str | None = None  # None: the user's
    limits_store: str | None = None  # redis://…, shared by several gateways; None: memory
    hide_models: bool = False  # a model that a key may not call is 404 instead of 403
    allowed_hosts: tuple[str, ...] = ()  # names that clients without keys may call this one; "*"
    metrics_need_key: bool = False  # an admin key, for /metrics
    block_lists: tuple[str, ...] = ()  # of the content filter: names, or files
    filter_plugins: tuple[str, ...] = ()
    filter_input: bool = True
    filter_output: bool = True
    prompt_characters_max: int = 1_000_000  # of all messages and tools of a request
    messages_max: int = 4096
    nesting_max: int = 128
    output_tokens_max: int | None = None  # of one choice; None: what the model can
    choices_max: int = 256  # n, and prompts times n
    inputs_max: int = 2048  # texts of one request for embeddings
    abuse_watch: bool = True
    abuse_failures_max: int = 100  # of one key within a minute, before it is blocked
    abuse_block_s: float = 60.0
    journal: str | None = None  # a file to write one line for each request to
    task_rules: str | None = None  # a file of rules for the model name `auto`; None: the shipped
    classifier: str | None = None  # a plug-in that replaces the rules
    attempts_max: int = 3  # of one request, over all backends
    retry_budget: float = 0.1  # retries per request
    probe_every_s: float = 2.0
    output_tokens_assumed: int = 512  # of a request that sets no max_tokens, for prices and limits
    num_gateways: int = 1  # in front of the same backends
    rollback_failure_margin: float = 0.02
    rollback_ttft_factor: float = 1.5
    node_growth_max: str = "2GiB"  # memory beyond its bill, before the own node is restarted
    node_silent_s: float = 20.0  # without an answer, before it is killed


# What a reload cannot change: what was opened at the start, and what was started.
READ_ONCE: Final = (
    "engine", "vllm_command", "vllm_arguments", "database", "state_dir", "limits_store", "journal",
    "node_growth_max", "node_silent_s",
)  # fmt: skip


class BackendEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `[[backends]]`: an engine server somewhere."""

    name: str
    url: str = "http://node"  # with the path before /v1, if there is one
    unix_socket: str | None = None
    kind: BackendKind = BackendKind.OPENAI
    api_key_env: str | None = None  # the variable that holds our key for it
    verify_tls: bool = True
    # Of the desk that the gateway keeps for it; kvota's own nodes keep their own.
    kv_tokens: int | None = None  # until, or unless, it reports its own
    kv_share: float = 1.0  # of what it reports, that this gateway may lend
    tokenizer: str | None = None  # a model's directory or GGUF file, to price prompts exactly here
    max_running_requests: int = 64
    max_waiting_queue: int = 256
    max_model_len: int | None = None  # tokens; None: as it says
    connections_max: int = 1024
    first_byte_timeout_s: float = 120.0
    idle_timeout_s: float = 60.0


class VersionEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `[[models.versions]]`: the same model in another make."""

    name: str
    backends: tuple[str, ...]
    served_as: str | None = None  # the name there; None: the model's
    weight: float = 0.0


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `[[models]]`: what clients can ask for. Either `backends` or `versions`."""

    name: str
    aliases: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    served_as: str | None = None  # the name there; None: `name`
    versions: tuple[VersionEntry, ...] = ()
    fallback: str | None = None  # the model that answers when this one cannot
    fallback_kv_usage: float | None = None  # KV in use on all backends: fall back, do not wait
    fallback_waiting: int | None = None  # requests in line there: the same
    tasks: tuple[str, ...] = ()  # for which `auto` means this model

    def all_versions(self) -> tuple[VersionEntry, ...]:
        """The versions; without any, the model itself as the only one."""
        if self.versions:
            return self.versions
        only = VersionEntry(
            name=self.name, backends=self.backends, served_as=self.served_as, weight=1.0
        )
        return (only,)


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """All backends and models of one gateway, checked against each other."""

    backends: tuple[BackendEntry, ...] = ()
    models: tuple[ModelEntry, ...] = ()


def read_fleet(tables: Mapping[str, Any], source: str) -> Fleet:
    """From the tables of a file. Raises ConfigError that names `source` and what is wrong."""
    fleet = Fleet(
        backends=_entries(tables.get("backends", []), BackendEntry, "backends", source),
        models=_entries(tables.get("models", []), ModelEntry, "models", source),
    )
    return fleet


def _entries(given: Any, kind: type[T], table: str, source: str) -> tuple[T, ...]:
    if not isinstance(given, list):
        raise ConfigError(f"{source}: write [[{table}]], with two brackets, for each of them.")
    return tuple(_entry(one, kind, f"{source}: [[{table}]]") for one in given)


def _entry(given: Any, kind: type[T], where: str) -> T:
    if isinstance(given, dict):
        where = f"{where} {given.get('name', '')}".rstrip()
        _check_names(given, kind, where)
        for version in given.get("versions", ()) if kind is ModelEntry else ():
            if isinstance(version, dict):
                _check_names(version, VersionEntry, f"{where}, version {version.get('name', '?')}")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}.") from error


def _check_names(given: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    for name in given:
        if name not in kind.__struct_fields__:
            near = nearest(name, kind.__struct_fields__)
            raise ConfigError(f"{where}: unknown setting {name}{near}")


def nearest(name: str, valid: Iterable[str]) -> str:
    """How a sentence about an unknown name ends."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else "."
