"""Figures as tables show them."""

from math import inf, isnan

from kvota.tools.load.percentiles import Spread
from kvota.tools.report.charts import number

MISSING = "–"
UNSURE = (
    "~ before a p99: of fewer than 368 samples. The true p99 may be any higher; the JSON has the "
    "lower bound that holds with 95 % confidence."
)


def ms(seconds: float | None) -> str:
    """Milliseconds, with as many digits as mean something."""
    if seconds is None or isnan(seconds):
        return MISSING
    return "unbounded" if seconds == inf else number(1000 * seconds)


def in_ms(spread: Spread | None, name: str) -> float:
    """A percentile for a chart; unbounded, which is drawn as a gap, where nobody was served."""
    return inf if spread is None else 1000 * float(getattr(spread, name))


def share(value: float) -> str:
    """Percent; 100 % only where nothing is missing."""
    if 0.995 <= value < 1:
        return "99.9 %" if value >= 0.999 else f"{100 * value:.1f} %"
    return f"{100 * value:.0f} %"


def p99(spread: Spread | None) -> str:
    """The p99 in milliseconds; with a ~ where the samples are too few to bound it from above."""
    if spread is None:
        return MISSING
    return ms(spread.p99) if spread.is_p99_sure else f"~{ms(spread.p99)}"


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
