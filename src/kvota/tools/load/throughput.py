"""More and more requests at once: how many tokens per second that brings, and where it stops to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvota.tools.load.bench import Bench, NothingServed, first_error
from kvota.tools.load.cut import Cut, kept_until_cut
from kvota.tools.load.flattening import GAIN_MIN, flattening_point
from kvota.tools.load.generator import Run
from kvota.tools.load.measure import tokens_within
from kvota.tools.load.percentiles import Spread
from kvota.tools.load.schedule import Shape
from kvota.tools.load.words import UNSURE, ms, p99
from kvota.tools.report.charts import Mark, Series, line_chart, number
from kvota.tools.report.html import Report, Section, Table

BATCHES = (1, 2, 4, 8, 16, 32)
WARM_SHARE = 0.25  # of a batch's time, until all are under way


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """So many open at all times. Latencies are of answers that came whole."""

    batch: int
    num_whole: int
    num_refused: int
    num_failed: int
    output_tokens_per_s: float
    ttft: Spread | None
    tpot: Spread | None
    complaint: str | None


@dataclass(frozen=True, slots=True)
class Throughput:
    """The result of the mode."""

    rows: Sequence[Row]
    flat_from: int | None  # batch; None: it still rose, or was cut
    cut: Cut | None = None  # why there are no larger batches

    @property
    def complaint(self) -> str | None:
        return next((row.complaint for row in self.rows if row.complaint), None)

    @property
    def is_good(self) -> bool:
        return self.complaint is None

    def report(self, facts: Mapping[str, str]) -> Report:
        marks = [Mark(f"flat from {self.flat_from}", self.flat_from)] if self.flat_from else []
        speed = line_chart(
            [Series("tokens/s", [(row.batch, row.output_tokens_per_s) for row in self.rows])],
            "requests at once", "output tokens/s", log_x=True, marks=marks,
        )  # fmt: skip
        per_token = line_chart(
            [
                Series("p50", [(row.batch, 1000 * row.tpot.p50) for row in self.rows if row.tpot]),
                Series("p95", [(row.batch, 1000 * row.tpot.p95) for row in self.rows if row.tpot]),
            ],
            "requests at once", "time per output token, ms", log_x=True,
        )  # fmt: skip
        text = (
            "Closed loop: as many requests are open as the row says, the next sent when one is "
            "over. The flat part begins at the smallest batch from which no larger one brings "
            f"{GAIN_MIN:.0%} more tokens per second for each doubling."
            f"\n\n{UNSURE}"
        )
        section = Section("Tokens per second", text, self._table(), [speed, per_token])
        return Report(
            "Throughput: more and more at once", facts, [section], self._verdict(),
            is_bad=not self.is_good,
        )  # fmt: skip

    def _verdict(self) -> str:
        if self.complaint:
            return f"Refused: {self.complaint}"
        best = max(self.rows, key=lambda row: row.output_tokens_per_s)
        speed = f"{number(best.output_tokens_per_s)} output tokens/s at {best.batch} at once"
        if self.cut is not None:
            return f"At most {speed}."
        if self.flat_from is None:
            return f"At most {speed}. It was still rising: try larger batches with --batches."
        return f"At most {speed}. From {self.flat_from} at once, more bring little but waiting."

    def _table(self) -> Table:
        header = ("at once", "output tok/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p95",
                  "whole", "refused", "failed")  # fmt: skip
        return Table(header, [_cells(row) for row in self.rows])


async def throughput(
    bench: Bench, shape: Shape, batches: Sequence[int], seconds: float
) -> Throughput:
    """`seconds` of each batch, the first quarter not judged."""
    bench.target.check_length(shape.prompt.most, shape.output.most)
    rows: list[Row] = []
    with kept_until_cut() as end:
        for batch in sorted(set(batches)):
            run = await bench.keep(f"{batch} at once", shape, batch, seconds=seconds)
            rows.append(_row(batch, run, seconds))
            await bench.wait_idle()
    end.require(rows)
    if end.cut is not None:
        return Throughput(rows, None, end.cut)
    rates = {row.batch: row.output_tokens_per_s for row in rows if row.output_tokens_per_s > 0}
    return Throughput(rows, flattening_point(rates))


def _row(batch: int, run: Run, seconds: float) -> Row:
    start = WARM_SHARE * seconds
    rate = tokens_within(run.seen, start, seconds) / (seconds - start)
    if rate == 0:
        raise NothingServed(f"{batch} at once: not one token came: {first_error(run)}")
    whole = [one for one in run.seen if one.is_whole]
    ttft = Spread.of(one.first_token_s for one in whole if one.first_token_s is not None)
    return Row(
        batch=batch,
        num_whole=len(whole),
        num_refused=sum(one.is_refused for one in run.seen),
        num_failed=sum(
            not (one.is_whole or one.is_refused or one.is_unfinished) for one in run.seen
        ),
        output_tokens_per_s=rate,
        ttft=ttft,
        tpot=Spread.of(one.per_token_s for one in whole if one.per_token_s is not None),
        complaint=run.lag.complaint(ttft.p50, ttft.p99) if ttft else _too_short(batch, seconds),
    )


def _too_short(batch: int, seconds: float) -> str:
    """What is said of a batch of which no answer came whole: its tokens show a beginning."""
    return (
        f"{batch} at once: not one answer came whole in {seconds:g} s. Give it more --seconds, or "
        "ask for shorter answers."
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.batch),
        number(row.output_tokens_per_s),
        ms(row.ttft.p50 if row.ttft else None),
        p99(row.ttft),
        ms(row.tpot.p50 if row.tpot else None),
        ms(row.tpot.p95 if row.tpot else None),
        str(row.num_whole),
        str(row.num_refused),
        str(row.num_failed),
    )
