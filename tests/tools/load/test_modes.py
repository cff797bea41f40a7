"""Baseline, throughput, isolation and soak against a simulated server, in virtual time."""

import re
from collections.abc import Callable
from dataclasses import replace
from math import exp
from random import Random

import pytest

from kvota.tools.load.asked import Asked, Seen
from kvota.tools.load.baseline import baseline
from kvota.tools.load.bench import NothingServed
from kvota.tools.load.isolation import Isolation, isolation
from kvota.tools.load.leak import Verdict
from kvota.tools.load.schedule import Lengths, Shape
from kvota.tools.load.soak import Soak, soak
from kvota.tools.load.soak_page import soak_report
from kvota.tools.load.throughput import throughput
from kvota.tools.server import ServerUnusable
from tests.tools.load.sim_server import SimServer, bench_on
from tests.tools.load.virtual_time import in_virtual_time

SHORT = Shape(Lengths(20, 40), Lengths(16, 16))
LONG = Shape(Lengths(4000, 4000), Lengths(64, 64))
MIB = 2.0**20


def test_alone_a_request_takes_what_it_takes() -> None:
    found = in_virtual_time(
        baseline(bench_on(SimServer()), [Lengths(64, 64), Lengths(512, 512)], Lengths(11, 11), 5)
    )
    assert [(row.prompt, row.output, row.num) for row in found.rows] == [
        ("64", "11", 5),
        ("512", "11", 5),
    ]
    row = found.rows[0]
    assert row.tpot is not None
    assert (row.ttft.p50, row.tpot.p50, row.total.p50) == pytest.approx((0.03, 0.03, 0.33))
    assert row.prompt_tokens_per_s == pytest.approx(64 / 0.03)
    assert row.output_tokens_per_s == pytest.approx(1 / 0.03)
    assert found.is_good


def test_what_does_not_fit_the_window_is_refused_before_any_load() -> None:
    with pytest.raises(ServerUnusable, match="whose window is 8192"):
        in_virtual_time(baseline(bench_on(SimServer()), [Lengths(8000, 9000)], Lengths(1, 1), 1))


def test_a_server_that_serves_nobody_is_no_result() -> None:
    full = SimServer(places=0, line_max=0)
    with pytest.raises(NothingServed, match="503"):
        in_virtual_time(baseline(bench_on(full), [Lengths(8, 8)], Lengths(8, 8), 2))


class Dying(SimServer):
    """Is gone after so many requests."""

    def __init__(self, num_served: int) -> None:
        super().__init__()
        self._num_left = num_served

    async def send(
        self, asked: Asked, origin_s: float | None = None, until_s: float | None = None
    ) -> Seen:
        seen = await super().send(asked, origin_s, until_s)
        self._num_left -= 1
        if self._num_left >= 0:
            return seen
        return replace(seen, code="connection_error", message="refused", status=None)


def test_a_server_that_dies_half_way_is_no_good_baseline() -> None:
    found = in_virtual_time(baseline(bench_on(Dying(4)), [Lengths(64, 64)], Lengths(11, 11), 5))
    assert (found.rows[0].num, found.rows[0].num_unserved) == (3, 2)
    assert not found.is_good
    verdict = found.report({}).verdict
    assert verdict.endswith("But 2 of 5 requests were not served, the first: no answer: refused")


def test_throughput_flattens_where_the_batch_costs_as_much_as_it_brings() -> None:
    """N requests make N / (0.02 + 0.01·N) tokens/s: 33, 50, 67, 80, 89, 94 for 1 to 32."""
    found = in_virtual_time(
        throughput(bench_on(SimServer()), SHORT, [8, 1, 2, 4, 16, 32, 64], seconds=40)
    )
    rates = {row.batch: row.output_tokens_per_s for row in found.rows}
    for batch, rate in rates.items():
        assert rate == pytest.approx(batch / (0.02 + 0.01 * batch), rel=0.03)
    assert found.flat_from == 16, "8 to 16 brings 11 %, 16 to 32 brings 6 %"
    assert "From 16 at once" in found.report({}).verdict


def test_throughput_that_still_rises_says_so() -> None:
    found = in_virtual_time(
        throughput(bench_on(SimServer(per_running_s=0.0)), SHORT, [1, 2, 4], seconds=20)
    )
    assert found.flat_from is None
    assert "still rising" in found.report({}).verdict


def test_a_batch_of_which_nothing_comes_whole_is_no_measurement() -> None:
    """16 tokens at 0.34 s each take longer than the window."""
    found = in_virtual_time(throughput(bench_on(SimServer()), SHORT, [1, 32], seconds=5))
    assert not found.is_good
    verdict = found.report({}).verdict
    assert verdict.startswith("Refused: 32 at once: not one answer came whole in 5 s.")
    assert "--seconds" in verdict


def isolated(server: SimServer) -> Isolation:
    return in_virtual_time(
        isolation(bench_on(server), SHORT, LONG, long_at_once=2, seconds=60, rate_rps=0.5)
    )


def test_a_server_whose_long_requests_cost_their_neighbours_nothing_is_isolated() -> None:
    found = isolated(SimServer(per_running_s=0.001))
    assert found.is_good
    assert found.ttft_ratio == pytest.approx(1.0, abs=0.2)
    assert found.beside is not None
    assert found.beside.num_long_ended > 0
    assert found.report({}).verdict.startswith("Isolated")


def test_a_server_whose_long_requests_stall_everybody_is_not() -> None:
    found = isolated(SimServer(per_running_s=0.001, per_long_s=0.1))
    assert not found.is_good
    assert found.ttft_ratio > 5
    assert found.stall_ratio > 5
    report = found.report({})
    assert report.is_bad
    assert report.verdict.startswith("Not isolated: beside 2 long")


def test_a_handful_of_short_requests_is_no_judgement() -> None:
    found = in_virtual_time(
        isolation(bench_on(SimServer()), SHORT, LONG, long_at_once=1, seconds=10, rate_rps=0.5)
    )
    assert not found.is_good
    assert re.match(r"Refused: \d short requests in the part 'alone", found.report({}).verdict)


def soaked(server: SimServer, minutes: float = 10.0) -> Soak:
    return in_virtual_time(soak(bench_on(server), SHORT, minutes=minutes, rate_rps=0.5))


def noisy(value: Callable[[float], float]) -> Callable[[float], float]:
    chance = Random(4)
    return lambda at_s: value(at_s) + chance.gauss(0, 2 * MIB)


def test_a_server_that_keeps_its_memory_is_steady() -> None:
    found = soaked(SimServer(memory=noisy(lambda _: 1000 * MIB)))
    assert found.memory_trend is not None
    assert found.memory_trend.verdict is Verdict.STEADY
    assert found.ttft_trend.verdict is Verdict.STEADY
    assert found.is_kv_back is True
    assert found.is_good
    verdict = soak_report(found, {}).verdict
    assert re.fullmatch(
        r"Memory is steady: -?\d+\.\d MiB in 6\.\d minutes\. A leak, if any, is below \d+\.\d MiB "
        r"per hour, 99 % sure\. TTFT is steady: -?\S+ ms in "
        r"6\.\d minutes\. KV memory is back to what it was\.",
        verdict,
    ), verdict


def test_a_leak_is_found_with_its_slope() -> None:
    """1 MiB every five seconds: 720 MiB an hour."""
    found = soaked(SimServer(memory=noisy(lambda at_s: 1000 * MIB + at_s * MIB / 5)))
    assert found.memory_trend is not None
    assert found.memory_trend.verdict is Verdict.LEAK
    assert found.memory_trend.slope.per_s == pytest.approx(MIB / 5, rel=0.1)
    report = soak_report(found, {})
    assert report.is_bad
    assert report.verdict.startswith("Memory leaks: 7")


def test_a_cache_that_fills_and_is_full_has_settled() -> None:
    found = soaked(
        SimServer(memory=noisy(lambda at_s: 1000 * MIB + 200 * MIB * (1 - exp(-at_s / 165)))),
        minutes=15,
    )
    assert found.memory_trend is not None
    assert found.memory_trend.verdict is Verdict.SETTLED
    assert found.is_good
    assert re.match(
        r"Memory has settled: \d+\.\d MiB in 9\.\d minutes, then no more\. A leak, if any, is "
        r"below \d+\.\d MiB per hour, 99 % sure\. TTFT",
        soak_report(found, {}).verdict,
    ), soak_report(found, {}).verdict


def test_a_cache_that_still_fills_is_undecided_and_the_report_says_what_it_saw() -> None:
    found = soaked(
        SimServer(memory=noisy(lambda at_s: 1000 * MIB + 200 * MIB * (1 - exp(-at_s / 160))))
    )
    assert found.memory_trend is not None
    assert found.memory_trend.verdict is Verdict.UNDECIDED
    assert not found.is_good
    assert re.match(
        r"Whether memory grows is undecided: lately \d+\.\d MiB to \d+\.\d MiB per hour, judged "
        r"against \d+\.\d MiB\. Run longer\.",
        soak_report(found, {}).verdict,
    ), soak_report(found, {}).verdict


def test_kv_blocks_that_are_used_for_the_first_time_are_no_leak() -> None:
    grown = noisy(lambda at_s: 1000 * MIB + at_s * MIB)
    found = soaked(SimServer(memory=grown, kv_touched=lambda at_s: at_s * MIB))
    assert found.memory_trend is not None
    assert found.memory_trend.verdict is Verdict.STEADY
    assert found.is_good
    assert re.search(r"Not counted: 5\d\d\.\d MiB of reserved KV", soak_report(found, {}).verdict)


def test_a_leak_beside_kv_blocks_is_still_a_leak() -> None:
    grown = noisy(lambda at_s: 1000 * MIB + at_s * MIB * 1.2)
    found = soaked(SimServer(memory=grown, kv_touched=lambda at_s: at_s * MIB))
    assert found.memory_trend is not None
    assert found.memory_trend.slope.per_s == pytest.approx(MIB / 5, rel=0.1)
    assert soak_report(found, {}).verdict.startswith("Memory leaks: 7")


def test_kv_that_does_not_come_back_is_found() -> None:
    found = soaked(SimServer(kv_lost=0.05), minutes=2)
    assert found.is_kv_back is False
    assert not found.is_good
    assert "KV memory is not back: 5 % is still in use." in soak_report(found, {}).verdict


def test_memory_read_elsewhere_counts_before_the_servers_word() -> None:
    found = in_virtual_time(
        soak(bench_on(SimServer()), SHORT, minutes=1, rate_rps=0.5, read_memory=lambda: 5.0)
    )
    assert {value for _, value in found.looks.memory_bytes} == {5.0}
