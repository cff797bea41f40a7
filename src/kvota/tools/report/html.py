"""One HTML page that holds everything it shows, and the JSON beside it.

    section = Section("Latency", table=table, charts=[svg])
    report = Report("Sweep of tiny", {"server": url}, [section])
    write_html(report, Path("sweep.html"))

Text is plain: a blank line begins a paragraph. Everything but the charts is escaped here; charts
come from `charts.py`, which escapes what it is given.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import isfinite
from pathlib import Path

from kvota.core.errors import KvotaError

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 980px; margin: 2.5rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .3rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
.verdict { font-size: 1.05rem; padding: .7rem 1rem; background: var(--soft);
           border-left: 4px solid #0072b2; margin: 1rem 0; }
.verdict.bad { border-color: #d55e00; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem; }
dt { opacity: .7; } dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums;
        margin: .6rem 0; }
th, td { padding: .25rem .55rem; border-bottom: 1px solid var(--line); text-align: right;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; }
th.text, td.text { text-align: left; white-space: normal; min-width: 14rem; }
pre { background: var(--soft); padding: .7rem 1rem; overflow-x: auto; font-size: .85rem; }
svg { width: 100%; min-width: 640px; height: auto; margin: .6rem 0; }
"""
FIGURE_LENGTH_MAX = 48  # characters; what is longer is a sentence


class CannotWrite(KvotaError):
    """A report could not be written where it was wanted. The message says why."""


@dataclass(frozen=True, slots=True)
class Table:
    """A heading for each column; every row has as many cells. Shown in terminals too."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.header), f"{len(row)} cells for {len(self.header)} columns"


@dataclass(frozen=True, slots=True)
class Section:
    """Text, then charts (SVG), a table, and lines to copy; whatever of them there is."""

    title: str
    text: str = ""
    table: Table | None = None
    charts: Sequence[str] = ()
    code: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """`verdict` is the one sentence to take away; `facts` are the conditions of the run."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[Section] = ()
    verdict: str = ""
    is_bad: bool = False  # the verdict says that something is wrong


def write_html(report: Report, path: Path) -> None:
    """Write the page, over whatever was there. Raises CannotWrite."""
    _write(path, render(report))


def write_json(content: object, path: Path) -> None:
    """Write plain data. A number that JSON has no word for (infinity) becomes null."""
    _write(path, json.dumps(_plain(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def require_writable(*paths: Path | None) -> None:
    """Raises CannotWrite for a place where nothing can be written, before the work is done.

    Makes the folders, and leaves a file that is there as it was.
    """
    for path in (one for one in paths if one is not None):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            was_there = path.exists()
            with path.open("ab"):
                pass
            if not was_there:
                path.unlink()
        except OSError as error:
            raise CannotWrite(f"{path} cannot be written: {error.strerror}.") from error


def render(report: Report) -> str:
    """The page as text."""
    kind = "verdict bad" if report.is_bad else "verdict"
    verdict = f'<p class="{kind}">{escape(report.verdict)}</p>' if report.verdict else ""
    body = "\n".join(_section(one) for one in report.sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(report.title)}</h1>\n{verdict}\n{_facts(report.facts)}\n{body}\n"
        "</body>\n</html>\n"
    )


def _section(one: Section) -> str:
    paragraphs = "".join(f"<p>{escape(part)}</p>\n" for part in one.text.split("\n\n") if part)
    table = _table(one.table) if one.table is not None else ""
    code = f"<pre>{escape(one.code)}</pre>" if one.code else ""
    # On a phone a chart is moved sideways: made as narrow as that, its figures could not be read.
    charts = "".join(f'<div class="wide">{chart}</div>\n' for chart in one.charts)
    return f"<h2>{escape(one.title)}</h2>\n{paragraphs}{charts}{table}{code}"


def _table(table: Table) -> str:
    kinds = [_kind(column) for column in zip(table.header, *table.rows, strict=True)]
    head = _cells("th", table.header, kinds)
    rows = "\n".join(f"<tr>{_cells('td', row, kinds)}</tr>" for row in table.rows)
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _kind(column: Sequence[str]) -> str:
    """The attribute of a column of sentences, which may be broken; figures may not."""
    return ' class="text"' if max(map(len, column)) > FIGURE_LENGTH_MAX else ""


def _cells(tag: str, cells: Sequence[str], kinds: Sequence[str]) -> str:
    return "".join(
        f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)
    )


def _facts(facts: Mapping[str, str]) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items()
    )
    return f"<dl>{items}</dl>" if items else ""


def _plain(content: object) -> object:
    if isinstance(content, float):
        return content if isfinite(content) else None
    if isinstance(content, Mapping):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content
    return [_plain(value) for value in content]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotWrite(f"{path} cannot be written: {error.strerror}.") from error
