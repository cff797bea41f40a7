"""A visit of the doctor as one HTML page: the verdict, each cause with its remedy, and charts.

Where a running server was watched, the charts show what the looks saw: the time at each of the six
stations, requests running and waiting, KV memory, tokens per second.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvota.tools.doctor import names
from kvota.tools.doctor.diagnosis import Diagnosis
from kvota.tools.doctor.finding import Finding, Level, worst_first
from kvota.tools.doctor.show import machine_verdict
from kvota.tools.doctor.stations import Station
from kvota.tools.doctor.window import Window
from kvota.tools.report.charts import Bars, Series, bar_chart, line_chart
from kvota.tools.report.html import Report, Section, Table

MISSING = "–"


def machine_report(findings: Sequence[Finding], facts: Mapping[str, str]) -> Report:
    """`findings` may be of any level; what is in order goes into one table at the end."""
    rows = [(one.name, one.said) for one in findings if one.level is Level.OK]
    fine = [Section("In order", table=Table(("examined", "found"), rows))] if rows else []
    return Report(
        "Doctor: this machine",
        facts,
        [*_causes(findings), *fine],
        machine_verdict(findings),
        is_bad=_is_bad(findings),
    )


def server_report(diagnosis: Diagnosis, window: Window, facts: Mapping[str, str]) -> Report:
    """`window`: the looks that the diagnosis was made from."""
    ended = {} if diagnosis.num_ended is None else {"requests ended": f"{diagnosis.num_ended:,}"}
    return Report(
        "Doctor: a running server",
        {**facts, "watched": f"{diagnosis.span_s:.0f} s{_cut(window)}", **ended},
        [*_causes(diagnosis.findings), _stations(diagnosis.stations), _watched(window)],
        diagnosis.verdict,
        is_bad=_is_bad(diagnosis.findings),
    )


def _cut(window: Window) -> str:
    return ", then interrupted" if window.is_cut else ""


def _is_bad(findings: Iterable[Finding]) -> bool:
    return any(one.level is Level.PROBLEM for one in findings)


def _causes(findings: Iterable[Finding]) -> list[Section]:
    return [
        Section(f"{one.level.value.capitalize()}: {one.name}", _text(one))
        for one in worst_first(findings)
        if one.level is not Level.OK
    ]


def _text(one: Finding) -> str:
    parts = (
        one.said,
        one.means,
        one.change and f"▸ {one.change}",
        one.source and f"Read from {one.source}",
    )
    return "\n\n".join(part for part in parts if part)


def _stations(passed: Sequence[Station]) -> Section:
    rows = [
        (
            one.name,
            MISSING if one.mean_s is None else f"{one.mean_s:.3f}",
            MISSING if one.num_now is None else str(one.num_now),
            one.how,
        )
        for one in passed
    ]
    means = [one.mean_s or 0.0 for one in passed]
    bars = [Bars("mean, s", means)]
    charts = [bar_chart([one.name for one in passed], bars, "s a request")] if any(means) else []
    return Section(
        "Where a request's time went",
        "Mean of the requests that ended in this time. A dash: the server does not measure it.",
        Table(("station", "s", "now there", "doing"), rows),
        charts,
    )


def _watched(window: Window) -> Section:
    def rows(*of: str) -> list[tuple[float, float]]:
        return window.over_time(*of)

    requests = [
        Series("running", rows(*names.RUNNING)),
        Series("in line", rows(*names.WAITING)),
    ]
    usage = [(at_s, 100 * share) for at_s, share in rows(*names.KV_USAGE)]
    charts = [
        *_chart(requests, "requests"),
        *_chart([Series("KV memory in use", usage)], "% of KV memory"),
        *_chart([Series("output", window.rate_over_time(*names.GENERATED))], "tokens/s"),
    ]
    return Section("While it was watched", charts=charts)


def _chart(series: Sequence[Series], label: str) -> list[str]:
    """None where the server shows nothing of it."""
    shown = [one for one in series if one.points]
    return [line_chart(shown, "seconds", label)] if shown else []
