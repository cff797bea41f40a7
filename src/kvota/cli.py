"""The `kvota` command.

A command only reads its flags, builds the settings and calls the part that does the work. Errors
that an operator can fix are printed as one message; everything else is a bug and shows itself.
"""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvota import __version__, cli_sim
from kvota.config import Config, load
from kvota.core.errors import KvotaError
from kvota.desk.settings import Admission
from kvota.model.catalog import KNOWN_MODELS, cache_dir_of, cached_models, remove
from kvota.node.memory import size
from kvota.tools.chat import Conversation, connect, converse
from kvota.tools.server import ServerUnusable

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve an open LLM from your own machines without the service falling over.",
)
models = typer.Typer()
app.add_typer(models, name="models")
cli_sim.register(app)

EXIT_STARTUP_FAILED = 2


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


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except KvotaError as error:
        _fail(error)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvota {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
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
        int | None, typer.Option(help="Choices in line before 503 queue_full.")
    ] = None,
    long_prefill_share: Annotated[
        float | None, typer.Option(help="Share of a step that long prompts may take.")
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
    heartbeat_s: Annotated[float | None, typer.Option(help="Comment after silence.")] = None,
    drain_timeout_s: Annotated[
        float | None, typer.Option(help="How long running requests may finish after SIGTERM.")
    ] = None,
    stuck_after_s: Annotated[
        float | None, typer.Option(help="No step for so long with work: /ready says 503.")
    ] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Largest request body.")] = None,
    record_steps: Annotated[
        Path | None, typer.Option(help="Write what every step cost, for `kvota calibrate`.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web page origin that may call; repeatable.")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where fetched models are kept.")] = None,
) -> None:
    """Serve MODEL over an OpenAI-compatible API. Ctrl-C drains; a second one ends at once."""
    settings = _settings(config, {
        "model": model, "served_name": served_name, "weights": weights, "threads": threads,
        "kv_cache_dtype": kv_cache_dtype, "max_model_len": max_model_len,
        "cache_dir": None if cache_dir is None else str(cache_dir),
        "kv_memory": kv_memory, "kv_budget_ratio": kv_budget_ratio, "prefix_cache": prefix_cache,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_running_requests": max_running_requests, "long_prefill_share": long_prefill_share,
        "host": host, "port": port, "max_waiting_queue": max_waiting_queue,
        "request_timeout_s": request_timeout_s, "queue_timeout_s": queue_timeout_s,
        "admission": admission, "risk": risk, "first_token_timeout_s": first_token_timeout_s,
        "long_request_threshold": long_request_threshold,
        "long_request_concurrency": long_request_concurrency,
        "heartbeat_s": heartbeat_s, "drain_timeout_s": drain_timeout_s,
        "stuck_after_s": stuck_after_s, "max_body_bytes": max_body_bytes,
        "cors_origins": cors_origin or None,
        "record_steps": None if record_steps is None else str(record_steps),
    })  # fmt: skip
    # Imported here: it brings in OpenVINO, which no other command needs.
    from kvota.node.serve import run

    cache = _cache_dir(settings.model.cache_dir)
    sys.exit(run(settings.model, settings.engine, settings.desk, settings.server, cache))


@app.command()
def chat(
    message: Annotated[
        str | None, typer.Argument(help="Say only this (or what is piped in) and end.")
    ] = None,
    url: Annotated[str, typer.Option(envvar="KVOTA_URL")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="[default: the server's first]")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="0 is deterministic.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="KVOTA_API_KEY")] = None,
) -> None:
    """Talk to a running server in the terminal."""
    with connect(url, api_key) as client:
        conversation = Conversation(
            client, model=model, system=system, max_tokens=max_tokens, temperature=temperature
        )
        if message is None and not sys.stdin.isatty():
            message = sys.stdin.read()
        if message is None:
            converse(conversation, ask=lambda: input("> "), show=_show)
            return
        for piece in conversation.say(message):
            _show(piece)
        _show("\n")


@app.command()
def top(
    url: Annotated[str, typer.Option(envvar="KVOTA_URL")] = "http://127.0.0.1:8000",
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVOTA_API_KEY", help="An operator's key.")
    ] = None,
) -> None:
    """Watch a running server: KV memory, the line, every request. d cancels one, q quits."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ServerUnusable(
            "kvota top needs a terminal. For programs there are GET /admin/requests and /metrics."
        )
    # Imported here: Textual takes a while, and no other command draws a screen.
    from kvota.tools.top.run import run

    run(url, api_key, interval_s=interval)


@models.callback(invoke_without_command=True)
def list_models(
    context: typer.Context,
    cache_dir: Annotated[Path | None, typer.Option(help="Where fetched models are kept.")] = None,
) -> None:
    """Known models, and what of them is in the cache."""
    if context.invoked_subcommand is not None:
        return
    directory = _cache_dir(cache_dir)
    cached = {model.name: model for model in cached_models(directory)}
    table = Table(box=None)
    for title in ("name", "size", "licence", "where"):
        table.add_column(title)
    for name, known in sorted(KNOWN_MODELS.items()):
        there = cached.get(name)
        where = str(there.path) if there else "not fetched; `kvota serve` fetches it"
        num_bytes = there.size_bytes if there else known.source.size_bytes
        table.add_row(name, size(num_bytes), known.licence, where)
    Console(highlight=False, soft_wrap=True).print(table)


@models.command("remove")
def remove_model(
    name: Annotated[str, typer.Argument(help="A known model's name.")],
    cache_dir: Annotated[Path | None, typer.Option(help="Where fetched models are kept.")] = None,
) -> None:
    """Delete a fetched model from the cache."""
    was_there = remove(name, _cache_dir(cache_dir))
    typer.echo(f"Removed {name}." if was_there else f"{name} was not in the cache.")


def _cache_dir(chosen: str | Path | None) -> Path:
    return Path(chosen).expanduser() if chosen else cache_dir_of(os.environ)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _settings(file: Path | None, flags: dict[str, Any]) -> Config:
    return load(file=file, environment=os.environ, flags=flags)


def _fail(error: KvotaError) -> NoReturn:
    kind = "" if isinstance(error, ServerUnusable) else "[bold]kvota cannot start.[/bold] "
    Console(stderr=True, highlight=False).print(f"{kind}{escape(error.message)}", soft_wrap=True)
    sys.exit(EXIT_STARTUP_FAILED)
