"""The doctor's word in a terminal: the verdict, then each cause with its remedy, then the rest.

Refusing: queue_full.

problem  refusing: queue_full
         41 of 60 requests (68%), 4.1 a second
         the line is at max_waiting_queue; waiting for: all 4 places are taken
         ▸ max_running_requests above 4, while the time per token allows it; or another node
         kvota_rejected_total, /admin/requests
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvota.tools.doctor.diagnosis import Diagnosis
from kvota.tools.doctor.finding import Finding, Level, worst_first
from kvota.tools.doctor.stations import Station

_STYLES: Final = {Level.PROBLEM: "bold red", Level.NOTE: "yellow", Level.OK: "green"}
_BAR: Final = 24  # characters


def machine_verdict(findings: Sequence[Finding]) -> str:
    problems = [one.name for one in findings if one.level is Level.PROBLEM]
    notes = [one.name for one in findings if one.level is Level.NOTE]
    if problems:
        return f"This machine is not fit to serve yet: {', '.join(problems)}."
    if notes:
        return f"This machine can serve. Worth knowing: {', '.join(notes)}."
    return "This machine can serve."


def show_machine(findings: Sequence[Finding], console: Console) -> None:
    console.print(f"[bold]{escape(machine_verdict(findings))}[/bold]\n")
    _show_causes(findings, console)
    table = _grid(3)
    for one in findings:
        if one.level is Level.OK:
            table.add_row(Text("ok", _STYLES[Level.OK]), one.name, one.said)
    console.print(table)


def show_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    console.print(f"[bold]{escape(diagnosis.verdict)}[/bold]\n")
    _show_causes(diagnosis.findings, console)
    ended = "" if diagnosis.num_ended is None else f", {diagnosis.num_ended:,} requests ended"
    console.print(
        f"Where a request's time went (mean; {diagnosis.span_s:.0f} s{ended})", style="dim"
    )
    _show_stations(diagnosis.stations, console)
    if diagnosis.is_partly_hidden:
        console.print(
            "\nAn operator's key (--api-key) would show requests and keys too.", style="dim"
        )


def as_json(findings: Iterable[Finding]) -> list[object]:
    return [msgspec.to_builtins(one) for one in worst_first(findings)]


def _show_causes(findings: Iterable[Finding], console: Console) -> None:
    table = _grid(2)
    for one in worst_first(findings):
        if one.level is not Level.OK:
            table.add_row(Text(one.level.value, _STYLES[one.level]), _block(one))
            table.add_row("", "")
    if table.row_count:
        console.print(table)


def _show_stations(passed: Sequence[Station], console: Console) -> None:
    longest_s = max((one.mean_s or 0.0 for one in passed), default=0.0)
    table = _grid(5)
    for one in passed:
        length = round(_BAR * (one.mean_s or 0.0) / longest_s) if longest_s else 0
        table.add_row(
            one.name,
            "–" if one.mean_s is None else _duration(one.mean_s),
            Text("█" * length, "cyan"),
            "" if not one.num_now else f"{one.num_now} now",
            Text(one.how, "dim"),
        )
    table.columns[1].justify = "right"
    console.print(table)


def _grid(num_columns: int) -> Table:
    """All but the last column keep their words together."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for at in range(num_columns):
        table.add_column(no_wrap=at < num_columns - 1)
    return table


def _block(one: Finding) -> Text:
    text = Text.assemble((one.name, "bold"), f"\n{one.said}")
    if one.means:
        text.append(f"\n{one.means}")
    if one.change:
        text.append(f"\n▸ {one.change}", "green")
    if one.source:
        text.append(f"\n{one.source}", "dim")
    return text


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
