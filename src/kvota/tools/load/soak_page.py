"""What a soak shows: three series, their slopes with confidence, and the verdict."""

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from statistics import median

from kvota.tools.load.leak import NUM_BLOCKS, Slope, Trend, Verdict
from kvota.tools.load.soak import Soak
from kvota.tools.load.words import MISSING, mib, ms, share
from kvota.tools.report.charts import Series, line_chart
from kvota.tools.report.html import Report, Section, Table

HOUR_S = 3600.0
CHART_POINTS = 120
HEADER = (
    *("judged", "level", "slope per hour", "99 % interval", "growth in the run"),
    *("lately, per hour", "verdict"),
)
HOW = (
    "The first third is warm-up. The rest is cut into "
    f"{NUM_BLOCKS} blocks; a line is fitted to their medians, with Student's interval. Its second "
    "half, called lately, gets a line of its own. A leak is growth that chance does not explain, "
    "that is worth mentioning, that goes on lately, and that is no single step. Steady: the "
    "interval is below what is worth mentioning. Settled: it grew, but lately the interval is "
    "below that same rate. Undecided means: run longer."
)


def soak_report(result: Soak, facts: Mapping[str, str]) -> Report:
    """The page of a soak."""
    facts = {
        **facts,
        "load": f"{result.rate_rps:.3g} requests/s for {result.minutes:.3g} minutes",
        "served": f"{result.num_whole} of {result.num_sent}",
    }
    section = Section("Does it only grow?", HOW, _table(result), _charts(result))
    return Report(
        "Soak: the same load for a long time", facts, [section], verdict(result),
        is_bad=not result.is_good,
    )  # fmt: skip


def verdict(result: Soak) -> str:
    """One line for each of the three questions."""
    if result.complaint:
        return f"Refused: {result.complaint}"
    answers = [_memory_words(result.memory_trend), _ttft_words(result.ttft_trend)]
    if result.kv_first_used_bytes:
        first_used = mib(result.kv_first_used_bytes)
        answers.insert(
            1, f"Not counted: {first_used} of reserved KV blocks, used for the first time."
        )
    match result.is_kv_back:
        case True:
            answers.append("KV memory is back to what it was.")
        case False:
            assert result.kv_after is not None
            answers.append(f"KV memory is not back: {share(result.kv_after)} is still in use.")
        case None if result.kv_before is not None:
            answers.append("How much KV memory is in use at the end could not be read.")
        case None:
            answers.append("The server does not say how much KV memory is in use.")
    if result.num_failed:
        answers.append(
            f"{result.num_failed} of {result.num_sent} requests failed, the first: "
            f"{result.first_error.rstrip('.')}."
        )
    return " ".join(answers)


def _memory_words(memory: Trend | None) -> str:
    if memory is None:
        return "The server does not say how much memory it holds (try --pid)."
    grown = f"{mib(memory.growth)} in {_minutes(memory)}"
    below = f"below {mib(HOUR_S * memory.leak_max_per_s)} per hour, 99 % sure"
    match memory.verdict:
        case Verdict.LEAK:
            return f"Memory leaks: {mib(HOUR_S * memory.slope.per_s)} per hour."
        case Verdict.STEADY:
            return f"Memory is steady: {grown}. A leak, if any, is {below}."
        case Verdict.SETTLED:
            return f"Memory has settled: {grown}, then no more. A leak, if any, is {below}."
        case Verdict.UNDECIDED:
            return f"Whether memory grows is undecided: {_doubt(memory, mib)}"


def _ttft_words(ttft: Trend) -> str:
    grown = f"{_ms(ttft.growth)} in {_minutes(ttft)}"
    match ttft.verdict:
        case Verdict.LEAK:
            return f"TTFT rises: {_ms(HOUR_S * ttft.slope.per_s)} per hour."
        case Verdict.STEADY:
            return f"TTFT is steady: {grown}."
        case Verdict.SETTLED:
            return f"TTFT has settled: {grown}, then no more."
        case Verdict.UNDECIDED:
            return f"Whether TTFT drifts is undecided: {_doubt(ttft, _ms)}"


def _doubt(one: Trend, shown: Callable[[float], str]) -> str:
    """Why there is no answer, and what would bring one."""
    if isnan(one.slope.per_s):
        return "too little was seen. Run longer."
    resolution = shown(HOUR_S * one.resolution_per_s)
    return (
        f"lately {_interval(one.later, shown)} per hour, judged against {resolution}. Run longer."
    )


def _minutes(one: Trend) -> str:
    return f"{one.span_s / 60:.2g} minutes"


def _ms(seconds: float) -> str:
    return f"{ms(seconds)} ms"


def _interval(slope: Slope, shown: Callable[[float], str]) -> str:
    """The 99 % interval, per hour."""
    low, high = slope.per_s - slope.margin, slope.most_per_s
    return f"{shown(HOUR_S * low)} to {shown(HOUR_S * high)}"


def _table(result: Soak) -> Table:
    rows = []
    if result.memory_trend is not None:
        is_net = bool(result.looks.kv_touched_bytes)
        name = "memory without KV blocks" if is_net else "memory"
        rows.append(_cells(name, result.memory_trend, mib))
    rows.append(_cells("TTFT", result.ttft_trend, _ms))
    before, after = result.kv_before, result.kv_after
    if before is not None and after is not None:
        word = "back" if result.is_kv_back else "not back"
        change = f"{share(before)} before, {share(after)} after"
        rows.append(("KV in use", MISSING, MISSING, MISSING, change, MISSING, word))
    return Table(HEADER, rows)


def _cells(name: str, one: Trend, shown: Callable[[float], str]) -> tuple[str, ...]:
    slope = one.slope
    if isnan(slope.per_s):  # too few points to judge
        return name, *[MISSING] * 5, one.verdict.value
    return (
        name,
        shown(slope.level),
        shown(HOUR_S * slope.per_s),
        _interval(slope, shown),
        shown(one.growth),
        _interval(one.later, shown),
        one.verdict.value,
    )


def _charts(result: Soak) -> list[str]:
    charts = []
    if result.looks.memory_bytes:
        points = [(at, value / 2**20) for at, value in result.looks.memory_bytes]
        label = "memory without KV blocks, MiB" if result.looks.kv_touched_bytes else "memory, MiB"
        charts.append(_chart(label, points, from_zero=False))
    charts.append(_chart("TTFT, ms", [(at, 1000 * value) for at, value in result.ttft_points]))
    if result.looks.kv_share:
        points = [(at, 100 * value) for at, value in result.looks.kv_share]
        charts.append(_chart("KV in use, %", points))
    return charts


def _chart(label: str, points: Sequence[tuple[float, float]], *, from_zero: bool = True) -> str:
    """Medians of short stretches, so that a long run is a line and no cloud."""
    size = max(1, -(-len(points) // CHART_POINTS))
    stretches = [points[at : at + size] for at in range(0, len(points), size)]
    line = [(one[0][0] / 60, median(value for _, value in one)) for one in stretches]
    return line_chart([Series(label, line)], "minutes", label, from_zero=from_zero)
