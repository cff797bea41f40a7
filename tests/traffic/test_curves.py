from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.traffic.arrival import Arrival
from kvota.traffic.curves import NUM_POINTS, Curves, Points, curves_of, curves_of_clients
from kvota.traffic.opening import open_traffic
from kvota.traffic.servegen import read_clients
from kvota.traffic.shape import gather, gather_clients, shape_of, shape_of_clients

TRACES = Path("bench/traces")


def curves_in(arrivals: list[Arrival]) -> Curves:
    return curves_of(gather(arrivals))


def arrival(at_s: float, prompt: int = 10, output: int = 2) -> Arrival:
    return Arrival(at_s=at_s, prompt_tokens=prompt, output_tokens=output, max_tokens=output)


def share_at(points: Points, tokens: float) -> float:
    """Percent of the requests that are at most so long."""
    return max((share for length, share in points if length <= tokens), default=0.0)


def test_even_arrivals_make_a_level_line() -> None:
    curves = curves_in([arrival(0.5 * number) for number in range(241)])
    assert curves.window_s == 1.0
    assert [rate for _, rate in curves.rates] == [2.0] * 119 + [3.0]
    assert curves.mean_rps == pytest.approx(241 / 120)


def test_a_pause_shows() -> None:
    curves = curves_in([arrival(at) for at in (0.0, 0.5, 9.0, 9.5, 10.0)])
    assert [rate for _, rate in curves.rates] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 3]


def test_distributions_go_through_the_percentiles_of_the_figures() -> None:
    gathered = gather(open_traffic(TRACES / "azure_conv_2023.csv.gz", spreads=False).arrivals)
    shape, curves = shape_of(gathered), curves_of(gathered)
    for points, figures in ((curves.prompt, shape.prompt), (curves.output, shape.output)):
        assert len(points) <= NUM_POINTS
        assert share_at(points, figures.p50) == pytest.approx(50, abs=1.0)
        assert share_at(points, figures.p95) == pytest.approx(95, abs=1.0)
        assert points[-1] == (figures.max, 100.0)


def test_clients_are_drawn_as_their_file_says() -> None:
    clients = gather_clients(read_clients(TRACES / "servegen_r1_two_hours.jsonl.gz"))
    shape, curves = shape_of_clients(clients), curves_of_clients(clients)
    assert max(rate for _, rate in curves.rates) == shape.highest_rps
    assert curves.mean_rps == pytest.approx(shape.rate_rps)
    assert share_at(curves.prompt, shape.prompt.p95) == pytest.approx(95, abs=1.0)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 9000)), min_size=1, max_size=50))
def test_nobody_is_lost(drawn: list[tuple[float, int]]) -> None:
    curves = curves_in([arrival(at_s, prompt) for at_s, prompt in drawn])
    if curves.rates:
        counted = sum(rate * curves.window_s for _, rate in curves.rates)
        assert counted == pytest.approx(len(drawn))
    assert curves.prompt[-1] == (max(prompt for _, prompt in drawn), 100.0)
    assert list(curves.prompt) == sorted(curves.prompt)
