"""The doctor's word in a terminal: the verdict first, then the causes, then what is in order.

Refusing requests: the line is full.

problem  refusing   41 of 60 requests (68 %) got 503 queue_full
                    all 4 places are taken
                    ▸ max_running_requests above 4, if …
                    kvota_rejected_total, kvota_requests_waiting
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvota.tools.doctor.finding import Finding, Level, worst_first

_STYLES: Final = {Level.PROBLEM: "bold red", Level.NOTE: "yellow", Level.OK: "green"}


def machine_verdict(findings: Sequence[Finding]) -> str:
    problems = [one.name for one in findings if one.level is Level.PROBLEM]
    notes = [one.name for one in findings if one.level is Level.NOTE]
    if problems:
        return f"This machine is not fit to serve yet: {', '.join(problems)}."
    if notes:
        return f"This machine can serve. Worth knowing: {', '.join(notes)}."
    return "This machine can serve."


def show_findings(findings: Iterable[Finding], console: Console) -> None:
    """Worst first; what is in order takes one line each."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    last: Level | None = None
    for one in worst_first(findings):
        if last not in (None, Level.OK):
            table.add_row("", "", "")
        table.add_row(Text(one.level.value, _STYLES[one.level]), one.name, _text(one))
        last = one.level
    console.print(table)


def as_json(findings: Iterable[Finding]) -> list[object]:
    return [msgspec.to_builtins(one) for one in worst_first(findings)]


def _text(one: Finding) -> Text:
    text = Text(one.said)
    if one.means:
        text.append(f"\n{one.means}")
    if one.change:
        text.append(f"\n▸ {one.change}", "bold")
    if one.source and one.level is not Level.OK:
        text.append(f"\n{one.source}", "dim")
    return text
