"""The cap: enough places at the recommended rate, and a line that still serves in time."""

from random import Random

from kvota.tools.load.capacity import Cap, cap_for
from kvota.tools.load.flattening import flattening_point
from kvota.tools.load.percentiles import percentile


def test_places_for_whoever_comes_and_a_line_that_moves_in_time() -> None:
    cap = cap_for(safe_rps=4.0, in_flight_p99=6, ttft_slo_s=2.0, idle_ttft_s=0.5)
    assert cap == Cap(max_running_requests=7, max_waiting_queue=3)
    assert cap.settings == {"max_running_requests": 7, "max_waiting_queue": 3}


def test_whoever_finds_all_places_taken_by_chance_may_wait() -> None:
    assert cap_for(safe_rps=0.5, in_flight_p99=2, ttft_slo_s=1, idle_ttft_s=0.1) == Cap(3, 1)


def test_an_slo_that_leaves_no_time_to_wait_leaves_no_line() -> None:
    assert cap_for(safe_rps=9, in_flight_p99=0, ttft_slo_s=1, idle_ttft_s=1.5) == Cap(1, 0)


def test_with_so_many_places_practically_nobody_waits_at_the_recommended_rate() -> None:
    """An M/G/c queue, simulated: what is found open with places without end, then with the cap."""
    chance = Random(7)
    arrivals, now = [], 0.0
    for _ in range(20_000):
        now += chance.expovariate(4.0)
        arrivals.append((now, chance.uniform(0.5, 3.0)))
    found, ends = [], list[float]()
    for at, lasts in arrivals:
        ends = [end for end in ends if end > at]
        found.append(float(len(ends)))
        ends.append(at + lasts)
    cap = cap_for(
        safe_rps=4, in_flight_p99=percentile(sorted(found), 0.99), ttft_slo_s=2, idle_ttft_s=0.1
    )
    num_waiting, places = 0, [0.0] * cap.max_running_requests
    for at, lasts in arrivals:
        free = min(range(len(places)), key=places.__getitem__)
        num_waiting += places[free] > at
        places[free] = max(at, places[free]) + lasts
    assert num_waiting / len(arrivals) < 0.02


def test_where_more_at_once_stops_to_bring_more() -> None:
    assert flattening_point({1: 100, 2: 195, 4: 380, 8: 420, 16: 430}) == 8
    assert flattening_point({1: 100, 2: 195, 4: 380, 8: 410, 16: 700}) is None, "one dip is no end"
    assert flattening_point({1: 100, 2: 200, 4: 400}) is None
    assert flattening_point({1: 100, 2: 105, 4: 60}) == 1
    assert flattening_point({8: 50}) is None


def test_batches_need_not_double() -> None:
    # From 10 to 15 is 0.585 doublings: 5 % more is 8.7 % per doubling, 7 % more is 12.3 %.
    assert flattening_point({5: 100, 10: 200, 15: 210}) == 10
    assert flattening_point({5: 100, 10: 200, 15: 214}) is None
