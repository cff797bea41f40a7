"""A simulated run for people (HTML page) and for programs (JSON)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from kvota.sim.fault_words import told
from kvota.sim.records import Targets, WorldResult, quantile
from kvota.sim.simulate import Simulation
from kvota.tools.report.charts import Mark, Series, line_chart, number
from kvota.tools.report.html import Report, Section, Table

SHARES: Final = (0.5, 0.95, 0.99)
_NUM_STRETCHES: Final = 40  # of the arrivals' span, one point of a line each
_HEADER: Final = ("s", "p50", "p95", "p99")


def as_json(asked: Simulation, result: WorldResult, targets: Targets) -> dict[str, Any]:
    """Times are seconds; percentiles are of the requests that have such a time."""
    return {
        "facts": _facts(asked, targets),
        "requests": len(result.records),
        "span_s": result.span_s,
        "outcomes": dict(result.outcomes),
        "attainment": result.attainment(targets.is_met),
        "goodput_rps": result.goodput_rps(targets.is_met),
        "completed_rps": result.completed_rps,
        **{name: _percentiles(values) for name, values in _times(result).items()},
        "kv_used_mean": result.kv_used_mean,
        "preempted_share": result.preempted_share,
        "recomputed_tokens": result.recomputed_tokens,
        "num_steps": result.num_steps,
        "faults": told(asked.faults, result.struck),
        "targets": asdict(targets),
    }


def report(asked: Simulation, result: WorldResult, targets: Targets) -> Report:
    outcomes = [(name, f"{count:,}") for name, count in result.outcomes.items()]
    outcomes += [
        ("good", f"{result.attainment(targets.is_met):.1%}"),
        ("requests/s good", number(result.goodput_rps(targets.is_met))),
        ("KV used, mean", f"{result.kv_used_mean:.1%}"),
        ("preempted", f"{result.preempted_share:.2%}"),
        ("tokens computed again", f"{result.recomputed_tokens:,}"),
        ("steps", f"{result.num_steps:,}"),
    ]
    rows = [(name, *_cells(values)) for name, values in _times(result).items()]
    charts = [_by_share(result, targets), _over_time(result, targets)]
    return Report(
        f"Simulation of {asked.trace.name}",
        _facts(asked, targets),
        [
            Section("What became of the requests", table=Table(("requests", ""), outcomes)),
            Section("Latency", table=Table(_HEADER, rows), charts=charts),
            *_faults(asked, result),
        ],
        f"{result.attainment(targets.is_met):.1%} of {len(result.records):,} requests were good: "
        f"{number(result.goodput_rps(targets.is_met))} requests/s.",
    )


def _facts(asked: Simulation, targets: Targets) -> dict[str, str]:
    desk = asked.desk
    return {
        "trace": asked.trace.name,
        "machine": f"{asked.kv_tokens:,} tokens of KV, {asked.limits.max_running_requests} at once",
        "desk": "none" if desk is None else f"{desk.admission.value}, risk {desk.risk:g}",
        "good": f"TTFT ≤ {targets.ttft_s:g} s and TPOT ≤ {targets.tpot_s:g} s",
        "scaling": f"time ×{asked.scaling.time:g}, lengths ÷{asked.scaling.length}",
        "seed": f"{asked.seed}",
    }


def _faults(asked: Simulation, result: WorldResult) -> list[Section]:
    rows = [(line,) for line in told(asked.faults, result.struck)]
    return [Section("Injected faults", table=Table(("fault: what it did",), rows))] if rows else []


def _times(result: WorldResult) -> dict[str, list[float]]:
    several = [one for one in result.records if len(one.token_at_s) > 1]
    return {
        "ttft": [one.ttft_s for one in result.records if one.ttft_s is not None],
        "tpot": [one.tpot_s for one in several],
        "longest tenth of gaps": [one.slowest_gaps_s for one in several],
        "error of the ETA": [abs(error) for error in result.eta_errors_s],
    }


def _cells(values: Sequence[float]) -> tuple[str, ...]:
    return tuple(f"{quantile(values, share):.3f}" if values else "–" for share in SHARES)


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{100 * share:g}": quantile(values, share) for share in SHARES}


def _by_share(result: WorldResult, targets: Targets) -> str:
    first = sorted(_times(result)["ttft"])
    step = max(1, len(first) // 200)
    points = [(first[at], 100 * (at + 1) / len(first)) for at in range(0, len(first), step)]
    return line_chart(
        [Series("TTFT", points)],
        "TTFT in s",
        "% of first tokens",
        log_x=True,
        marks=[Mark("target", targets.ttft_s)],
    )


def _over_time(result: WorldResult, targets: Targets) -> str:
    width_s = max(result.span_s, 1.0) / _NUM_STRETCHES
    stretches: dict[int, list[float]] = defaultdict(list)
    for one in result.records:
        if one.ttft_s is not None:
            stretches[int(one.arrival.at_s / width_s)].append(one.ttft_s)
    series = [
        Series(
            f"p{100 * share:g}",
            [((at + 0.5) * width_s, quantile(own, share)) for at, own in sorted(stretches.items())],
        )
        for share in SHARES[:2]
    ]
    marks = [Mark("target", targets.ttft_s, is_level=True)]
    return line_chart(series, "arrived at, s", "TTFT in s", marks=marks)
