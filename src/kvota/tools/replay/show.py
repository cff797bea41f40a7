"""A replay for people (table, HTML page) and for programs (JSON)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from kvota.tools.load.asked import Seen
from kvota.tools.load.percentiles import Spread, percentile
from kvota.tools.load.words import MISSING, ms, p99, share
from kvota.tools.replay.run import Replayed
from kvota.tools.replay.words import shape_table
from kvota.tools.report.charts import Mark, Series, line_chart, number
from kvota.tools.report.html import Report, Section, Table
from kvota.traffic.shape import shape_of

NUM_BUCKETS = 60  # of time, in charts
TENANTS_MAX = 20  # in the table
ERRORS_MAX = 3  # in the same


def as_json(replayed: Replayed) -> dict[str, Any]:
    """All that is known. Figures of a refused result are left out; what was seen is not."""
    recorded = replayed.plan.recorded
    source = recorded.source
    return {
        "file": source.path.name,
        "format": recorded.format.value,
        "time_scale": source.scaling.time,
        "length_scale": source.scaling.length,
        "seed": source.seed,
        "num_passed_over": recorded.num_passed_over,
        "num_too_long": replayed.plan.num_too_long,
        "server": replayed.target.facts,
        "slo": asdict(replayed.slo),
        "refused": replayed.refusal,
        "interrupted_s": replayed.interrupted_s,
        "incomplete": None if replayed.cut is None else replayed.cut.reason,
        "measured": None if replayed.refusal else asdict(replayed.measured),
        "lag": asdict(replayed.measured.lag),
        "cached_share": replayed.cached_share,
        "requests": [_request(one) for one in replayed.seen],
    }


def latency_table(replayed: Replayed) -> Table:
    """Milliseconds, from the moment that each request was due."""
    measured = replayed.measured
    rows = [
        ("TTFT", measured.ttft),
        ("TTFT, unserved as unbounded", measured.ttft_or_unserved),
        ("time per token", measured.tpot),
        ("longest tenth of gaps", measured.stall),
        ("queue, as the server says", measured.queued),
        ("whole answer", measured.total),
    ]
    header = ("ms", "mean", "p50", "p95", "p99", "max")
    return Table(header, [_spread_row(name, one) for name, one in rows])


def outcome_table(replayed: Replayed) -> Table:
    measured = replayed.measured
    rows = [
        ("sent", f"{len(replayed.seen):,} at {measured.offered_rps:.3f}/s"),
        ("answered in full", f"{measured.num_whole:,}"),
        ("refused", f"{measured.num_refused:,}"),
        ("failed", f"{measured.num_failed:,}"),
        ("unfinished", f"{measured.num_unfinished:,}"),
        ("good", f"{share(measured.attainment)}, {measured.goodput_rps:.3f}/s ({replayed.slo})"),
        ("output tokens/s", number(measured.output_tokens_per_s)),
        ("in flight, mean / p99", f"{measured.in_flight_mean:.1f} / {measured.in_flight_p99:.0f}"),
        ("other output length than asked", f"{measured.num_off_length:,}"),
        ("lag of the generator, p50 / p99", _lag(replayed)),
        *_error_rows(replayed),
        *_cache_rows(replayed),
    ]
    return Table(("requests", ""), rows)


def report(replayed: Replayed) -> Report:
    recorded = replayed.plan.recorded
    measured = replayed.measured
    sections = [
        Section("What was asked", table=shape_table(shape_of(recorded.arrivals))),
        Section("What became of it", table=outcome_table(replayed)),
    ]
    if replayed.refusal is None:
        sections += [
            Section("Latency", _LATENCY_TEXT, latency_table(replayed), [_cdf(replayed)]),
            Section("Over time", "", None, [_ttft_over_time(replayed), _load_over_time(replayed)]),
        ]
    if len({one.lane for one in replayed.seen}) > 1:
        sections.append(Section("Tenants", "", tenant_table(replayed.seen, replayed)))
    if measured.errors:
        rows = [(code, f"{num:,}") for code, num in measured.errors.items()]
        sections.append(Section("Errors", "", Table(("code", "requests"), rows)))
    return Report(
        f"Replay of {recorded.source.path.name}",
        facts(replayed),
        sections,
        verdict(replayed),
        is_bad=replayed.refusal is not None or replayed.cut is not None,
    )


def verdict(replayed: Replayed) -> str:
    if replayed.refusal is not None:
        return f"Refused: {replayed.refusal}"
    measured = replayed.measured
    cut, after_s = replayed.cut, replayed.interrupted_s
    begin = "" if cut is None else f"Incomplete after {after_s:,.1f} s, {cut.reason}; until then: "
    missed = " The target rate was missed." if measured.is_rate_missed else ""
    return (
        f"{begin}{share(measured.attainment)} of {measured.num_due:,} requests were good "
        f"({replayed.slo}); TTFT p99 {p99(measured.ttft)} ms.{missed}"
    )


def facts(replayed: Replayed) -> dict[str, str]:
    """The conditions of the run."""
    recorded, plan = replayed.plan.recorded, replayed.plan
    source = recorded.source
    left_out = [
        (recorded.num_passed_over, "without a known answer"),
        (plan.num_too_long, "too long for the model's window"),
    ]
    return {
        "traffic": f"{source.path.name} ({recorded.format.value})",
        "scaling": f"time ×{source.scaling.time:g}, lengths ÷{source.scaling.length}",
        "seed": f"{source.seed}",
        "left out": ", ".join(f"{num:,} {why}" for num, why in left_out if num) or "nothing",
        **replayed.target.facts,
    }


def tenant_table(seen: Iterable[Seen], replayed: Replayed) -> Table:
    """The busiest ones."""
    by_tenant: dict[str, list[Seen]] = {}
    for one in seen:
        by_tenant.setdefault(one.lane, []).append(one)
    busiest = sorted(by_tenant.items(), key=lambda item: -len(item[1]))[:TENANTS_MAX]
    rows = []
    for name, own in busiest:
        first = sorted(one.first_token_s for one in own if one.first_token_s is not None)
        num_good = sum(map(replayed.slo.is_met, own))
        rows.append(
            (
                name, f"{len(own):,}", f"{sum(one.is_refused for one in own):,}",
                ms(percentile(first, 0.5)), ms(percentile(first, 0.99)), share(num_good / len(own)),
            )
        )  # fmt: skip
    return Table(("tenant", "requests", "refused", "TTFT p50 ms", "p99 ms", "good"), rows)


_LATENCY_TEXT = (
    "Times count from the moment a request was due, so waiting at the client is waiting too. "
    "Refusals are in no latency; the second line takes whatever was not served as unbounded."
)


def _request(one: Seen) -> dict[str, Any]:
    fields = asdict(one)
    del fields["token_s"], fields["text"]
    fields["tenant"] = fields.pop("lane")
    return {**fields, "per_token_s": one.per_token_s, "stall_s": one.stall_s}


def _spread_row(name: str, one: Spread | None) -> tuple[str, ...]:
    if one is None:
        return (name, *[MISSING] * 5)
    return (name, ms(one.mean), ms(one.p50), ms(one.p95), p99(one), ms(one.highest))


def _lag(replayed: Replayed) -> str:
    lag = replayed.measured.lag
    return f"{ms(lag.sent_p50_s)} / {ms(lag.sent_p99_s)} ms"


def _error_rows(replayed: Replayed) -> list[tuple[str, str]]:
    """The commonest codes of what was not served."""
    worst = list(replayed.measured.errors.items())[:ERRORS_MAX]
    text = ", ".join(f"{code} {num:,}" for code, num in worst)
    return [("not served because", text)] if worst else []


def _cache_rows(replayed: Replayed) -> list[tuple[str, str]]:
    reuse = shape_of(replayed.plan.recorded.arrivals).reuse
    if reuse is None:
        return []
    told = replayed.cached_share
    says = "the server does not say" if told is None else f"{told:.1%} of prompt tokens"
    return [
        ("cached prefixes", f"{says}; {reuse.token_share:.1%} is all that the file has in common")
    ]


def _cdf(replayed: Replayed) -> str:
    first = sorted(
        one.first_token_s for one in replayed.seen if one.is_whole and one.first_token_s is not None
    )
    shares = [at / 200 for at in range(1, 201)]
    points = [(percentile(first, at), 100 * at) for at in shares]
    mark = Mark("target", replayed.slo.ttft_s)
    return line_chart(
        [Series("TTFT", points)], "TTFT in s", "% of answers", log_x=True, marks=[mark]
    )


def _ttft_over_time(replayed: Replayed) -> str:
    width_s = replayed.measured.window_s / NUM_BUCKETS
    buckets: dict[int, list[float]] = {}
    for one in replayed.seen:
        if one.first_token_s is not None:
            buckets.setdefault(int(one.scheduled_s / width_s), []).append(one.first_token_s)
    series = [
        Series(name, _points(buckets, at, width_s)) for name, at in (("p50", 0.5), ("p95", 0.95))
    ]
    return line_chart(
        series, "due at, s", "TTFT in s", marks=[Mark("target", replayed.slo.ttft_s, is_level=True)]
    )


def _points(
    buckets: dict[int, list[float]], at: float, width_s: float
) -> Sequence[tuple[float, float]]:
    return [
        ((number_ + 0.5) * width_s, percentile(sorted(values), at))
        for number_, values in sorted(buckets.items())
    ]


def _load_over_time(replayed: Replayed) -> str:
    width_s = replayed.measured.window_s / NUM_BUCKETS
    due = Counter(int(one.scheduled_s / width_s) for one in replayed.seen)
    served = Counter(int(one.scheduled_s / width_s) for one in replayed.seen if one.is_whole)
    series = [
        Series(name, [((at + 0.5) * width_s, counts[at] / width_s) for at in range(NUM_BUCKETS)])
        for name, counts in (("due", due), ("of them answered in full", served))
    ]
    return line_chart(series, "due at, s", "requests per second")
