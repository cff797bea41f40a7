"""The `kvota` command.

A command only reads its flags, builds the settings and calls the part that does the work. Errors
that an operator can fix are printed as one message; everything else is a bug and shows itself.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvota import (
    __version__,
    cli_gateway,
    cli_keys,
    cli_sim,
    cli_tools_bench,
    cli_tools_doctor,
    cli_tools_evaluate,
    cli_tools_plan,
    cli_tools_replay,
)
from kvota.cli_errors import fail
from kvota.cli_settings import ReadSettings, with_settings
from kvota.core.errors import KvotaError
from kvota.model.catalog import KNOWN_MODELS, cache_dir_of, cached_models, expanded, remove
from kvota.sizing.memory import size
from kvota.tools.chat import Conversation, connect, converse
from kvota.tools.report.terminal import print_table
from kvota.tools.server import ServerUnusable

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve an open LLM from your own machines without the service falling over.",
)
models = typer.Typer()
app.add_typer(models, name="models")
cli_gateway.register(app)  # before all others: help lists commands in this order


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except KvotaError as error:
        fail(error)


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
@with_settings
def node(read: ReadSettings) -> None:
    """Serve MODEL without a gateway in front: desk and engine alone."""
    # Imported here: it brings in OpenVINO, which no other command needs.
    from kvota.node.serve import run

    settings = read()
    cache = _cache_dir(settings.model.cache_dir)
    parts = (settings.model, settings.engine, settings.desk, settings.server)
    sys.exit(run(*parts, cache, embeddings=settings.embeddings))


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
            message = sys.stdin.read().rstrip("\r\n")
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


CacheDir = Annotated[Path | None, typer.Option(help="Where fetched models are kept.")]


@models.callback(invoke_without_command=True)
def models_command(context: typer.Context, cache_dir: CacheDir = None) -> None:
    """Known models, and what of them is in the cache."""
    context.obj = cache_dir  # counts for the commands below as well
    if context.invoked_subcommand is None:
        _show_models(cache_dir)


@models.command("list")
def list_models(context: typer.Context, cache_dir: CacheDir = None) -> None:
    """The same."""
    _show_models(cache_dir or context.obj)


@models.command("remove")
def remove_model(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A known model's name.")],
    cache_dir: CacheDir = None,
) -> None:
    """Delete a fetched model from the cache."""
    was_there = remove(name, _cache_dir(cache_dir or context.obj))
    typer.echo(f"Removed {name}." if was_there else f"{name} was not in the cache.")


def _show_models(cache_dir: Path | None) -> None:
    cached = {model.name: model for model in cached_models(_cache_dir(cache_dir))}
    table = Table(box=None)
    for title in ("name", "size", "licence", "where"):
        table.add_column(title, overflow="fold")
    for name, known in sorted(KNOWN_MODELS.items()):
        there = cached.get(name)
        where = str(there.path) if there else f"not fetched; `kvota serve {name}` fetches it"
        num_bytes = there.size_bytes if there else known.size_bytes
        table.add_row(name, size(num_bytes), known.licence, where)
    print_table(table, Console(highlight=False))


cli_keys.register(app)
cli_tools_plan.register(app)
cli_tools_bench.register(app)
cli_tools_replay.register(app)
cli_tools_evaluate.register(app)
cli_tools_doctor.register(app)
cli_sim.register(app)


def _cache_dir(chosen: str | Path | None) -> Path:
    return expanded(str(chosen)) if chosen else cache_dir_of(os.environ)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
