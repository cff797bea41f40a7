"""The command `kvota doctor`: what is wrong with this machine, or with a running server."""

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvota import __version__
from kvota.model.catalog import cache_dir_of, expanded
from kvota.tools.doctor.diagnosis import Diagnosis, diagnose
from kvota.tools.doctor.environment import examine
from kvota.tools.doctor.finding import Finding, has_problem
from kvota.tools.doctor.gpu import examine_gpus
from kvota.tools.doctor.gpu_probe import read_gpus
from kvota.tools.doctor.machine import this_machine
from kvota.tools.doctor.report import machine_report, server_report
from kvota.tools.doctor.show import as_json as shown_as_json
from kvota.tools.doctor.show import machine_verdict, show_diagnosis, show_machine
from kvota.tools.doctor.stations import as_json as stations_as_json
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.watch import Patient, watch
from kvota.tools.doctor.window import Window
from kvota.tools.report.html import Report, require_writable, write_html, write_json
from kvota.tools.report.terminal import progress_bar

EXIT_PROBLEM = 1
EXIT_INTERRUPTED = 130
LOOKS_MIN = 6  # in one watch, so that what only passes by is told from what stays

LOOKS_MAX = 200  # each is kept to the end


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(doctor)


def doctor(
    url: Annotated[
        str | None, typer.Option(help="A running server to examine.  [default: this machine]")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="How long to watch the server.")
    ] = 60.0,
    every: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds between two looks, at most.")
    ] = 2.0,
    ttft: Annotated[float, typer.Option(min=0, help="First token within so many seconds.")] = 2.0,
    tpot: Annotated[float, typer.Option(min=0, help="Seconds for each further token.")] = 0.1,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="KVOTA_API_KEY", help="An operator's: shows keys and requests too."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where you mean to serve.")] = 8000,
    cache_dir: Annotated[Path | None, typer.Option(help="Where models are kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Path of the report, without ending.  [default: doctor, with --url]"),
    ] = None,
) -> None:
    """Whether this machine is fit to serve, or with --url what a running server suffers from.

    The exit status is 1 when there is a problem. Ctrl-C ends the watching with 130, and what was
    seen until then is judged.
    """
    console, is_cut = Console(highlight=False), False
    facts = {
        "when": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "kvota": __version__,
    }
    if url is not None:
        out = out or (None if as_json else Path("doctor"))
    if out is not None:
        require_writable(*_paths(out))
    if url is not None:
        window = _watch(url, api_key, seconds, every)
        diagnosis = diagnose(window, Targets(ttft_s=ttft, tpot_s=tpot))
        found, shown = list(diagnosis.findings), _diagnosis_as_json(diagnosis)
        is_cut = shown["is_incomplete"] = window.is_cut
        report = server_report(diagnosis, window, {"server": url, **facts})
        if not as_json:
            show_diagnosis(diagnosis, console)
    else:
        folder = expanded(str(cache_dir or cache_dir_of(os.environ)))
        machine = this_machine(folder, port, os.environ)
        found = [*examine(machine), *examine_gpus(read_gpus(os.environ))]
        shown, report = _as_json(machine_verdict(found), found), machine_report(found, facts)
        if not as_json:
            show_machine(found, console)
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
    if out is not None:
        _write(out, shown, report, console)
    if is_cut:
        Console(stderr=True).print("Interrupted: this is what was seen until then.")
        sys.exit(EXIT_INTERRUPTED)
    if has_problem(found):
        sys.exit(EXIT_PROBLEM)


def _watch(url: str, api_key: str | None, seconds: float, every_s: float) -> Window:
    with Patient(url, api_key) as patient, progress_bar() as bar:
        task = bar.add_task("watching", total=seconds)
        return watch(
            patient,
            seconds,
            min(max(every_s, seconds / LOOKS_MAX), seconds / LOOKS_MIN),
            lambda gone_s: bar.update(task, completed=gone_s),
        )


def _as_json(verdict: str, found: list[Finding]) -> dict[str, Any]:
    return {"verdict": verdict, "findings": shown_as_json(found)}


def _diagnosis_as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        **_as_json(diagnosis.verdict, list(diagnosis.findings)),
        "stations": stations_as_json(diagnosis.stations),
        "span_s": round(diagnosis.span_s, 3),
        "num_ended": diagnosis.num_ended,
    }


def _paths(stem: Path) -> tuple[Path, Path]:
    return stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.html")


def _write(stem: Path, shown: dict[str, Any], report: Report, console: Console) -> None:
    paths = _paths(stem)
    write_json(shown, paths[0])
    write_html(report, paths[1])
    console.print(f"\nWritten: {paths[0]}, {paths[1]}", markup=False, soft_wrap=True)
