from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median, pstdev

import pytest

from kvota.traffic.servegen import Client, Lengths, Period, Window, read_clients, servegen_arrivals

CLIENTS = Path("bench/traces/servegen_r1_two_hours.jsonl.gz")
TWO_O_CLOCK_S, FOUR_O_CLOCK_S = 50_400.0, 57_600.0


def test_the_windows_have_the_rates_that_the_trace_gives() -> None:
    clients = read_clients(CLIENTS)
    arrivals = servegen_arrivals(
        clients, Random(3), start_s=TWO_O_CLOCK_S, end_s=FOUR_O_CLOCK_S, max_tokens=32_768
    )
    expected = sum(window.rate_rps * 600 for client in clients for window in client.windows)
    assert len(arrivals) == pytest.approx(expected, abs=60)
    by_tenant = Counter(one.tenant for one in arrivals)
    for client in clients:
        own = sum(window.rate_rps * 600 for window in client.windows)
        assert abs(by_tenant[client.name] - own) < len(client.windows) + 1
    assert all(0 <= one.at_s < 7200 for one in arrivals)


def test_lengths_follow_the_clients_distributions() -> None:
    clients = read_clients(CLIENTS)
    arrivals = servegen_arrivals(
        clients, Random(3), start_s=TWO_O_CLOCK_S, end_s=FOUR_O_CLOCK_S, max_tokens=32_768
    )
    busiest, _ = Counter(one.tenant for one in arrivals).most_common(1)[0]
    [client] = [client for client in clients if client.name == busiest]
    lengths = client.period_at(TWO_O_CLOCK_S).output
    weights = [b - a for a, b in pairwise((0.0, *lengths.cumulative))]
    true_mean = sum(
        value * weight for value, weight in zip(lengths.values, weights, strict=True)
    ) / sum(weights)
    own = [one.output_tokens for one in arrivals if one.tenant == busiest]
    assert fmean(own) == pytest.approx(true_mean, rel=0.05)


def bursty(family: str, shape: float) -> Client:
    lengths = Lengths([5], [1.0])
    window = Window(0.0, 2.0, family, shape, 9.0)
    return Client("one", [window], {0.0: Period(lengths, lengths)})


@pytest.mark.parametrize(
    ("family", "shape", "cv"), [("Gamma", 0.04, 5.0), ("Gamma", 1.0, 1.0), ("Weibull", 0.5, 2.236)]
)
def test_gaps_keep_the_burstiness_of_their_family(family: str, shape: float, cv: float) -> None:
    cvs = []
    for seed in range(40):
        arrivals = servegen_arrivals(
            [bursty(family, shape)], Random(seed), start_s=0, end_s=600, max_tokens=9
        )
        assert len(arrivals) == 1200
        gaps = [after.at_s - before.at_s for before, after in pairwise(arrivals)]
        cvs.append(pstdev(gaps) / fmean(gaps))
    assert median(cvs) == pytest.approx(cv, rel=0.15)


def test_equal_seeds_give_equal_traffic() -> None:
    clients = read_clients(CLIENTS)
    one, same, other = (
        servegen_arrivals(clients, Random(seed), start_s=TWO_O_CLOCK_S, end_s=51_600, max_tokens=64)
        for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other
