"""The command `kvota bench`: five kinds of load on a running server, each with a verdict.

    kvota bench baseline      one request at a time
    kvota bench throughput    1, 2, 4, 8 … at once, and where more stops to help
    kvota bench sweep         rising rates: the knee, what to plan with, and --apply
    kvota bench isolation     short requests beside long ones
    kvota bench soak          the same load for a long time: leaks, drift

Each writes NAME.json and NAME.html and prints a table. Exit codes: 0; 1 when the verdict is bad or
the result had to be refused; 2 when the server cannot be measured; 130 after Ctrl-C. What was
measured until Ctrl-C, or until the server was gone, is shown and written all the same.
"""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Final

import psutil
import typer
import uvloop
from rich.console import Console
from rich.markup import escape

from kvota.cli_numbers import positive
from kvota.core.errors import KvotaError
from kvota.tools.load.applying import apply_cap, not_applied, require_appliable, with_effect
from kvota.tools.load.baseline import baseline as measure_baseline
from kvota.tools.load.bench import Bench
from kvota.tools.load.cut import kept_until_cut
from kvota.tools.load.isolation import isolation as measure_isolation
from kvota.tools.load.loopback import FLAG
from kvota.tools.load.measure import Slo
from kvota.tools.load.progress import Bar
from kvota.tools.load.schedule import BadLengths, Lengths, Shape
from kvota.tools.load.session import Finding, Mode, Where, facts_of, paths_of, run
from kvota.tools.load.soak import soak as measure_soak
from kvota.tools.load.soak_page import soak_report
from kvota.tools.load.sweep import SweepOptions
from kvota.tools.load.sweep import sweep as measure_sweep
from kvota.tools.load.sweep_page import sweep_report
from kvota.tools.load.throughput import BATCHES
from kvota.tools.load.throughput import throughput as measure_throughput
from kvota.tools.report.html import require_writable
from kvota.tools.report.terminal import progress_bar, show

EXIT_BAD: Final = 1
EXIT_UNUSABLE: Final = 2
EXIT_INTERRUPTED: Final = 130
LOCAL: Final = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option(envvar="KVOTA_URL", help="The server to load.")]
ApiKey = Annotated[str | None, typer.Option(envvar="KVOTA_API_KEY", help="A key of the server.")]
Model = Annotated[str | None, typer.Option(help="[default: the server's first]")]
Chat = Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")]
Prompt = Annotated[str, typer.Option(help="Prompt length in tokens, as 128 or 32-192.")]
Output = Annotated[str, typer.Option(help="Output length in tokens, as 64 or 16-64.")]
Seed = Annotated[int, typer.Option(help="Decides texts, lengths and moments.")]
Out = Annotated[
    Path | None, typer.Option(help="Path of the report, without ending.  [default: bench-MODE]")
]
Allowed = Annotated[
    bool, typer.Option(FLAG, help="Load a server on another machine, which is yours to load.")
]
Rate = Annotated[
    float | None, typer.Option(min=0.001, help="Requests per second.", callback=positive)
]


def _running(pid: int | None) -> int | None:
    """The number of a process that there is."""
    if pid is not None and not psutil.pid_exists(pid):
        raise typer.BadParameter(f"there is no process {pid} on this machine.")
    return pid


bench = typer.Typer(no_args_is_help=True, help="Load a running server and say what it can do.")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(bench, name="bench")


@bench.command()
def baseline(
    url: Url = LOCAL,
    api_key: ApiKey = None,
    model: Model = None,
    chat: Chat = False,
    prompts: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, with commas.")
    ] = "128,512,1024",
    output: Output = "64",
    requests: Annotated[int, typer.Option(min=1, help="Of each prompt length.")] = 10,
    seed: Seed = 1,
    out: Out = None,
    allowed: Allowed = False,
) -> None:
    """One request at a time: TTFT, TPOT and tokens per second."""

    async def mode(bench: Bench) -> Finding:
        lengths = [Lengths.parse(one.strip()) for one in prompts.split(",")]
        result = await measure_baseline(bench, lengths, Lengths.parse(output), requests)
        return Finding.of(result, result.report(facts_of(bench)), result.cut)

    _run("baseline", mode, _where(url, api_key, model, chat, seed, allowed), out)


@bench.command()
def throughput(
    url: Url = LOCAL,
    api_key: ApiKey = None,
    model: Model = None,
    chat: Chat = False,
    prompt: Prompt = "128",
    output: Output = "64",
    batches: Annotated[
        str, typer.Option(help="How many requests at once, with commas.")
    ] = ",".join(map(str, BATCHES)),
    seconds: Annotated[float, typer.Option(min=1, help="Of each batch.", callback=positive)] = 20.0,
    seed: Seed = 1,
    out: Out = None,
    allowed: Allowed = False,
) -> None:
    """More and more requests at once, and from where on more bring nothing."""

    async def mode(bench: Bench) -> Finding:
        result = await measure_throughput(bench, _shape(prompt, output), _numbers(batches), seconds)
        facts = facts_of(bench, lengths=f"{prompt} + {output}")
        return Finding.of(result, result.report(facts), result.cut)

    _run("throughput", mode, _where(url, api_key, model, chat, seed, allowed), out)


@bench.command()
def sweep(
    url: Url = LOCAL,
    api_key: ApiKey = None,
    model: Model = None,
    chat: Chat = False,
    prompt: Prompt = "32-192",
    output: Output = "16-64",
    ttft_slo: Annotated[
        float, typer.Option(min=0.001, help="First token within, s.", callback=positive)
    ] = 2.0,
    tpot_slo: Annotated[
        float, typer.Option(min=0.001, help="Each further token, s.", callback=positive)
    ] = 0.2,
    seconds: Annotated[
        float, typer.Option(min=1, help="Window of each rate.", callback=positive)
    ] = 20.0,
    min_requests: Annotated[int, typer.Option(min=1, help="In each window.")] = 60,
    first_rate: Rate = None,
    max_rate: Rate = None,
    repeats: Annotated[int, typer.Option(min=1, help="Trials around the knee.")] = 3,
    apply: Annotated[
        bool, typer.Option("--apply", help="Set the cap at the running server and in --config.")
    ] = False,
    config: Annotated[
        Path, typer.Option(envvar="KVOTA_CONFIG", help="Where --apply keeps the cap.")
    ] = Path("kvota.toml"),
    seed: Seed = 1,
    out: Out = None,
    allowed: Allowed = False,
) -> None:
    """Rising rates, open loop: the knee, and the rate and settings to plan with."""

    async def mode(bench: Bench) -> Finding:
        options = SweepOptions(
            shape=_shape(prompt, output),
            slo=Slo(ttft_slo, tpot_slo),
            seconds=seconds,
            num_requests_min=min_requests,
            first_rps=first_rate,
            rate_max_rps=max_rate or float("inf"),
            repeats=repeats,
        )
        if apply:
            await require_appliable(bench.target.url, api_key, config)
        result = await measure_sweep(bench, options)
        report = sweep_report(result, facts_of(bench, lengths=f"{prompt} + {output}"))
        if not (apply and result.is_good):
            return Finding.of(result, report, result.cut)
        with kept_until_cut() as end:
            applied = await apply_cap(bench, options, result, api_key, config)
            return Finding.of(applied, with_effect(report, applied), applied.cut)
        return Finding.of(result, report, not_applied(end))

    _run("sweep", mode, _where(url, api_key, model, chat, seed, allowed), out)


@bench.command()
def isolation(
    url: Url = LOCAL,
    api_key: ApiKey = None,
    model: Model = None,
    chat: Chat = False,
    prompt: Prompt = "32-192",
    output: Output = "16-64",
    long_prompt: Annotated[str, typer.Option(help="Of the long ones.")] = "4096",
    long_output: Annotated[str, typer.Option(help="Of the long ones.")] = "64",
    long_at_once: Annotated[int, typer.Option(min=1, help="Long ones at all times.")] = 1,
    rate: Rate = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="With long ones.", callback=positive)
    ] = 60.0,
    seed: Seed = 1,
    out: Out = None,
    allowed: Allowed = False,
) -> None:
    """Short requests alone, beside long ones, and alone again."""

    async def mode(bench: Bench) -> Finding:
        result = await measure_isolation(
            bench,
            _shape(prompt, output),
            _shape(long_prompt, long_output),
            long_at_once=long_at_once,
            seconds=seconds,
            rate_rps=rate,
        )
        lengths = f"{prompt} + {output} beside {long_prompt} + {long_output}"
        return Finding.of(result, result.report(facts_of(bench, lengths=lengths)), result.cut)

    _run("isolation", mode, _where(url, api_key, model, chat, seed, allowed), out)


@bench.command()
def soak(
    url: Url = LOCAL,
    api_key: ApiKey = None,
    model: Model = None,
    chat: Chat = False,
    prompt: Prompt = "32-192",
    output: Output = "16-64",
    minutes: Annotated[float, typer.Option(min=0.01, help="How long.", callback=positive)] = 30.0,
    rate: Rate = None,
    pid: Annotated[
        int | None,
        typer.Option(help="Watch this process's memory, with its children's.", callback=_running),
    ] = None,
    seed: Seed = 1,
    out: Out = None,
    allowed: Allowed = False,
) -> None:
    """The same load for a long time: memory, drift of the TTFT, and whether KV comes back."""

    async def mode(bench: Bench) -> Finding:
        shape = _shape(prompt, output)
        result = await measure_soak(
            bench, shape, minutes=minutes, rate_rps=rate, read_memory=lambda: _memory_of(pid)
        )
        facts = facts_of(bench, lengths=f"{prompt} + {output}")
        return Finding.of(result, soak_report(result, facts), result.cut)

    _run("soak", mode, _where(url, api_key, model, chat, seed, allowed), out)


def _where(
    url: str, api_key: str | None, model: str | None, chat: bool, seed: int, allowed: bool
) -> Where:
    return Where(url=url, api_key=api_key, model=model, is_chat=chat, seed=seed, is_allowed=allowed)


def _run(name: str, mode: Mode, where: Where, out: Path | None) -> None:
    """Measure with a bar, print the first table and the verdict, write both files."""
    console = Console(highlight=False)
    paths = paths_of(out or Path(f"bench-{name}"))
    try:
        require_writable(*paths)
        with progress_bar() as bar, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            finding = runner.run(run(where, mode, Bar(bar)))
        finding.write(paths)
    except KvotaError as error:
        Console(stderr=True, highlight=False).print(escape(error.message), soft_wrap=True)
        sys.exit(EXIT_UNUSABLE)
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted: nothing was measured, and nothing written.")
        sys.exit(EXIT_INTERRUPTED)
    for section in finding.report.sections[:2]:
        if section.table is not None:
            console.print(f"[bold]{escape(section.title)}[/bold]")
            show(section.table, console)
    console.print(escape(finding.report.verdict), soft_wrap=True)
    console.print(f"Written: {escape(', '.join(map(str, paths)))}", soft_wrap=True)
    if finding.cut is not None:
        sys.exit(EXIT_INTERRUPTED if finding.cut.is_interrupt else EXIT_UNUSABLE)
    if not finding.is_good:
        sys.exit(EXIT_BAD)


def _shape(prompt: str, output: str) -> Shape:
    return Shape(Lengths.parse(prompt), Lengths.parse(output))


def _numbers(text: str) -> list[int]:
    """Raises BadLengths for what are no whole numbers from 1."""
    try:
        numbers = [int(one) for one in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise BadLengths(f"{text!r}: write whole numbers with commas, for example 1,2,4,8.")
    return numbers


def _memory_of(pid: int | None) -> float | None:
    """Bytes resident, of the process and its children; None when there is no such process."""
    if pid is None:
        return None
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return float(sum(one.memory_info().rss for one in family))
    except psutil.Error:
        return None
