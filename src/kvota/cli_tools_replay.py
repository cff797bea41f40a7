"""The commands `kvota replay` and `kvota trace describe|convert`: recorded traffic."""

import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvota.cli_numbers import positive
from kvota.core.errors import ConfigError
from kvota.tools.load.loopback import FLAG, check_host
from kvota.tools.load.measure import Slo
from kvota.tools.load.target import find_target
from kvota.tools.replay import show
from kvota.tools.replay.plan import Recorded, Source, plan_for, read
from kvota.tools.replay.run import DRAIN_S, Replayed, replay
from kvota.tools.replay.tenants import keys_for, read_keys
from kvota.tools.replay.trace_page import trace_report
from kvota.tools.replay.words import population_table, shape_table
from kvota.tools.report import terminal
from kvota.tools.report.html import Table, require_writable, write_html, write_json
from kvota.traffic.arrival import Scaling
from kvota.traffic.curves import Curves, curves_of, curves_of_clients
from kvota.traffic.opening import TraceFormat, Traffic, format_of, open_traffic
from kvota.traffic.servegen import read_clients
from kvota.traffic.shape import gather, gather_clients, shape_of, shape_of_clients
from kvota.traffic.writing import Target, write_traffic

EXIT_INTERRUPTED = 130  # by Ctrl-C; what was seen until then is shown and written
EXIT_REFUSED = 1  # the generator was the bottleneck, nothing was answered, or the server is gone

traces = typer.Typer(no_args_is_help=True, help="Files of recorded traffic.")

_File = Annotated[
    Path,
    typer.Argument(
        help="Azure, Mooncake, Bailian, BurstGPT, ServeGen, ShareGPT lengths, or our journal."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("replay")(replay_command)
    app.add_typer(traces, name="trace")


def replay_command(
    file: _File,
    url: Annotated[str, typer.Option(envvar="KVOTA_URL")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="[default: the server's first]")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="KVOTA_API_KEY")] = None,
    keys: Annotated[
        Path | None, typer.Option(help='TOML: tenant = "key" a line, "*" for all others.')
    ] = None,
    chat: Annotated[bool, typer.Option(help="Ask /v1/chat/completions, with text.")] = False,
    time_scale: Annotated[
        float, typer.Option(min=0.0, help="2: at half the speed; bursts keep their shape.")
    ] = 1.0,
    length_scale: Annotated[
        int, typer.Option(min=1, help="16: lengths and prefix blocks a sixteenth.")
    ] = 1,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    seed: Annotated[
        int, typer.Option(help="Another one makes other prompts, unknown to the server's cache.")
    ] = 1,
    rate: Annotated[
        float, typer.Option(min=0.001, help="Of files without times.", callback=positive)
    ] = 5.0,
    from_s: Annotated[float, typer.Option(min=0.0, help="Begin there in the file's time.")] = 0.0,
    until_s: Annotated[float | None, typer.Option(help="End there.  [default: its end]")] = None,
    ttft_s: Annotated[
        float, typer.Option(help="Good: first token within.", callback=positive)
    ] = 2.0,
    tpot_s: Annotated[
        float, typer.Option(help="Good: time per further token within.", callback=positive)
    ] = 0.2,
    drain_s: Annotated[
        float, typer.Option(help="Wait so long for the last answers.", callback=positive)
    ] = DRAIN_S,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts.")] = None,
    i_may_load_this_host: Annotated[
        bool, typer.Option(FLAG, help="The server is not on this machine, and mine to load.")
    ] = False,
) -> None:
    """Send recorded traffic again at its times, and say what clients saw.

    Answers get exactly the lengths they had. Exits with 1 when the result says nothing. Ctrl-C ends
    it with 130, and what was seen until then is shown and written.
    """
    check_host(url, is_allowed=i_may_load_this_host)
    require_writable(json_file, html)
    source = Source(
        path=file,
        scaling=_scaling(time_scale, length_scale),
        requests_max=max_requests,
        seed=seed,
        poisson_rps=rate,
        from_s=from_s,
        **({} if until_s is None else {"until_s": until_s}),
    )
    recorded = read(source)
    by_tenant = keys_for(
        {one.tenant for one in recorded.arrivals}, read_keys(keys) if keys else {}, api_key
    )
    replayed = asyncio.run(
        _replay(recorded, url, model, by_tenant, Slo(ttft_s, tpot_s), drain_s, is_chat=chat)
    )
    _show(replayed, json_file, html)


async def _replay(
    recorded: Recorded,
    url: str,
    model: str | None,
    keys: dict[str, str | None],
    slo: Slo,
    drain_s: float,
    *,
    is_chat: bool,
) -> Replayed:
    target = await find_target(url, next(iter(keys.values())), model=model, is_chat=is_chat)
    plan = plan_for(recorded, target)
    with terminal.progress_bar() as bar:
        task = bar.add_task(f"replaying {recorded.source.path.name}", total=len(plan.asked))
        return await replay(
            plan, target, keys, slo, drain_s=drain_s, on_ended=lambda _: bar.advance(task)
        )


def _show(replayed: Replayed, json_file: Path | None, html: Path | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for name, text in show.facts(replayed).items():
        console.print(f"{name:<15} {text}", markup=False)
    terminal.show(show.outcome_table(replayed), console)
    if replayed.refusal is None:
        terminal.show(show.latency_table(replayed), console)
    console.print(show.verdict(replayed), markup=False)
    if json_file is not None:
        write_json(show.as_json(replayed), json_file)
    if html is not None:
        write_html(show.report(replayed), html)
    if replayed.cut is not None and replayed.cut.is_interrupt:
        sys.exit(EXIT_INTERRUPTED)
    if replayed.cut is not None or replayed.refusal is not None:
        sys.exit(EXIT_REFUSED)


@dataclass(frozen=True, slots=True)
class _Description:
    """A file of traffic as a table, as data and as lines."""

    kind: TraceFormat
    table: Table
    facts: dict[str, Any]
    curves: Curves
    has_times: bool = True


@traces.command()
def describe(
    file: _File,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts.")] = None,
) -> None:
    """Lengths, burstiness, tenants and shared prefixes of a file, as it is."""
    require_writable(html)
    with terminal.progress_bar() as bar:
        bar.add_task(f"reading {file.name}", total=None)
        found = _described(file)
    if html is not None:
        kind, curves = found.kind.value, found.curves
        write_html(
            trace_report(file.name, kind, found.table, curves, has_times=found.has_times), html
        )
    console = Console(highlight=False, soft_wrap=True)
    if as_json:
        console.print_json(data={"format": found.kind.value, **found.facts})
        return
    console.print(f"{file.name}: {found.kind.value}", markup=False)
    terminal.show(found.table, console)
    if found.facts.get("num_passed_over"):
        console.print(
            f"{found.facts['num_passed_over']:,} rows without a known answer are left out."
        )


def _described(file: Path) -> _Description:
    """Reads it once. Raises TraceError."""
    kind = format_of(file)
    if kind is TraceFormat.SERVEGEN:
        clients = gather_clients(read_clients(file))
        population = shape_of_clients(clients)
        table, facts = population_table(population), asdict(population)
        return _Description(kind, table, facts, curves_of_clients(clients))
    traffic = open_traffic(file, spreads=False)
    gathered = gather(traffic.arrivals)
    shape = shape_of(gathered)
    table = shape_table(shape, has_times=traffic.has_times)
    facts = {**asdict(shape), "num_passed_over": traffic.passed_over.num}
    return _Description(kind, table, facts, curves_of(gathered), traffic.has_times)


@traces.command()
def convert(
    file: _File,
    to: Annotated[Target, typer.Option(help="Format to write.")],
    out: Annotated[Path | None, typer.Option(help="File to write.  [default: stdout]")] = None,
    seed: Annotated[int, typer.Option(help="Decides what the file leaves to chance.")] = 1,
    rate: Annotated[float, typer.Option(min=0.001, help="Of files without times.")] = 5.0,
    from_s: Annotated[float, typer.Option(help="ServeGen: seconds after midnight.")] = 0.0,
    until_s: Annotated[float, typer.Option(help="ServeGen: seconds after midnight.")] = 86_400.0,
) -> None:
    """Write a file of traffic in another format. Prefixes are counted in that format's blocks."""
    traffic = open_traffic(
        file, seed=seed, poisson_rps=rate, from_s=from_s, until_s=until_s, spreads=False
    )
    if out is None:
        num = write_traffic(traffic.arrivals, to, sys.stdout.buffer)
    else:
        num = _write(out, traffic, to)
    typer.echo(f"{num:,} requests of {file.name} ({traffic.format.value}) as {to.value}.", err=True)


def _write(out: Path, traffic: Traffic, to: Target) -> int:
    """Put there when it is whole: it may be the file that is read."""
    is_device = out.exists() and not out.is_file()
    draft = out if is_device else out.with_name(f"{out.name}.part")
    try:
        with draft.open("wb") as file:
            num = write_traffic(traffic.arrivals, to, file)
        draft.replace(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from None
    finally:
        if not is_device:
            draft.unlink(missing_ok=True)
    return num


def _scaling(time: float, length: int) -> Scaling:
    try:
        return Scaling(time=time, length=length)
    except ValueError as error:
        raise ConfigError(f"--time-scale: {error}.") from None
