"""What a node can be told: three small frozen structs, complete before anything starts.

`config.py` fills them from the file, the environment and the command line; here they are only
named, typed and given their defaults.
"""

from typing import Literal

import msgspec

from kvota.desk.settings import Admission, DeskSettings
from kvota.node.settings import HttpSettings


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
    speculative_tokens: int = 7  # guessed of a sequence per step while nobody waits; 0: none
    prefix_cache: bool = True
    record_steps: str | None = None  # a file to write every step's cost to


class DeskOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[desk]`: who may run, who waits, who is told to come back. Limits count choices."""

    admission: Literal["forecast", "reserve", "optimistic", "quantile", "running_length"] = (
        "forecast"
    )
    risk: float = 2.0  # z of the forecast: 2 over-commits about once in forty, 3 almost never
    max_waiting_queue: int = 256  # choices waiting in a band before 503 queue_full
    queue_timeout_s: float = 30.0
    request_timeout_s: float = 120.0
    first_token_timeout_s: float | None = None
    long_first_token_timeout_s: float | None = None  # in the long lane; None: the same
    long_request_threshold: int = 4000  # prompt tokens; longer ones wait in a lane of their own
    long_request_concurrency: int = 2
    long_kv_share: float = 0.5
    batch_floor: float = 0.1
    preempt_after_s: float = 2.0  # the short lane waits so long: pause a long or batch request
    preempt_min_run_s: float = 2.0
    preemptions_max: int = 2  # of one request
    pause_waste_max: float = 0.1  # of the tokens computed, lost to such pauses
    tenant_weights: dict[str, float] = {}


class EmbeddingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[embeddings]`: batches of a node that serves a text encoder. Counts are tokens or texts."""

    max_batch_tokens: int = 4096  # computed in one pass, padding included
    max_batch_texts: int = 64
    max_wait_ms: float = 5.0  # that a text waits for company
    max_waiting_tokens: int = 65_536  # in line before 503 queue_full


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[server]`: the HTTP side. Times are seconds, sizes bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: str | None = None  # a path to listen on instead; only its owner can connect
    # Believe what a gateway says of whose request it is; on a unix socket always believed.
    trust_gateway: bool = False
    cors_origins: tuple[str, ...] = ()
    heartbeat_s: float = 10.0
    send_timeout_s: float = 30.0  # a reader that takes nothing for so long is cut off
    drain_timeout_s: float = 30.0
    stuck_after_s: float = 30.0  # no step for so long with work waiting: /ready says 503
    max_body_bytes: int = 8 * 2**20
    trace_endpoint: str | None = None  # OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces


def desk_settings(options: DeskOptions, max_running_requests: int) -> DeskSettings:
    """What the desk itself checks and uses. Raises ConfigError naming the setting."""
    values = msgspec.structs.asdict(options) | {"admission": Admission(options.admission)}
    return DeskSettings(max_running_requests=max_running_requests, **values)


def http_settings(server: ServerSettings, desk: DeskOptions) -> HttpSettings:
    """What the HTTP side of a node of either kind uses."""
    return HttpSettings(
        max_body_bytes=server.max_body_bytes,
        queue_timeout_s=desk.queue_timeout_s,
        request_timeout_s=desk.request_timeout_s,
        heartbeat_s=server.heartbeat_s,
        send_timeout_s=server.send_timeout_s,
        cors_origins=server.cors_origins,
        trusts_gateway=server.trust_gateway or server.unix_socket is not None,
    )
