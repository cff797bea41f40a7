"""A table in a terminal shows every cell as it is."""

import io

from rich.console import Console

from kvota.tools.report.html import Table
from kvota.tools.report.terminal import show


def test_cells_are_shown_as_they_are() -> None:
    out = io.StringIO()
    table = Table(("rate", "p50 [ms]"), [("1", "[bold]10"), ("20", "7")])
    show(table, Console(file=out, width=80, highlight=False))
    lines = out.getvalue().splitlines()
    assert [line.split() for line in lines] == [
        ["rate", "p50", "[ms]"],
        ["1", "[bold]10"],
        ["20", "7"],
    ]
    assert lines[1].rstrip().endswith("[bold]10")
    assert len({len(line.rstrip()) for line in lines}) == 1, "figures end in one column"
