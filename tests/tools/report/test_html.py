"""One page that holds everything it shows, and JSON that every parser reads."""

import json
from html.parser import HTMLParser
from math import inf, nan
from pathlib import Path

import pytest

from kvota.tools.report.charts import Series, line_chart
from kvota.tools.report.html import (
    CannotWrite,
    Report,
    Section,
    Table,
    render,
    require_writable,
    write_html,
    write_json,
)

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Tags in balance, text by tag, and every address that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.fetched: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.append((self.open[-1], data.strip()))


def page(report: Report, tmp_path: Path) -> Page:
    write_html(report, tmp_path / "deep" / "report.html")
    return Page((tmp_path / "deep" / "report.html").read_text(encoding="utf-8"))


def test_a_page_shows_all_it_was_given_and_fetches_nothing(tmp_path: Path) -> None:
    section = Section(
        "Latency",
        "One.\n\nTwo.",
        Table(("rate", "p50"), [("1", "10 ms"), ("2", "20 ms")]),
        [line_chart([Series("a", [(1, 1)])], "x", "y")],
    )
    report = Report("Sweep", {"server": "http://127.0.0.1:1"}, [section], "The knee is at 2.")
    seen = page(report, tmp_path)
    assert seen.fetched == []
    assert {("h1", "Sweep"), ("h2", "Latency"), ("p", "One."), ("p", "Two.")} <= set(seen.texts)
    assert {("th", "p50"), ("td", "20 ms"), ("dd", "http://127.0.0.1:1")} <= set(seen.texts)
    assert ("p", "The knee is at 2.") in seen.texts


def test_text_cannot_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    section = Section(evil, evil, Table((evil,), [(evil,)]))
    seen = page(Report(evil, {evil: evil}, [section], evil), tmp_path)
    assert [tag for tag, text in seen.texts if text == evil].count("script") == 0
    assert sum(text == evil for _, text in seen.texts) == 9


def test_a_row_has_a_cell_for_each_column() -> None:
    with pytest.raises(AssertionError, match="2 cells for 1"):
        Table(("a",), [("1", "2")])


def test_json_has_no_number_that_parsers_refuse(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json({"p99": inf, "rows": [{"x": nan, "y": 1.5}], "name": "ü", 3: (1, 2)}, path)
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "p99": None,
        "rows": [{"x": None, "y": 1.5}],
        "name": "ü",
        "3": [1, 2],
    }


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="cannot be written"):
        write_json({}, tmp_path / "file" / "x.json")


def test_a_column_of_sentences_may_be_broken_and_a_column_of_figures_may_not() -> None:
    table = Table(("text", "n"), [("short", "1"), ("a long sentence of many words " * 3, "2")])
    page = render(Report("Title", sections=[Section("Rows", table=table)]))
    assert page.count('<td class="text">') == 2
    assert "<td>1</td>" in page


def test_a_place_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    require_writable(kept, None, tmp_path / "new" / "page.html")
    assert kept.read_text() == "{}"
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(CannotWrite, match=r"kept\.json/page\.html cannot be written"):
        require_writable(kept / "page.html")
    with pytest.raises(CannotWrite, match="cannot be written: Is a directory"):
        require_writable(tmp_path / "new")


def test_a_chart_can_be_moved_sideways_where_the_screen_is_narrow() -> None:
    chart = line_chart([Series("x", [(0, 1), (1, 2)])], "t", "y")
    page = render(Report("r", {}, [Section("s", charts=[chart])]))
    assert f'<div class="wide">{chart}</div>' in page
    assert ".wide { overflow-x: auto; }" in page
    assert "min-width: 640px" in page
