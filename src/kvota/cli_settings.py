"""The flags that are settings, written once for every command that takes them.

`with_settings` makes a command of a function that wants settings: `kvota serve` and `kvota node`
take the same flags, because the first starts the second.
"""

import functools
import inspect
import os
from collections.abc import Callable, Collection
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvota.config import Config, load
from kvota.desk.settings import Admission


class Weights(StrEnum):
    AUTO = "auto"
    F32 = "f32"
    F16 = "f16"
    INT8 = "int8"
    INT4 = "int4"


class KvCacheDtype(StrEnum):
    F16 = "f16"
    U8 = "u8"
    F32 = "f32"


class EngineKind(StrEnum):
    KVOTA = "kvota"
    VLLM = "vllm"


ReadSettings = Callable[[], Config]
"""What flags, environment and file say now: the file is read anew by each call."""


def with_settings(act: Callable[..., None], *, only: Collection[str] = ()) -> Callable[..., None]:
    """`act` as a command: its first parameter, a ReadSettings, becomes the flags of settings_of.

    `only`: names of flags; without it all of them.
    """
    own = list(inspect.signature(act).parameters.values())[1:]
    shared = [
        one
        for one in inspect.signature(settings_of).parameters.values()
        if not only or one.name in only
    ]
    names = {parameter.name for parameter in own}

    def command(**flags: Any) -> None:
        extra = {name: flags.pop(name) for name in names}
        act(functools.partial(settings_of, **flags), **extra)

    command.__name__, command.__doc__ = act.__name__, act.__doc__
    command.__annotations__ = {one.name: one.annotation for one in (*shared, *own)}
    vars(command)["__signature__"] = inspect.Signature([*shared, *own])
    return command


def settings_of(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A known name, a GGUF file, a Hugging Face safetensors directory or an OpenVINO "
            "IR directory.  [default: smollm2-135m-instruct]"
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(envvar="KVOTA_CONFIG", help="A kvota.toml with settings.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any free one.")] = None,
    unix_socket: Annotated[
        Path | None, typer.Option(help="Listen on this path, for its owner alone, instead.")
    ] = None,
    trust_gateway: Annotated[
        bool | None,
        typer.Option("--trust-gateway", help="Believe callers whose request it is."),
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="How clients call the model.")] = None,
    weights: Annotated[Weights | None, typer.Option(help="How weights are held.")] = None,
    kv_cache_dtype: Annotated[
        KvCacheDtype | None, typer.Option(help="Type of the KV cache.")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help='Fix the KV cache, e.g. "2GiB".')] = None,
    kv_budget_ratio: Annotated[
        float | None, typer.Option(help="Share of the memory left that the KV cache takes.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt + output, in tokens.")
    ] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens per step.")] = None,
    max_running_requests: Annotated[int | None, typer.Option(help="Choices at once.")] = None,
    max_waiting_queue: Annotated[
        int | None, typer.Option(help="Choices in line, in each band, before 503 queue_full.")
    ] = None,
    long_prefill_share: Annotated[
        float | None, typer.Option(help="Share of a step that long prompts may take.")
    ] = None,
    speculative_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens guessed ahead in a step that nobody waits for; 0: none."),
    ] = None,
    prefix_cache: Annotated[
        bool | None, typer.Option("--prefix-cache/--no-prefix-cache", help="Reuse prompt prefixes.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Cores to compute on.")] = None,
    request_timeout_s: Annotated[float | None, typer.Option(help="Longest whole answer.")] = None,
    queue_timeout_s: Annotated[float | None, typer.Option(help="Longest wait in line.")] = None,
    admission: Annotated[
        Admission | None, typer.Option(help="How a request's KV is priced at arrival.")
    ] = None,
    risk: Annotated[
        float | None, typer.Option(help="Caution of the forecast, in standard deviations.")
    ] = None,
    long_request_threshold: Annotated[
        int | None, typer.Option(help="Prompts with more tokens wait in the long lane.")
    ] = None,
    long_request_concurrency: Annotated[
        int | None, typer.Option(help="Requests of the long lane at once.")
    ] = None,
    first_token_timeout_s: Annotated[
        float | None, typer.Option(help="Longest wait for the first token.")
    ] = None,
    long_first_token_timeout_s: Annotated[
        float | None, typer.Option(help="The same in the long lane; by default no other.")
    ] = None,
    heartbeat_s: Annotated[float | None, typer.Option(help="Comment after silence.")] = None,
    drain_timeout_s: Annotated[
        float | None, typer.Option(help="How long running requests may finish after SIGTERM.")
    ] = None,
    stuck_after_s: Annotated[
        float | None, typer.Option(help="No step for so long with work: /ready says 503.")
    ] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Largest request body.")] = None,
    engine: Annotated[
        EngineKind | None, typer.Option(help="What `kvota serve` starts: its own, or vllm serve.")
    ] = None,
    record_steps: Annotated[
        Path | None, typer.Option(help="Write what every step cost, for `kvota calibrate`.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web page origin that may call; repeatable.")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where fetched models are kept.")] = None,
) -> Config:
    """What the flags, the environment and the file say together. Raises ConfigError."""
    flags: dict[str, Any] = {
        "model": model, "served_name": served_name, "weights": weights, "threads": threads,
        "kv_cache_dtype": kv_cache_dtype, "max_model_len": max_model_len,
        "cache_dir": None if cache_dir is None else str(cache_dir),
        "kv_memory": kv_memory, "kv_budget_ratio": kv_budget_ratio, "prefix_cache": prefix_cache,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_running_requests": max_running_requests, "long_prefill_share": long_prefill_share,
        "speculative_tokens": speculative_tokens,
        "engine": engine, "host": host, "port": port, "trust_gateway": trust_gateway,
        "unix_socket": None if unix_socket is None else str(unix_socket),
        "max_waiting_queue": max_waiting_queue,
        "request_timeout_s": request_timeout_s, "queue_timeout_s": queue_timeout_s,
        "admission": admission, "risk": risk, "first_token_timeout_s": first_token_timeout_s,
        "long_first_token_timeout_s": long_first_token_timeout_s,
        "long_request_threshold": long_request_threshold,
        "long_request_concurrency": long_request_concurrency,
        "heartbeat_s": heartbeat_s, "drain_timeout_s": drain_timeout_s,
        "stuck_after_s": stuck_after_s, "max_body_bytes": max_body_bytes,
        "cors_origins": cors_origin or None,
        "record_steps": None if record_steps is None else str(record_steps),
    }  # fmt: skip
    return load(file=config, environment=os.environ, flags=flags)
