"""What `kvota trace describe --html` writes: a file of traffic as people see it at a glance."""

from collections.abc import Iterator

from kvota.tools.report.charts import Mark, Series, line_chart, number
from kvota.tools.report.html import Report, Section, Table
from kvota.traffic.curves import Curves

_DAY_S = 86_400.0
_HOUR_S = 3_600.0


def trace_report(name: str, kind: str, table: Table, curves: Curves, *, has_times: bool) -> Report:
    """The page of the file `name`, of format `kind`. Without recorded times, none are shown."""
    sections = [
        Section("Figures", table=table),
        *(_arrivals(curves) if has_times and curves.rates else ()),
        Section("Lengths", "How many requests are at most so long.", charts=[_lengths(curves)]),
    ]
    return Report(f"Traffic in {name}", {"format": kind}, sections)


def _arrivals(curves: Curves) -> Iterator[Section]:
    last_s = curves.rates[-1][0]
    unit_s, unit = (_HOUR_S, "hours") if last_s > _DAY_S / 12 else (1.0, "seconds")
    points = [(at / unit_s, rate) for at, rate in curves.rates]
    chart = line_chart(
        [Series("requests/s", points)],
        f"{unit} from the first arrival",
        "requests/s",
        marks=[Mark(f"mean {number(curves.mean_rps)}", curves.mean_rps, is_level=True)],
    )
    text = f"Requests a second, counted in windows of {number(curves.window_s)} s."
    yield Section("Arrivals", text, charts=[chart])


def _lengths(curves: Curves) -> str:
    series = [Series("prompt", curves.prompt), Series("output", curves.output)]
    return line_chart(series, "tokens", "% of requests", log_x=True)
