"""What a sweep shows: the table, the charts, and the sentence to take away."""

from collections.abc import Callable, Mapping, Sequence

from kvota.tools.load.knee import ATTAINMENT_MIN, SAFE_SHARE
from kvota.tools.load.lag import SHARE_MAX
from kvota.tools.load.measure import Measured
from kvota.tools.load.percentiles import Spread
from kvota.tools.load.sweep import Sweep
from kvota.tools.load.words import MISSING, UNSURE, in_ms, ms, p99, share
from kvota.tools.report.charts import Mark, Series, line_chart, number
from kvota.tools.report.html import Report, Section, Table

Figure = Callable[[Measured], float]

RATE_LABEL = "offered rate, requests/s"
HEADER = (
    "offered req/s", "good", "goodput", "TTFT p50 ms", "p95", "p99", "TPOT p50 ms", "p99",
    "refused", "failed",
)  # fmt: skip
HOW = (
    "Open loop: requests are sent at random moments (Poisson), whatever comes back. Times count "
    "from when a request was due, so waiting anywhere, in the generator too, is in them "
    "(coordinated-omission-safe). Percentiles are samples, of whole answers; the page also shows "
    "them with every request that was not served as unbounded.\n\n"
    f"A rate holds when {ATTAINMENT_MIN:.0%} of the requests due in the window meet the SLO and "
    "open requests do not pile up. The knee is the highest rate that holds in most of its trials, "
    "below the lowest that does not. Recommended is "
    f"{SAFE_SHARE:.0%} of it."
)


def sweep_report(result: Sweep, facts: Mapping[str, str]) -> Report:
    """The page of a sweep."""
    facts = {**facts, "SLO": str(result.slo)}
    trials = sorted([*result.trials, *result.safe], key=lambda one: one.offered_rps)
    sections = [
        Section("Rates", HOW, _table(result, trials)),
        Section("Served well", charts=[_goodput_chart(result, trials)]),
        Section("Time to first token", charts=[_ttft_chart(result, trials)]),
        Section("Time per output token", charts=[_tpot_chart(result, trials)]),
        _detail_section(trials),
        _lag_section(trials),
    ]
    return Report(
        "Sweep: where the knee is", facts, sections, verdict(result), is_bad=not result.is_good
    )


def _table(result: Sweep, trials: Sequence[Measured]) -> Table:
    safe = {id(one) for one in result.safe}
    rows = [trial_cells(one, "(plan)" if id(one) in safe else "") for one in trials]
    return Table(HEADER, rows)


def verdict(result: Sweep) -> str:
    """One or two sentences."""
    if result.complaint:
        return f"Refused: {result.complaint}"
    if result.cut is not None:
        return _until_cut(result)
    if result.knee is None:
        tpot = result.alone.tpot_s
        return (
            f"No rate that can be measured holds the SLO ({result.slo}). Alone, a request has TTFT "
            f"{ms(result.alone.ttft_s)} ms and TPOT {ms(tpot)} ms."
        )
    knee, cap = result.knee, result.cap
    until = f"; {knee.failed_rps:.3g} do not hold" if knee.failed_rps else "; none failed"
    text = (
        f"The knee is at {knee.rate_rps:.3g} requests/s{until}. Plan with {knee.safe_rps:.3g} "
        f"requests/s ({SAFE_SHARE:.0%} of it)"
    )
    if cap is None:
        return text + "."
    settings = ", ".join(f"{name} = {value}" for name, value in cap.settings.items())
    return f"{text}: {settings}."


def _until_cut(result: Sweep) -> str:
    """Of a knee that was not proven; nothing to plan with."""
    if not result.trials:
        return f"Alone, a request has TTFT {ms(result.alone.ttft_s)} ms. No rate was tried."
    if result.knee is None:
        return "No rate has held until then."
    failed = result.knee.failed_rps
    until = f", {failed:.3g} did not" if failed else ""
    return f"{result.knee.rate_rps:.3g} requests/s held until then{until}."


def trial_cells(one: Measured, note: str = "") -> tuple[str, ...]:
    """A trial as a row under HEADER."""
    return (
        f"{one.offered_rps:.3g} {_remark(one) or note}".rstrip(),
        share(one.attainment),
        f"{one.goodput_rps:.3g}",
        *(_three(one.ttft)),
        ms(one.tpot.p50 if one.tpot else None),
        p99(one.tpot),
        str(one.num_refused),
        str(one.num_failed + one.num_unfinished),
    )


def _remark(one: Measured) -> str:
    """Why a rate is not what its other figures say."""
    if one.is_rate_missed:
        return "(missed)"
    return "" if one.is_keeping_up else "(piles up)"


def _three(spread: Spread | None) -> tuple[str, str, str]:
    if spread is None:
        return MISSING, MISSING, MISSING
    return ms(spread.p50), ms(spread.p95), p99(spread)


def _goodput_chart(result: Sweep, trials: Sequence[Measured]) -> str:
    highest = max((one.offered_rps for one in trials), default=1.0)
    return line_chart(
        [
            Series("within the SLO", _points(trials, lambda one: one.goodput_rps)),
            Series("all that is offered", [(0.0, 0.0), (highest, highest)], is_dashed=True),
        ],
        RATE_LABEL,
        "requests/s",
        marks=_knee_marks(result),
    )


def _ttft_chart(result: Sweep, trials: Sequence[Measured]) -> str:
    def unserved(one: Measured) -> float:
        return in_ms(one.ttft_or_unserved, "p99")

    return line_chart(
        [
            *_percentile_lines(trials, lambda one: one.ttft),
            Series("p99, unserved unbounded", _points(trials, unserved), is_dashed=True),
        ],
        RATE_LABEL,
        "TTFT, ms",
        log_y=True,
        marks=[*_knee_marks(result), Mark("SLO", 1000 * result.slo.ttft_s, is_level=True)],
    )


def _tpot_chart(result: Sweep, trials: Sequence[Measured]) -> str:
    def stall(one: Measured) -> float:
        return in_ms(one.stall, "p99")

    return line_chart(
        [
            *_percentile_lines(trials, lambda one: one.tpot),
            Series("longest tenth of gaps, p99", _points(trials, stall), is_dashed=True),
        ],
        RATE_LABEL,
        "ms",
        log_y=True,
        marks=[*_knee_marks(result), Mark("SLO", 1000 * result.slo.tpot_s, is_level=True)],
    )


def _percentile_lines(
    trials: Sequence[Measured], spread: Callable[[Measured], Spread | None]
) -> list[Series]:
    def line(name: str) -> Series:
        return Series(name, _points(trials, lambda one: in_ms(spread(one), name)))

    return [line(name) for name in ("p50", "p95", "p99")]


def _points(trials: Sequence[Measured], figure: Figure) -> list[tuple[float, float]]:
    """One point a rate: of several trials the middle one."""
    by_rate: dict[float, list[float]] = {}
    for one in trials:
        by_rate.setdefault(one.offered_rps, []).append(figure(one))
    return [(rate, sorted(values)[(len(values) - 1) // 2]) for rate, values in by_rate.items()]


def _knee_marks(result: Sweep) -> list[Mark]:
    if result.knee is None:
        return []
    return [
        Mark(f"plan with {result.knee.safe_rps:.3g}", result.knee.safe_rps),
        Mark(f"knee {result.knee.rate_rps:.3g}", result.knee.rate_rps),
    ]


def _detail_section(trials: Sequence[Measured]) -> Section:
    header = (
        "offered req/s", "sent", "due", "whole", "unfinished", "TTFT p99, unserved unbounded, ms",
        "stall p99 ms", "queue p50 ms", "p99", "output tok/s", "open, mean", "keeps up", "errors",
    )  # fmt: skip
    rows = [
        (
            f"{one.offered_rps:.3g}",
            f"{one.sent_rps:.3g}",
            str(one.num_due),
            str(one.num_whole),
            str(one.num_unfinished),
            ms(one.ttft_or_unserved.p99 if one.ttft_or_unserved else None),
            p99(one.stall),
            ms(one.queued.p50 if one.queued else None),
            p99(one.queued),
            number(one.output_tokens_per_s),
            f"{one.in_flight_mean:.1f}",
            "yes" if one.is_keeping_up else "no",
            ", ".join(f"{code} {num}" for code, num in one.errors.items()) or MISSING,
        )
        for one in trials
    ]
    num_estimated = sum(one.num_estimated for one in trials)
    num_off = sum(one.num_off_length for one in trials)
    num_prompts = sum(one.num_off_prompt for one in trials)
    text = (
        f"{UNSURE}\n\nQueue is what the server says in x-kvota-queue-ms. Stall is the mean of "
        "the longest tenth of an answer's gaps.\n\n"
        f"Answers whose length the server did not tell (events were counted): {num_estimated}; "
        f"shorter or longer than was asked for: {num_off}; prompts that it counted differently: "
        f"{num_prompts}."
    )
    return Section("Every trial", text, Table(header, rows))


def _lag_section(trials: Sequence[Measured]) -> Section:
    header = ("offered req/s", "sent late p50 ms", "p99", "read late p50 ms", "p99")
    rows = [
        (
            f"{one.offered_rps:.3g}",
            *(ms(lag) for lag in (
                one.lag.sent_p50_s, one.lag.sent_p99_s, one.lag.beat_p50_s, one.lag.beat_p99_s
            )),
        )
        for one in trials
    ]  # fmt: skip
    text = (
        "How late the generator was: in sending what was due, and in reading what had come (a "
        f"timer's lateness). A result with a lag above {SHARE_MAX:.0%} of the TTFT, at p50 or at "
        "p99, is refused."
    )
    return Section("The generator itself", text, Table(header, rows))
