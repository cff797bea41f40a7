"""One request at a time: what the server does when nobody disturbs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvota.tools.load.bench import ANSWER_PATIENCE_S, Bench, NothingServed, first_error
from kvota.tools.load.cut import Cut, kept_until_cut
from kvota.tools.load.generator import Run
from kvota.tools.load.lag import Lag
from kvota.tools.load.percentiles import Spread
from kvota.tools.load.schedule import Lengths, Shape
from kvota.tools.load.words import MISSING, UNSURE, ms, p99
from kvota.tools.report.charts import Bars, bar_chart, number
from kvota.tools.report.html import Report, Section, Table

NUM_WARM_UP = 1  # the first request of a length may compile, allocate, connect


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt length. Rates are of the medians."""

    prompt: str
    output: str
    num: int
    ttft: Spread
    tpot: Spread | None
    total: Spread
    prompt_tokens_per_s: float  # prompt over TTFT: reading, and all overhead
    output_tokens_per_s: float | None  # 1 / TPOT
    complaint: str | None
    num_unserved: int = 0
    first_error: str = ""  # of those

    @property
    def num_all(self) -> int:
        return self.num + self.num_unserved


@dataclass(frozen=True, slots=True)
class Baseline:
    """The result of the mode."""

    rows: Sequence[Row]
    cut: Cut | None = None  # why there are no more

    @property
    def complaint(self) -> str | None:
        return next((row.complaint for row in self.rows if row.complaint), None)

    @property
    def is_good(self) -> bool:
        return self.complaint is None and not any(row.num_unserved for row in self.rows)

    def report(self, facts: Mapping[str, str]) -> Report:
        labels = [f"{row.prompt} + {row.output}" for row in self.rows]
        chart = bar_chart(
            labels,
            [
                Bars("TTFT p50", [1000 * row.ttft.p50 for row in self.rows]),
                Bars("TTFT p95", [1000 * row.ttft.p95 for row in self.rows]),
            ],
            "ms",
        )
        text = (
            "One request at a time, the next sent when the last is over; every prompt is new. "
            "Prompt tokens per second are prompt length over TTFT, so they hold all overhead."
            f"\n\n{UNSURE}"
        )
        section = Section("Alone on the server", text, self._table(), [chart])
        return Report(
            "Baseline: one request at a time", facts, [section], self._verdict(),
            is_bad=not self.is_good,
        )  # fmt: skip

    def _verdict(self) -> str:
        if self.complaint:
            return f"Refused: {self.complaint}"
        row = self.rows[0]
        speed = MISSING if row.output_tokens_per_s is None else number(row.output_tokens_per_s)
        return (
            f"Alone, a prompt of {row.prompt} tokens has its first token after {ms(row.ttft.p50)} "
            f"ms, and then {speed} tokens come per second.{self._unserved()}"
        )

    def _unserved(self) -> str:
        lost = [row for row in self.rows if row.num_unserved]
        if not lost:
            return ""
        num, num_all = sum(row.num_unserved for row in lost), sum(row.num_all for row in self.rows)
        return f" But {num} of {num_all} requests were not served, the first: {lost[0].first_error}"

    def _table(self) -> Table:
        header = (
            "prompt + output", "whole", "unserved", "TTFT p50 ms", "p95", "p99",
            "TPOT p50 ms", "p95", "prompt tok/s", "output tok/s",
        )  # fmt: skip
        return Table(header, [_cells(row) for row in self.rows])


async def baseline(
    bench: Bench, prompts: Sequence[Lengths], output: Lengths, num_requests: int
) -> Baseline:
    """`num_requests` of each prompt length, after one that is not counted."""
    for prompt in prompts:
        bench.target.check_length(prompt.most, output.most)
    rows: list[Row] = []
    with kept_until_cut() as end:
        for prompt in prompts:
            await _measure(bench, prompt, output, num_requests + NUM_WARM_UP, rows)
    end.require(rows)
    return Baseline(rows, end.cut)


async def _measure(
    bench: Bench, prompt: Lengths, output: Lengths, num: int, rows: list[Row]
) -> None:
    """Adds a row, also where it was interrupted. Raises NothingServed."""
    what = f"prompt {prompt}"
    run = await bench.keep(
        what, Shape(prompt, output), 1, seconds=num * ANSWER_PATIENCE_S, num_max=num, keeps=True
    )
    counted = Run(run.seen[NUM_WARM_UP:], run.beats_s)
    if any(one.is_whole and one.first_token_s is not None for one in counted.seen):
        rows.append(_row(prompt, output, counted, run.lag))
        run.require_end()
        return
    run.require_end()
    raise NothingServed(f"{what}: not one request was served: {first_error(run)}")


def _row(prompt: Lengths, output: Lengths, run: Run, lag: Lag) -> Row:
    whole = [one for one in run.seen if one.is_whole and one.first_token_s is not None]
    num_unserved = sum(not one.is_whole for one in run.seen)
    ttft = Spread.of(one.first_token_s for one in whole if one.first_token_s is not None)
    tpot = Spread.of(one.per_token_s for one in whole if one.per_token_s is not None)
    total = Spread.of(one.ended_s for one in whole)
    assert ttft is not None
    assert total is not None
    return Row(
        prompt=str(prompt),
        output=str(output),
        num=len(whole),
        ttft=ttft,
        tpot=tpot,
        total=total,
        prompt_tokens_per_s=prompt.mean / ttft.p50,
        output_tokens_per_s=1 / tpot.p50 if tpot is not None and tpot.p50 > 0 else None,
        complaint=lag.complaint(ttft.p50, ttft.p99),
        num_unserved=num_unserved,
        first_error=first_error(run) if num_unserved else "",
    )


def _cells(row: Row) -> tuple[str, ...]:
    tpot, speed = row.tpot, row.output_tokens_per_s
    return (
        f"{row.prompt} + {row.output}",
        str(row.num),
        str(row.num_unserved),
        ms(row.ttft.p50),
        ms(row.ttft.p95),
        p99(row.ttft),
        ms(tpot.p50 if tpot else None),
        ms(tpot.p95 if tpot else None),
        number(row.prompt_tokens_per_s),
        MISSING if speed is None else number(speed),
    )
