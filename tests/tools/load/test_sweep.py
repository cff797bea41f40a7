"""The sweep against a server whose knee can be worked out, in virtual time."""

from dataclasses import replace

import pytest

from kvota.tools.load.asked import Asked, Seen
from kvota.tools.load.capacity import Cap
from kvota.tools.load.measure import Measured, Slo
from kvota.tools.load.schedule import Lengths, Shape
from kvota.tools.load.sweep import Sweep, SweepOptions, sweep, trial
from kvota.tools.load.sweep_page import sweep_report
from tests.tools.load.sim_server import SimServer, bench_on
from tests.tools.load.virtual_time import in_virtual_time

OPTIONS = SweepOptions(
    shape=Shape(Lengths(20, 40), Lengths(32, 32)), slo=Slo(ttft_s=1.0, tpot_s=0.1), seconds=40.0
)


def swept(server: SimServer, options: SweepOptions = OPTIONS) -> Sweep:
    return in_virtual_time(sweep(bench_on(server), options))


@pytest.fixture(scope="module")
def found() -> Sweep:
    return swept(SimServer())


def test_the_knee_is_where_the_batch_breaks_the_slo(found: Sweep) -> None:
    """TPOT 0.02 + 0.01·N s breaks 0.1 s at 8 running, which 2.5 requests/s of 3.2 s make."""
    assert found.knee is not None
    assert found.knee.failed_rps is not None
    assert 1.5 <= found.knee.rate_rps <= 2.6
    assert found.knee.failed_rps <= 1.15 * found.knee.rate_rps
    assert found.alone.tpot_s == pytest.approx(0.03)
    assert found.alone.total_s == pytest.approx(32 * 0.03)


def test_the_recommended_rate_is_measured_and_served_well(found: Sweep) -> None:
    assert found.knee is not None
    assert len(found.safe) == 3
    assert {one.offered_rps for one in found.safe} == {found.knee.safe_rps}
    assert found.knee.safe_rps == pytest.approx(0.65 * found.knee.rate_rps)
    assert min(one.attainment for one in found.safe) >= 0.95
    assert found.is_good


def test_the_cap_has_room_for_the_recommended_rate_and_not_much_more(found: Sweep) -> None:
    assert found.cap is not None
    places = found.cap.max_running_requests
    assert max(one.in_flight_mean for one in found.safe) < places <= 10
    assert found.cap.max_waiting_queue == 1, "0.98 requests/s × half of 0.97 s; one at least"


def above_the_knee(found: Sweep, cap: Cap | None) -> Measured:
    server = SimServer()
    if cap is not None:
        server.places, server.line_max = cap.max_running_requests, cap.max_waiting_queue
    assert found.knee is not None
    rate = 1.5 * found.knee.rate_rps
    return in_virtual_time(trial(bench_on(server), OPTIONS, found.alone, rate, "above"))


def test_above_the_knee_the_cap_keeps_what_is_served_within_the_slo(found: Sweep) -> None:
    before, after = above_the_knee(found, None), above_the_knee(found, found.cap)
    assert before.attainment < 0.5, "everybody is served, and most not well"
    assert after.num_refused > 0
    assert after.tpot is not None
    assert after.tpot.p95 <= 0.11
    assert after.ttft is not None
    assert after.ttft.p95 <= 1.0, "who waits is served in time"
    assert after.goodput_rps > 1.5 * before.goodput_rps


def test_a_server_too_slow_for_the_slo_has_no_knee_and_the_page_says_why() -> None:
    slow = swept(SimServer(base_s=0.5), replace(OPTIONS, seconds=5.0, num_requests_min=5))
    assert slow.knee is None
    assert not slow.is_good
    report = sweep_report(slow, {})
    assert report.is_bad
    assert "Alone, a request has TTFT 510 ms and TPOT 510 ms" in report.verdict


def test_a_server_whose_only_good_rate_is_too_low_to_measure_has_no_knee() -> None:
    options = replace(OPTIONS, seconds=2.0, num_requests_min=5, slo=Slo(1.0, 0.031))
    found = swept(SimServer(), options)
    assert found.knee is None
    assert min(one.offered_rps for one in found.trials) == pytest.approx(10 / 12)


def test_a_rate_limit_ends_the_sweep_without_a_failure() -> None:
    found = swept(SimServer(), replace(OPTIONS, rate_max_rps=1.0))
    assert found.knee is not None
    assert (found.knee.rate_rps, found.knee.failed_rps) == (1.0, None)
    assert "none failed" in sweep_report(found, {}).verdict


class GettingSlower(SimServer):
    """As fast as it says until `slow_from` requests were sent, and then ten times slower."""

    slow_from = 500
    num_sent = 0

    async def send(
        self, asked: Asked, origin_s: float | None = None, until_s: float | None = None
    ) -> Seen:
        self.num_sent += 1
        if self.num_sent == self.slow_from:
            self.base_s *= 10
        return await super().send(asked, origin_s, until_s)


def test_a_machine_that_changes_meanwhile_gets_no_recommendation(found: Sweep) -> None:
    server = GettingSlower()
    server.slow_from = 6 + round(1.25 * sum(one.num_due for one in found.trials))
    unsteady = swept(server)
    assert unsteady.knee is not None
    assert unsteady.cap is None
    assert not unsteady.is_good
    assert "The machine was not the same all the time" in sweep_report(unsteady, {}).verdict


def test_a_generator_without_places_refuses_its_own_result() -> None:
    bench = bench_on(SimServer(), in_flight_max=1)
    found = in_virtual_time(sweep(bench, replace(OPTIONS, first_rps=2.0)))
    assert found.complaint is not None
    assert "the generator was the bottleneck" in found.complaint
    assert found.cap is None
    assert sweep_report(found, {}).verdict.startswith("Refused: at 2 requests/s the generator")


def test_the_same_seed_sweeps_the_same(found: Sweep) -> None:
    again = swept(SimServer())
    assert again.knee == found.knee
    assert [one.goodput_rps for one in again.trials] == [one.goodput_rps for one in found.trials]


def test_the_page_shows_every_trial_and_the_recommended_one(found: Sweep) -> None:
    report = sweep_report(found, {"server": "x"})
    table = report.sections[0].table
    assert table is not None
    assert len(table.rows) == len(found.trials) + 3
    assert sum(row[0].endswith("(plan)") for row in table.rows) == 3
    assert found.cap is not None
    assert f"max_running_requests = {found.cap.max_running_requests}" in report.verdict
    assert report.facts["SLO"] == "TTFT ≤ 1 s and TPOT ≤ 100 ms"
