"""What is left of a measurement that Ctrl-C ends, or the death of its server; in virtual time."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from kvota.tools.load.asked import CONNECTION, Asked, Seen
from kvota.tools.load.baseline import baseline
from kvota.tools.load.bench import NothingServed
from kvota.tools.load.cut import INTERRUPTED
from kvota.tools.load.generator import GONE_AFTER_S
from kvota.tools.load.isolation import Isolation, isolation
from kvota.tools.load.measure import Slo
from kvota.tools.load.schedule import Lengths, Shape
from kvota.tools.load.session import Finding
from kvota.tools.load.soak import soak
from kvota.tools.load.soak_page import soak_report
from kvota.tools.load.sweep import SweepOptions, sweep
from kvota.tools.load.sweep_page import sweep_report
from kvota.tools.load.throughput import throughput
from kvota.tools.report.html import Report
from tests.tools.load.sim_server import SimServer, bench_on
from tests.tools.load.virtual_time import LoopClock, in_virtual_time

T = TypeVar("T")
SHORT = Shape(Lengths(20, 40), Lengths(16, 16))
LONG = Shape(Lengths(4000, 4000), Lengths(64, 64))
SWEEP = SweepOptions(
    shape=SHORT, slo=Slo(ttft_s=1.0, tpot_s=0.1), seconds=10.0, num_requests_min=20
)


class Mortal(SimServer):
    """Lets nobody in from `dies_at_s` on, counted from when it was made."""

    def __init__(self, dies_at_s: float) -> None:
        super().__init__()
        self._dies_at_s = dies_at_s
        self._origin_s: float | None = None

    async def send(
        self, asked: Asked, origin_s: float | None = None, until_s: float | None = None
    ) -> Seen:
        now = LoopClock().now()
        if self._origin_s is None:
            self._origin_s = now
        if now - self._origin_s < self._dies_at_s:
            return await super().send(asked, origin_s, until_s)
        due_s = now if origin_s is None else origin_s + asked.scheduled_s
        return Seen(
            scheduled_s=asked.scheduled_s, sent_s=now - due_s, ended_s=now - due_s,
            code=CONNECTION, message="refused", max_tokens=asked.max_tokens,
        )  # fmt: skip


def stopped(work: Coroutine[Any, Any, T], after_s: float) -> T:
    """The work, with Ctrl-C after so long."""

    async def run() -> T:
        task = asyncio.create_task(work)
        asyncio.get_running_loop().call_later(after_s, task.cancel)
        return await task

    return in_virtual_time(run())


def test_a_baseline_keeps_the_requests_that_were_served() -> None:
    """A request takes 11 × 0.03 s; one is not counted, then 0.33 s each."""
    lengths = [Lengths(64, 64), Lengths(128, 128)]
    found = stopped(baseline(bench_on(SimServer()), lengths, Lengths(11, 11), 5), 0.33 * 8.5)
    assert [(row.prompt, row.num, row.num_unserved) for row in found.rows] == [
        ("64", 5, 0),
        ("128", 1, 0),
    ]
    assert found.cut is INTERRUPTED


def test_a_baseline_keeps_the_lengths_before_its_server_died() -> None:
    lengths = [Lengths(64, 64), Lengths(128, 128)]
    found = in_virtual_time(baseline(bench_on(Mortal(0.33 * 5.5)), lengths, Lengths(11, 11), 5))
    assert [(row.num, row.num_unserved) for row in found.rows] == [(5, 0)]
    assert found.cut is not None
    assert not found.cut.is_interrupt
    assert found.cut.reason == "prompt 128: the server is gone, no answer: refused"


def test_throughput_keeps_its_batches_and_does_not_say_where_it_is_flat() -> None:
    work = throughput(bench_on(SimServer()), SHORT, [1, 2, 4, 8], seconds=20)
    found = stopped(work, 50)
    assert [row.batch for row in found.rows] == [1, 2]
    assert (found.cut, found.flat_from) == (INTERRUPTED, None)
    verdict = found.report({}).verdict
    assert verdict.startswith("At most")
    assert "rising" not in verdict


def test_throughput_keeps_the_batches_before_its_server_died() -> None:
    work = throughput(bench_on(Mortal(40.5)), SHORT, [1, 2, 4, 8], seconds=20)
    found = in_virtual_time(work)
    assert [row.batch for row in found.rows] == [1, 2]
    assert found.cut is not None
    assert found.cut.reason == "4 at once: not one token came: no answer: refused"


def test_a_sweep_keeps_its_trials_and_recommends_nothing() -> None:
    found = stopped(sweep(bench_on(SimServer()), SWEEP), 100)
    assert len(found.trials) >= 2
    assert (found.cut, found.cap, found.is_good) == (INTERRUPTED, None, False)
    assert "held until then" in sweep_report(found, {}).verdict


def test_a_sweep_that_is_stopped_before_its_first_trial_tells_how_a_lone_request_was() -> None:
    found = stopped(sweep(bench_on(SimServer()), SWEEP), 10)
    assert found.trials == []
    assert sweep_report(found, {}).verdict == "Alone, a request has TTFT 30 ms. No rate was tried."


def test_a_server_that_dies_is_no_rate_that_does_not_hold() -> None:
    found = in_virtual_time(sweep(bench_on(Mortal(100)), SWEEP))
    assert found.cut is not None
    assert "the server is gone" in found.cut.reason
    assert not any(one.num_whole == 0 for one in found.trials)


def isolated(server: SimServer) -> Coroutine[Any, Any, Isolation]:
    return isolation(bench_on(server), SHORT, LONG, long_at_once=2, seconds=60, rate_rps=0.5)


def test_isolation_keeps_the_parts_that_ended() -> None:
    found = stopped(isolated(SimServer(per_running_s=0.001)), 60)
    assert [one.name for one in found.phases] == ["alone"]
    assert (found.beside, found.again, found.cut) == (None, None, INTERRUPTED)
    assert not found.is_good
    assert found.report({}).verdict == "1 of 3 parts were measured, too few to compare."


def test_no_long_request_goes_on_when_isolation_is_stopped() -> None:
    server = SimServer(per_running_s=0.001)

    async def run() -> int:
        task = asyncio.create_task(isolated(server))
        asyncio.get_running_loop().call_later(60, task.cancel)
        await task
        await asyncio.sleep(0.1)
        return server.num_running

    assert in_virtual_time(run()) == 0


def test_neighbours_of_a_server_that_died_are_not_called_badly_isolated() -> None:
    found = in_virtual_time(isolated(Mortal(45)))
    assert found.cut is not None
    assert "Not isolated" not in found.report({}).verdict


def test_a_soak_is_judged_by_what_was_seen_until_then() -> None:
    work = soak(bench_on(SimServer()), SHORT, minutes=30, rate_rps=0.5)
    found = stopped(work, 600)
    assert found.minutes == pytest.approx(10, abs=0.2)
    assert found.cut is INTERRUPTED
    assert (found.num_failed, found.is_good) == (0, False)
    assert "TTFT is steady" in soak_report(found, {}).verdict


def test_a_soak_ends_soon_after_its_server() -> None:
    found = in_virtual_time(soak(bench_on(Mortal(600)), SHORT, minutes=30, rate_rps=0.5))
    assert found.cut is not None
    assert not found.cut.is_interrupt
    assert found.minutes * 60 < 600 + 2 * GONE_AFTER_S
    assert found.num_failed > 0
    assert "requests failed, the first: no answer: refused." in soak_report(found, {}).verdict


class Failing(SimServer):
    """Answers one request with an error."""

    num_sent = 0

    async def send(
        self, asked: Asked, origin_s: float | None = None, until_s: float | None = None
    ) -> Seen:
        self.num_sent += 1
        seen = await super().send(asked, origin_s, until_s)
        if self.num_sent != 50:
            return seen
        return replace(seen, status=500, code="internal", message="broken")


def test_a_soak_in_which_a_request_failed_is_not_good() -> None:
    found = in_virtual_time(soak(bench_on(Failing()), SHORT, minutes=5, rate_rps=0.5))
    assert (found.num_failed, found.cut, found.is_good) == (1, None, False)
    assert "1 of " in soak_report(found, {}).verdict


@pytest.mark.parametrize("dies", [False, True], ids=["interrupted", "dead server"])
def test_where_nothing_was_measured_nothing_is_kept(dies: bool) -> None:
    work = throughput(bench_on(Mortal(0.0) if dies else SimServer()), SHORT, [1, 2], seconds=20)
    with pytest.raises(NothingServed if dies else asyncio.CancelledError):
        stopped(work, 5 if not dies else 60)


def test_a_page_says_first_that_it_is_incomplete() -> None:
    found = stopped(throughput(bench_on(SimServer()), SHORT, [1, 2], seconds=20), 30)
    finding = Finding.of(found, found.report({}), found.cut)
    assert finding.report.verdict.startswith("Incomplete: interrupted. At most")
    assert not finding.is_good
    assert finding.as_json()["incomplete"] == "interrupted"
    whole = Finding.of(found, Report("Whole", verdict="Good."), None)
    assert whole.as_json()["incomplete"] is None
