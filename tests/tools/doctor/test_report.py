"""The doctor's page: what hurts first, and charts of what the looks saw."""

from kvota.tools.doctor.diagnosis import diagnose
from kvota.tools.doctor.finding import Finding, Level, ok
from kvota.tools.doctor.page import Page
from kvota.tools.doctor.report import machine_report, server_report
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.window import Reading, Window
from kvota.tools.report.html import render

NOTE = Finding(name="swap", level=Level.NOTE, said="2 GB in use")
PROBLEM = Finding(
    name="model cache", level=Level.PROBLEM, said="no <place>", change="KVOTA_CACHE_DIR"
)


def look(at_s: float, generated: int, running: int) -> Reading:
    page = f"kvota_generated_tokens_total {generated}\nkvota_requests_running {running}\n"
    return Reading(at_s=at_s, page=Page.parse(page))


def test_a_problem_comes_before_a_note_and_what_is_fine_last() -> None:
    report = machine_report([ok("cores", "2 usable"), NOTE, PROBLEM], {"when": "now"})
    titles = [one.title for one in report.sections]
    assert titles == ["Problem: model cache", "Note: swap", "In order"]
    assert report.is_bad
    assert "▸ KVOTA_CACHE_DIR" in report.sections[0].text
    assert "no &lt;place&gt;" in render(report)


def test_a_chart_is_drawn_of_what_the_server_shows_and_of_nothing_else() -> None:
    window = Window([look(0.0, 100, 1), look(2.0, 150, 3), look(4.0, 10, 0)])
    report = server_report(diagnose(window, Targets()), window, {"server": "http://x"})
    [watched] = [one for one in report.sections if one.title == "While it was watched"]
    assert len(watched.charts) == 2
    assert "tokens/s" in watched.charts[1]
    [stations] = [one for one in report.sections if one.title.startswith("Where a request")]
    assert not stations.charts  # no request ended, so no station has a bar
    assert report.facts["watched"] == "4 s"
    assert not report.is_bad
