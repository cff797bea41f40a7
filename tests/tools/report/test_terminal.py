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


def test_what_a_program_reads_is_never_broken() -> None:
    out = io.StringIO()
    cells = tuple(f"a-long-name-{at}" for at in range(12))
    show(Table(cells, [cells]), Console(file=out, width=80, highlight=False))
    assert [tuple(line.split()) for line in out.getvalue().splitlines()] == [cells, cells]


def test_a_terminal_is_never_wider_than_it_is() -> None:
    out = io.StringIO()
    cells = tuple(f"a-long-name-{at}" for at in range(12))
    show(Table(cells, [cells]), Console(file=out, width=80, force_terminal=True, color_system=None))
    assert max(map(len, out.getvalue().splitlines())) <= 80
