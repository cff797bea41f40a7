"""What a tired operator reads: the verdict first, remedies marked, nothing beyond the screen."""

import io

from rich.console import Console

from kvota.tools.doctor.diagnosis import Diagnosis
from kvota.tools.doctor.finding import Finding, Level, ok
from kvota.tools.doctor.show import machine_verdict, show_diagnosis, show_machine
from kvota.tools.doctor.stations import Station

NOTE = Finding(name="swap", level=Level.NOTE, said="2 GB in use", means="slow [steps]", change="x")
PROBLEM = Finding(
    name="model cache",
    level=Level.PROBLEM,
    said="/m: Permission denied",
    means="no model can be fetched",
    change="KVOTA_CACHE_DIR: " + "another folder " * 10,
    source="/m",
)
STATIONS = (
    Station(name="line", mean_s=1.5, num_now=3, how="waiting"),
    Station(name="prefill", mean_s=0.25, num_now=0, how="reading"),
    Station(name="door", mean_s=None, num_now=None, how="keys"),
)


def shown(width: int = 80) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=width, highlight=False), text


def diagnosis(*findings: Finding, is_partly_hidden: bool = False) -> Diagnosis:
    return Diagnosis(
        verdict="Model [cache].",
        findings=findings,
        stations=STATIONS,
        span_s=60.0,
        num_ended=1234,
        is_partly_hidden=is_partly_hidden,
    )


def test_the_verdict_comes_first_and_the_worst_before_the_rest() -> None:
    console, text = shown()
    show_machine([ok("cores", "2 usable"), NOTE, PROBLEM], console)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert lines[0] == "This machine is not fit to serve yet: model cache."
    begins = [line for line in lines if line.startswith(("problem", "note", "ok"))]
    assert [line.split()[0] for line in begins] == ["problem", "note", "ok"]
    assert any(line.lstrip().startswith("▸ KVOTA_CACHE_DIR") for line in lines)
    assert "slow [steps]" in text.getvalue()
    assert max(len(line) for line in lines) <= 80


def test_a_verdict_says_how_bad_it_is() -> None:
    assert machine_verdict([ok("a", "b")]) == "This machine can serve."
    assert machine_verdict([NOTE]) == "This machine can serve. Worth knowing: swap."


def test_stations_have_their_time_a_bar_and_who_is_there_now() -> None:
    console, text = shown()
    show_diagnosis(diagnosis(PROBLEM), console)
    lines = text.getvalue().splitlines()
    assert lines[0] == "Model [cache]."
    line, prefill, door = lines[-3:]
    assert line.split()[:3] == ["line", "1.50", "s"]
    assert "3 now" in line
    assert line.count("█") == 6 * prefill.count("█") == 24
    assert prefill.split()[:3] == ["prefill", "250", "ms"]
    assert "now" not in prefill
    assert door.split()[:2] == ["door", "–"]


def test_that_something_was_hidden_is_said_last() -> None:
    console, text = shown()
    show_diagnosis(diagnosis(is_partly_hidden=True), console)
    assert "--api-key" in text.getvalue().splitlines()[-1]
