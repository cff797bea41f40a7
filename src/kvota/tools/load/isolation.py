"""Short requests beside long ones: what neighbours cost.

Short traffic comes at a modest rate, first alone, then beside long requests that are in the server
at all times (the next is sent when one is over), then alone again: if the two lone parts differ,
it was the machine and not the neighbours. Judged are p99 of TTFT and of the longest tenth of gaps.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan

from kvota.tools.load.asked import Seen
from kvota.tools.load.bench import Bench
from kvota.tools.load.cut import Cut, kept_until_cut
from kvota.tools.load.generator import Run
from kvota.tools.load.percentiles import Spread, percentile
from kvota.tools.load.schedule import Shape
from kvota.tools.load.sweep import measure_alone
from kvota.tools.load.words import UNSURE, in_ms, ms, p99
from kvota.tools.report.charts import Bars, bar_chart
from kvota.tools.report.html import Report, Section, Table

RATIO_MAX = 1.5  # p99 of the short ones, beside long ones over alone
UTILISATION = 1 / 3  # of what one short request after another makes
NUM_SHORT_MIN = 10  # in each part
LEAD_S = 1.0  # long ones are being read before the first short one is due
DRAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Phase:
    """What short requests saw, and the long ones beside them."""

    name: str
    num_short: int
    num_unserved: int
    ttft: Spread | None
    tpot: Spread | None
    stall: Spread | None
    num_long_ended: int
    long_p50_s: float  # sent to end, of those that were served; NaN without any
    num_long_failed: int
    complaint: str | None


@dataclass(frozen=True, slots=True)
class Isolation:
    """The result of the mode: alone, beside long ones, alone again; None from where it was cut."""

    rate_rps: float
    long_at_once: int
    long_alone_s: float
    alone: Phase | None
    beside: Phase | None
    again: Phase | None
    cut: Cut | None = None

    @property
    def phases(self) -> Sequence[Phase]:
        return [one for one in (self.alone, self.beside, self.again) if one is not None]

    @property
    def ttft_ratio(self) -> float:
        """p99 beside long ones over the higher of the two lone p99."""
        return _ratio(self.beside, self.alone, self.again, lambda one: one.ttft)

    @property
    def stall_ratio(self) -> float:
        return _ratio(self.beside, self.alone, self.again, lambda one: one.stall)

    @property
    def complaint(self) -> str | None:
        fewest = min(self.phases, key=lambda one: one.num_short)
        if fewest.num_short < NUM_SHORT_MIN:
            return (
                f"{fewest.num_short} short requests in the part {fewest.name!r} say nothing of its "
                f"p99; {NUM_SHORT_MIN} are the least. Give it more --seconds or a higher --rate."
            )
        return next((one.complaint for one in self.phases if one.complaint), None)

    @property
    def is_good(self) -> bool:
        is_served = self.beside is not None and self.beside.num_unserved == 0
        is_near = max(self.ttft_ratio, self.stall_ratio) <= RATIO_MAX
        return self.complaint is None and self.cut is None and is_served and is_near

    def report(self, facts: Mapping[str, str]) -> Report:
        bars = [
            Bars("TTFT p50", [in_ms(one.ttft, "p50") for one in self.phases]),
            Bars("TTFT p99", [in_ms(one.ttft, "p99") for one in self.phases]),
            Bars("stall p99", [in_ms(one.stall, "p99") for one in self.phases]),
        ]
        chart = bar_chart([one.name for one in self.phases], bars, "ms")
        text = (
            f"{self.rate_rps:.3g} short requests/s. A long request alone takes "
            f"{self.long_alone_s:.2f} s. Stall is the mean of the longest tenth of an answer's "
            f"gaps. Isolated means: p99 of both at most {RATIO_MAX:g} times what they are alone, "
            f"and every short request served.\n\n{UNSURE}"
        )
        section = Section("Short requests", text, self._table(), [chart])
        return Report(
            "Isolation: short requests beside long ones", facts, [section], self._verdict(),
            is_bad=not self.is_good,
        )  # fmt: skip

    def _verdict(self) -> str:
        if self.complaint:
            return f"Refused: {self.complaint}"
        if self.beside is None or self.cut is not None:
            return f"{len(self.phases)} of 3 parts were measured, too few to compare."
        word = "Isolated" if self.is_good else "Not isolated"
        return (
            f"{word}: beside {self.long_at_once} long, p99 TTFT of short requests is "
            f"{self.ttft_ratio:.2f} times and their stalls {self.stall_ratio:.2f} times what they "
            f"are alone; {self.beside.num_short - self.beside.num_unserved} of "
            f"{self.beside.num_short} were served."
        )

    def _table(self) -> Table:
        header = ("beside", "short", "unserved", "TTFT p50 ms", "p99",
                  "TPOT p50 ms", "stall p99 ms", "long ended", "their p50 s")  # fmt: skip
        return Table(header, [_cells(one) for one in self.phases])


async def isolation(
    bench: Bench,
    short: Shape,
    long: Shape,
    *,
    long_at_once: int,
    seconds: float,
    rate_rps: float | None = None,
) -> Isolation:
    """`seconds` with long ones, and half of that alone before and after."""
    for shape in (short, long):
        bench.target.check_length(shape.prompt.most, shape.output.most)
    alone_s = (await measure_alone(bench, short)).total_s
    rate = rate_rps or UTILISATION / alone_s
    long_alone = await bench.alone("a long one alone", long, 1)
    parts = _Parts(bench, short, long, rate)
    phases: list[Phase] = []
    with kept_until_cut() as end:
        phases.append(await parts.run("alone", seconds / 2, 0))
        phases.append(await parts.run(f"{long_at_once} long", seconds, long_at_once))
        phases.append(await parts.run("alone again", seconds / 2, 0))
    end.require(phases)
    alone, beside, again = [*phases, None, None][:3]
    return Isolation(
        rate_rps=rate,
        long_at_once=long_at_once,
        long_alone_s=long_alone[0].ended_s,
        alone=alone,
        beside=beside,
        again=again,
        cut=end.cut,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    bench: Bench
    short: Shape
    long: Shape
    rate_rps: float

    async def run(self, name: str, seconds: float, num_long: int) -> Phase:
        await self.bench.wait_idle()
        if not num_long:
            return _phase(name, await self._offer(name, seconds), [])
        long_runs = asyncio.create_task(
            self.bench.keep(name, self.long, num_long, seconds=LEAD_S + seconds)
        )
        try:
            await asyncio.sleep(LEAD_S)
            short_run = await self._offer(name, seconds)
            return _phase(name, short_run, (await long_runs).seen)
        finally:
            long_runs.cancel()  # where it is still under way, this part was cut

    async def _offer(self, name: str, seconds: float) -> Run:
        return await self.bench.offer(
            name, self.short, self.rate_rps, seconds=seconds, drain_s=DRAIN_S
        )


def _phase(name: str, short: Run, long: Sequence[Seen]) -> Phase:
    whole = [one for one in short.seen if one.is_whole]
    ttft = Spread.of(one.first_token_s for one in whole if one.first_token_s is not None)
    ended = sorted(one.service_s for one in long if one.is_whole)
    return Phase(
        name=name,
        num_short=len(short.seen),
        num_unserved=len(short.seen) - len(whole),
        ttft=ttft,
        tpot=Spread.of(one.per_token_s for one in whole if one.per_token_s is not None),
        stall=Spread.of(one.stall_s for one in whole if one.stall_s is not None),
        num_long_ended=len(ended),
        long_p50_s=percentile(ended, 0.5),
        num_long_failed=sum(not (one.is_whole or one.is_unfinished) for one in long),
        complaint=short.lag.complaint(ttft.p50, ttft.p99) if ttft else None,
    )


def _ratio(
    beside: Phase | None,
    alone: Phase | None,
    again: Phase | None,
    spread: Callable[[Phase], Spread | None],
) -> float:
    if beside is None:
        return nan
    lone = [spread(one) for one in (alone, again) if one is not None]
    highest = max((one.p99 for one in lone if one is not None), default=nan)
    near = spread(beside)
    if near is None:
        return inf  # nobody was served
    return near.p99 / highest if highest > 0 else nan


def _cells(one: Phase) -> tuple[str, ...]:
    return (
        one.name,
        str(one.num_short),
        str(one.num_unserved),
        ms(one.ttft.p50 if one.ttft else None),
        p99(one.ttft),
        ms(one.tpot.p50 if one.tpot else None),
        p99(one.stall),
        str(one.num_long_ended),
        ms(one.long_p50_s / 1000),
    )
