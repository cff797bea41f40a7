"""A capacity curve for people (table, HTML page) and for programs (JSON)."""

from dataclasses import asdict
from typing import Any

from kvota.sim.capacity import CapacityCurve, CapacityPoint, CapacityQuestion
from kvota.tools.report.charts import Series, line_chart, number
from kvota.tools.report.html import Report, Section, Table

EXACT, SAMPLED = "whole", "pool"  # what was simulated


def curve_table(curve: CapacityCurve, price_per_hour: float | None) -> Table:
    """`price_per_hour` of one replica, in whatever currency; None: no costs are shown."""
    header = ["load", "requests", "per s", "replicas", "from", "good", "TTFT p99"]
    if price_per_hour is not None:
        header += ["an hour", "per 1,000"]
    return Table(header, [_row(one, price_per_hour) for one in curve.points])


def as_json(
    question: CapacityQuestion, curve: CapacityCurve, price_per_hour: float | None
) -> dict[str, Any]:
    points = []
    for one in curve.points:
        costs = None if price_per_hour is None else _costs(one, price_per_hour)
        points.append(
            {**asdict(one), "per_hour": costs and costs[0], "per_1000": costs and costs[1]}
        )
    return {
        "trace": question.simulation.trace.name,
        "seed": question.simulation.seed,
        "goal": question.goal,
        "targets": asdict(question.targets),
        "pool": question.pool,
        "load_per_replica": curve.load_per_replica,
        "gain": curve.gain,
        "num_simulated": curve.num_simulated,
        "points": points,
    }


def how_known(question: CapacityQuestion, curve: CapacityCurve) -> str:
    """What the sampled part of the curve rests on; empty when there is none."""
    if curve.load_per_replica is None or curve.gain is None:
        return f"All fleets were simulated whole: {curve.num_simulated:,} requests."
    return (
        f"Above {question.pool} replicas: a pool of {question.pool} sustains "
        f"{number(curve.load_per_replica)} of the recorded load for each replica, "
        f"{curve.gain:+.1%} against a pool of {question.pool // 2}. "
        f"{curve.num_simulated:,} requests were simulated."
    )


def report(
    question: CapacityQuestion, curve: CapacityCurve, price_per_hour: float | None
) -> Report:
    targets, asked = question.targets, question.simulation
    facts = {
        "trace": asked.trace.name,
        "targets": f"TTFT ≤ {targets.ttft_s:g} s and TPOT ≤ {targets.tpot_s:g} s "
        f"for {question.goal:.1%} of all requests",
        "replica": f"{asked.kv_tokens:,} tokens of KV, {asked.limits.max_running_requests} at once",
        "scaling": f"time ×{asked.scaling.time:g}, lengths ÷{asked.scaling.length}",
        "seed": f"{asked.seed}",
    }
    series = [
        Series("replicas", [(one.factor, float(one.num_replicas)) for one in curve.points]),
    ]
    chart = line_chart(series, "times the recorded load", "replicas", log_x=True, log_y=True)
    table = curve_table(curve, price_per_hour)
    section = Section("Replicas by load", how_known(question, curve), table, [chart])
    return Report(f"Capacity for {asked.trace.name}", facts, [section], _verdict(curve))


def _verdict(curve: CapacityCurve) -> str:
    first, last = curve.points[0], curve.points[-1]
    return (
        f"{number(first.rate_rps)} requests/s need {_replicas(first.num_replicas)}, "
        f"{number(last.rate_rps)} requests/s need {_replicas(last.num_replicas)}."
    )


def _replicas(num: int) -> str:
    return f"{num:,} replica{'s' if num > 1 else ''}"


def _row(one: CapacityPoint, price_per_hour: float | None) -> list[str]:
    run = one.simulated
    row = [
        f"×{one.factor:g}",
        f"{one.num_requests:,}",
        number(one.rate_rps),
        f"{one.num_replicas:,}",
        EXACT if one.is_exact else SAMPLED,
        f"{run.attainment:.1%}",
        f"{number(run.ttft_p99_s)} s",
    ]
    if price_per_hour is not None:
        row += [f"{cost:,.2f}" for cost in _costs(one, price_per_hour)]
    return row


def _costs(one: CapacityPoint, price_per_hour: float) -> tuple[float, float]:
    """Of all replicas for an hour, and for each thousand requests at this rate."""
    per_hour = one.num_replicas * price_per_hour
    return per_hour, 1000 * per_hour / (3600 * one.rate_rps)
