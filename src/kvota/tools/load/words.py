"""Figures as tables show them."""

from math import inf, isnan

from kvota.tools.load.percentiles import Spread
from kvota.tools.report.charts import number

MISSING = "–"


def ms(seconds: float | None) -> str:
    """Milliseconds, with as many digits as mean something."""
    if seconds is None or isnan(seconds):
        return MISSING
    return "unbounded" if seconds == inf else number(1000 * seconds)


def share(value: float) -> str:
    """Percent; 100 % only where nothing is missing."""
    if 0.995 <= value < 1:
        return "99.9 %" if value >= 0.999 else f"{100 * value:.1f} %"
    return f"{100 * value:.0f} %"


def p99(spread: Spread | None) -> str:
    """The p99 in milliseconds, and how far it can be believed."""
    if spread is None:
        return MISSING
    if spread.is_p99_sure:
        return ms(spread.p99)
    return f"{ms(spread.p99)} (≥ {ms(spread.p99_low)})"


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
