"""The knee is found where it is, and one unlucky run does not move it."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.desk_live_knee import Knee, NoKnee, find_knee


@dataclass
class Server:
    """Serves well up to `knee_rps`, but for the runs that are unlucky."""

    knee_rps: float
    past_knee: float = 0.89
    unlucky: frozenset[tuple[float, int]] = frozenset()
    tried: list[tuple[float, int]] = field(default_factory=list)

    def __call__(self, rate_rps: float, attempt: int) -> float:
        self.tried.append((rate_rps, attempt))
        is_good = rate_rps <= self.knee_rps and (rate_rps, attempt) not in self.unlucky
        return 0.9 if is_good else self.past_knee


@given(knee_rps=st.floats(1.0, 100.0), num_halvings=st.integers(0, 6))
def test_the_knee_lies_between_what_held_and_what_failed(
    knee_rps: float, num_halvings: int
) -> None:
    found = find_knee(Server(knee_rps), 1.0, num_halvings)
    assert found.failed_rps is not None
    assert found.rate_rps <= knee_rps < found.failed_rps
    width = 2 ** (0.5**num_halvings)
    assert found.failed_rps / found.rate_rps == pytest.approx(width)


def test_rates_rise_and_only_what_narrowly_failed_is_tried_again() -> None:
    server = Server(3.0)
    find_knee(server, 0.75, 1)
    middle = (3.0 * 6.0) ** 0.5
    rising = [(0.75, 0), (1.5, 0), (3.0, 0), (6.0, 0), (6.0, 1)]
    assert server.tried == [*rising, (middle, 0), (middle, 1)]


def test_one_unlucky_run_does_not_hide_what_lies_above() -> None:
    assert find_knee(Server(4.0, unlucky=frozenset({(2.0, 0)})), 1.0, 0) == Knee(4.0, 8.0)
    assert find_knee(Server(4.0, unlucky=frozenset({(2.0, 0), (2.0, 1)})), 1.0, 0) == Knee(1.0, 2.0)


def test_what_fails_by_far_is_not_tried_again() -> None:
    server = Server(2.0, past_knee=0.74)
    assert find_knee(server, 1.0, 0) == Knee(2.0, 4.0)
    assert server.tried == [(1.0, 0), (2.0, 0), (4.0, 0)]


def test_without_a_good_first_rate_there_is_no_knee() -> None:
    with pytest.raises(NoKnee, match="at 1 requests/s fewer than 90% are good"):
        find_knee(Server(0.5), 1.0, 3)


def test_a_server_that_never_fails_ends_the_search() -> None:
    found = find_knee(Server(float("inf")), 1.0, 3)
    assert found == Knee(256.0, None)
