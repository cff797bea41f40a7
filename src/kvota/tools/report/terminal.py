"""The same tables in a terminal, and the bar that long commands show while they run.

Results go to stdout, the bar to stderr and only to a terminal, so that output can be piped.
"""

from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from kvota.tools.report.html import Table

PIPED_WIDTH: Final = 400  # columns


def show(table: Table, console: Console) -> None:
    """Print a table: the first column to the left, figures to the right."""
    drawn = RichTable(box=None, pad_edge=False)
    for at, title in enumerate(table.header):
        drawn.add_column(escape(title), justify="left" if at == 0 else "right", no_wrap=at == 0)
    for row in table.rows:
        drawn.add_row(*(escape(cell) for cell in row))
    print_table(drawn, console)


def print_table(drawn: RichTable, console: Console) -> None:
    """As wide as it needs to be where a program reads it: there a broken cell is a wrong one."""
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPED_WIDTH, highlight=False)
    console.print(drawn)


def progress_bar() -> Progress:
    """A bar with what is being done, time gone and time to come. Use it in a `with`."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
