"""The commands `kvota keys …` and `kvota usage`: who may come in, and what they used.

They change the database, not a running gateway: gateways see the change by themselves within two
seconds. A key is written to standard output alone, so `KEY=$(kvota keys create …)` has just it.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvota.config import load
from kvota.core.errors import KvotaError
from kvota.core.request import Band
from kvota.gateway.caller import KeyLimits
from kvota.gateway.store.database import (
    Database,
    database_url,
    open_database,
    state_dir_of,
)
from kvota.gateway.store.keys import KEY_TABLES, KeyRecord, KeyStore, NewKey, id_of
from kvota.gateway.store.usage import (
    SECONDS_PER_DAY,
    USAGE_TABLES,
    UsageFilter,
    UsageLine,
    UsageStore,
    day_of,
    iso_day,
    summed,
)
from kvota.tools.report.terminal import print_table

EXIT_FAILED: Final = 2
SEEN_WITHIN: Final = "Running gateways see this within two seconds."
_NOTHING: Final = "-"
_NONE: Final = "none"
_SECONDS_OF: Final = {"s": 1, "m": 60, "h": 3600, "d": SECONDS_PER_DAY}
_DURATION: Final = re.compile(r"(\d{1,7})([smhd])")


class Grouping(StrEnum):
    """What `kvota usage` sums over."""

    KEY = "key"
    MODEL = "model"
    TENANT = "tenant"
    DAY = "day"
    ALL = "all"  # sums nothing: a line per key, model and day


_GROUPS: Final[dict[Grouping, Callable[[UsageLine], Any]]] = {
    Grouping.KEY: lambda line: line.key_id,
    Grouping.MODEL: lambda line: line.model,
    Grouping.TENANT: lambda line: line.tenant,
    Grouping.DAY: lambda line: line.day,
    Grouping.ALL: lambda line: (line.key_id, line.model, line.day),
}

_DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME.  "
        "[default: what the settings say, as for kvota serve]",
    ),
]
_ConfigOption = Annotated[
    Path | None, typer.Option("--config", envvar="KVOTA_CONFIG", help="A kvota.toml with settings.")
]
_KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="A key's id, such as kv-3f9a….")]

keys = typer.Typer(no_args_is_help=True, help="Make, list, limit, rotate and revoke API keys.")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(keys, name="keys")
    app.command()(usage)


def seconds(text: str) -> int:
    """90s, 15m, 12h or 30d, in seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no time span; write 90s, 15m, 12h or 30d.")
    return int(match[1]) * _SECONDS_OF[match[2]]


def limit(text: str) -> int | str:
    """A number from 1, or none."""
    if text == _NONE:
        return _NONE
    if text.isascii() and text.isdigit() and 1 <= int(text) < 2**53:
        return int(text)
    raise typer.BadParameter(f"{text!r} is no limit; write a number from 1, or none.")


def plain(text: str) -> str:
    """A name for people: not empty, not long, one line."""
    if not text.strip() or len(text) > 200 or not text.isprintable():
        raise typer.BadParameter("must be 1 to 200 printable characters.")
    return text


@keys.command()
def create(
    tenant: Annotated[
        str, typer.Option(parser=plain, metavar="NAME", help="Whose key it is; tenants share.")
    ],
    note: Annotated[
        str | None, typer.Option(parser=plain, metavar="TEXT", help="For people.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model it may call; repeatable.  [default: all]")
    ] = None,
    expires: Annotated[
        int | None, typer.Option(parser=seconds, metavar="SPAN", help="E.g. 90d.  [default: never]")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Prompt and output together.")
    ] = None,
    concurrent_requests: Annotated[int | None, typer.Option(min=1)] = None,
    weight: Annotated[
        float, typer.Option(min=0.001, max=1000, help="Share of the tenant when it is full.")
    ] = 1.0,
    batch_only: Annotated[
        bool, typer.Option("--batch-only", help="Everything it asks is batch.")
    ] = False,
    admin: Annotated[bool, typer.Option("--admin", help="May use /admin.")] = False,
    fallback: Annotated[
        bool, typer.Option("--fallback/--no-fallback", help="May be served by another model.")
    ] = True,
    database: _DatabaseOption = None,
    config: _ConfigOption = None,
) -> None:
    """Make a key and show it: the only time that anybody sees it."""
    now = time.time()
    new = NewKey(
        tenant=tenant,
        note=note or "",
        models=frozenset(model) if model else None,
        weight=weight,
        band_max=Band.BATCH if batch_only else Band.INTERACTIVE,
        is_admin=admin,
        may_fall_back=fallback,
        limits=KeyLimits(
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            concurrent_requests=concurrent_requests,
        ),
        expires_unix=None if expires is None else now + expires,
    )
    with _key_store(database, config) as store:
        record, key = store.create(new, now)
    typer.echo(key)
    typer.echo(
        f"Its id is {record.key_id}. Keep the key: it cannot be shown again. {SEEN_WITHIN}",
        err=True,
    )


@keys.command("list")
def list_keys(database: _DatabaseOption = None, config: _ConfigOption = None) -> None:
    """Every key ever made, without its secret."""
    with _key_store(database, config) as store:
        records = store.all()
    titles = ("id", "tenant", "state", "models", "limits", "weight", "may", "note")
    table = _table(titles)
    now = time.time()
    for record in records:
        table.add_row(*map(escape, _key_row(record, now)))
    _print(table)


@keys.command()
def revoke(
    key: _KeyArgument, database: _DatabaseOption = None, config: _ConfigOption = None
) -> None:
    """Make a key worthless, for good."""
    with _key_store(database, config) as store:
        record = store.revoke(id_of(key), time.time())
    typer.echo(f"{record.key_id} of {record.caller.tenant} is revoked. {SEEN_WITHIN}")


@keys.command()
def rotate(
    key: _KeyArgument,
    grace: Annotated[
        int, typer.Option(parser=seconds, metavar="SPAN", help="The old secret stays good so long.")
    ] = "1h",  # type: ignore[assignment]  # goes through the parser
    database: _DatabaseOption = None,
    config: _ConfigOption = None,
) -> None:
    """Give a key a new secret and show it. Its id, limits and usage stay."""
    now = time.time()
    with _key_store(database, config) as store:
        rotated = store.rotate(id_of(key), grace_s=grace, now_unix=now)
    typer.echo(rotated)
    typer.echo(f"The old secret is good until {_when(now + grace)}. {SEEN_WITHIN}", err=True)


@keys.command()
def limits(
    key: _KeyArgument,
    model: Annotated[
        str | None, typer.Option(help="Limits on this model, inside those of the key.")
    ] = None,
    requests_per_minute: Annotated[
        Any, typer.Option(parser=limit, metavar="N|none", help="[default: as it is]")
    ] = None,
    tokens_per_minute: Annotated[
        Any, typer.Option(parser=limit, metavar="N|none", help="[default: as it is]")
    ] = None,
    concurrent_requests: Annotated[
        Any, typer.Option(parser=limit, metavar="N|none", help="[default: as it is]")
    ] = None,
    database: _DatabaseOption = None,
    config: _ConfigOption = None,
) -> None:
    """Show a key's limits, after changing those that are given."""
    asked = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
    }
    changes = {
        name: None if value == _NONE else value
        for name, value in asked.items()
        if value is not None
    }
    with _key_store(database, config) as store:
        key_id = id_of(key)
        record = store.change_limits(key_id, changes, model=model) if changes else store.get(key_id)
    table = _table(("model", "requests per minute", "tokens per minute", "at once"))
    for name, known in (("all", record.caller.limits), *sorted(record.caller.model_limits.items())):
        table.add_row(escape(name), *map(_or_nothing, _numbers(known)))
    _print(table)
    if changes:
        typer.echo(SEEN_WITHIN, err=True)


def usage(
    days: Annotated[int, typer.Option(min=1, max=36500, help="So many days, with today.")] = 30,
    by: Annotated[Grouping, typer.Option(help="What to sum over.")] = Grouping.KEY,
    key: Annotated[str | None, typer.Option(help="Only of this key.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant.")] = None,
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    database: _DatabaseOption = None,
    config: _ConfigOption = None,
) -> None:
    """What was used, up to about ten seconds ago. Days begin at midnight UTC."""
    wanted = UsageFilter(
        first_day=day_of(time.time()) - days + 1,
        key_id=None if key is None else id_of(key),
        tenant=tenant,
        model=model,
    )
    with _opened(database, config) as opened:
        lines = UsageStore(opened).lines(wanted)
    names = _group_titles(by)
    table = _table(names)
    for title in ("requests", "refused", "prompt", "cached", "output", "KV block-seconds"):
        table.add_column(title, justify="right")
    for line in summed(lines, _GROUPS[by]):
        table.add_row(*(escape(_named(line, name)) for name in names), *_amounts(line))
    for total in summed(lines, lambda _: None):
        table.add_section()
        table.add_row("total", *[""] * (len(names) - 1), *_amounts(total))
    _print(table)


@contextmanager
def _opened(url: str | None, config: Path | None) -> Iterator[Database]:
    """The database while a command runs. What an operator can fix is said in one line."""
    try:
        opened = open_database(_url(url, config), KEY_TABLES, USAGE_TABLES)
        try:
            yield opened
        finally:
            opened.close()
    except KvotaError as error:
        typer.echo(error.message, err=True)
        raise typer.Exit(EXIT_FAILED) from None


def _url(flag: str | None, config: Path | None) -> str:
    """The database that a gateway with the same settings uses."""
    settings = load(file=config, environment=os.environ, flags={"database": flag}).gateway
    return database_url(settings.database, state_dir_of(settings.state_dir, os.environ))


@contextmanager
def _key_store(url: str | None, config: Path | None) -> Iterator[KeyStore]:
    with _opened(url, config) as opened:
        yield KeyStore(opened)


def _key_row(record: KeyRecord, now: float) -> tuple[str, ...]:
    caller = record.caller
    models = "all" if caller.models is None else ", ".join(sorted(caller.models)) or _NONE
    may = [
        name
        for name, is_so in (
            ("admin", caller.is_admin),
            ("batch only", caller.band_max is Band.BATCH),
            ("no fallback", not caller.may_fall_back),
        )
        if is_so
    ]
    return (
        caller.key_id,
        caller.tenant,
        _state(record, now),
        models,
        _limits_text(record),
        f"{caller.weight:g}",
        ", ".join(may) or _NOTHING,
        record.note,
    )


def _state(record: KeyRecord, now: float) -> str:
    if record.revoked_unix is not None:
        return f"revoked {_when(record.revoked_unix)}"
    if record.expires_unix is None:
        return "good"
    said = "expired" if record.expires_unix <= now else "good until"
    return f"{said} {_when(record.expires_unix)}"


def _limits_text(record: KeyRecord) -> str:
    caller = record.caller
    named = [("", caller.limits), *sorted(caller.model_limits.items())]
    return (
        "; ".join(
            f"{name}: {text}" if name else text
            for name, text in ((name, _short(known)) for name, known in named)
            if text
        )
        or _NOTHING
    )


def _short(known: KeyLimits) -> str:
    units = ("req/min", "tokens/min", "at once")
    pairs = zip(_numbers(known), units, strict=True)
    return ", ".join(f"{number} {unit}" for number, unit in pairs if number is not None)


def _numbers(known: KeyLimits) -> tuple[int | None, ...]:
    return known.requests_per_minute, known.tokens_per_minute, known.concurrent_requests


def _or_nothing(number: int | None) -> str:
    return _NOTHING if number is None else str(number)


def _group_titles(by: Grouping) -> tuple[str, ...]:
    if by is Grouping.KEY:
        return ("key", "tenant")
    return ("day", "tenant", "key", "model") if by is Grouping.ALL else (by.value,)


def _named(line: UsageLine, name: str) -> str:
    if name == "day":
        return iso_day(line.day)
    return line.key_id if name == "key" else str(getattr(line, name))


def _amounts(line: UsageLine) -> tuple[str, ...]:
    counts = (
        line.requests,
        line.refusals,
        line.prompt_tokens,
        line.cached_tokens,
        line.output_tokens,
    )
    return (*map(str, counts), f"{line.kv_block_seconds:.1f}")


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _table(titles: Sequence[str]) -> Table:
    table = Table(box=None)
    for title in titles:
        no_wrap = title in ("id", "key")  # to be copied
        table.add_column(title, no_wrap=no_wrap, overflow="fold")
    return table


def _print(table: Table) -> None:
    print_table(table, Console(highlight=False))
