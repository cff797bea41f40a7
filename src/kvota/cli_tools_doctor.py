"""The command `kvota doctor`: what is wrong with this machine, or with a running server."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvota.model.catalog import cache_dir_of
from kvota.tools.doctor.environment import examine
from kvota.tools.doctor.finding import has_problem
from kvota.tools.doctor.gpu import examine_gpus
from kvota.tools.doctor.gpu_probe import read_gpus
from kvota.tools.doctor.machine import this_machine
from kvota.tools.doctor.show import as_json as findings_as_json
from kvota.tools.doctor.show import machine_verdict, show_findings

EXIT_PROBLEM = 1


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(doctor)


def doctor(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where you mean to serve.")] = 8000,
    cache_dir: Annotated[Path | None, typer.Option(help="Where models are kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Whether this machine is fit to serve; exit status 1 when it is not."""
    folder = (cache_dir or cache_dir_of(os.environ)).expanduser()
    found = [
        *examine(this_machine(folder, port, os.environ)),
        *examine_gpus(read_gpus(os.environ)),
    ]
    verdict = machine_verdict(found)
    if as_json:
        typer.echo(json.dumps({"verdict": verdict, "findings": findings_as_json(found)}, indent=2))
    else:
        console = Console(highlight=False)
        console.print(f"[bold]{escape(verdict)}[/bold]\n")
        show_findings(found, console)
    if has_problem(found):
        sys.exit(EXIT_PROBLEM)
