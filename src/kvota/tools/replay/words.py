"""What `kvota trace describe` prints: the figures of a file in a table."""

from collections.abc import Iterator, Mapping

from kvota.tools.report.charts import number
from kvota.tools.report.html import Table
from kvota.traffic.numbers import LengthFigures, PopulationShape, Reuse, Shape

Row = tuple[str, str]


def shape_table(shape: Shape, *, has_times: bool = True) -> Table:
    """Without recorded times, nothing is said of them."""
    return Table(("figure", "value"), list(_rows(shape, has_times=has_times)))


def population_table(shape: PopulationShape) -> Table:
    rows = [
        ("clients", f"{shape.num_clients:,}"),
        ("hours", f"{shape.hours:g}"),
        ("requests/s", f"{shape.rate_rps:.2f} ({shape.lowest_rps:.1f} to {shape.highest_rps:.1f})"),
        *_lengths(shape.prompt, shape.output, shape.prompt_to_output),
        *_top("busiest clients", shape.top_clients),
    ]
    return Table(("figure", "value"), rows)


def _rows(shape: Shape, *, has_times: bool) -> Iterator[Row]:
    yield "requests", f"{shape.num_requests:,}"
    if has_times:
        yield "span", f"{shape.span_s:,.0f} s"
        yield "requests/s", f"{shape.rate_rps:.2f}"
        yield "CV of gaps", f"{number(shape.gap_cv)} (Poisson: 1)"
        windows = " / ".join(f"{one.window_s}" for one in shape.bursts)
        idc = " / ".join(number(one.idc) for one in shape.bursts)
        yield f"IDC in {windows} s", f"{idc} (Poisson: 1)"
        yield f"peak/mean in {windows} s", " / ".join(number(one.peak) for one in shape.bursts)
    yield from _lengths(shape.prompt, shape.output, shape.prompt_to_output)
    yield "correlation prompt, output", f"{shape.correlation:.2f}"
    yield (
        "prompts over 4,096 tokens",
        f"{shape.long_requests:.1%} of requests, {shape.long_tokens:.1%} of prompt tokens",
    )
    if shape.num_tenants > 1:
        yield "tenants", f"{shape.num_tenants:,}"
        yield from _top("busiest tenants", shape.top_tenants)
    if shape.reuse is not None:
        yield from _reuse(shape.reuse)


def _lengths(prompt: LengthFigures, output: LengthFigures, ratio: float) -> Iterator[Row]:
    yield "prompt mean / p50 / p95 / p99 / max", _five(prompt)
    yield "output mean / p50 / p95 / p99 / max", _five(output)
    yield "prompt : output", f"{number(ratio)} : 1"


def _five(of: LengthFigures) -> str:
    mean = f"{of.mean:,.0f}" if of.mean >= 100 else f"{of.mean:.1f}"
    return f"{mean} / {of.p50:,.0f} / {of.p95:,.0f} / {of.p99:,.0f} / {of.max:,.0f}"


def _top(what: str, shares: Mapping[int, float]) -> Iterator[Row]:
    if shares:
        yield (
            f"{what} {' / '.join(map(str, shares))}",
            " / ".join(f"{100 * share:.1f}" for share in shares.values()) + " % of requests",
        )


def _reuse(reuse: Reuse) -> Iterator[Row]:
    yield "prefix blocks", f"{reuse.num_blocks:,} of {reuse.block_tokens} tokens"
    yield "distinct", f"{reuse.num_distinct:,}, {reuse.once_share:.1%} of them used once"
    yield (
        "hits, cache of any size",
        f"{reuse.hit_share:.2%} of blocks ({reuse.num_hits:,}), "
        f"{reuse.token_share:.2%} of prompt tokens",
    )
    yield "requests with a hit", f"{reuse.sharing_requests:.1%}"
    p50, p90, p99 = (f"{value:,.0f}" for value in reuse.again_after_s)
    yield "used again after p50 / p90 / p99", f"{p50} / {p90} / {p99} s"
