"""A plan of load: the same seed, the same requests; arrivals as they are said to be."""

from itertools import islice, pairwise
from statistics import mean, pstdev

import pytest

from kvota.tools.load.schedule import BadLengths, Lengths, Shape, one_by_one, open_loop

SHAPE = Shape(Lengths(32, 192), Lengths(16, 64), "short")


def test_the_same_seed_gives_the_same_load_and_another_another() -> None:
    assert open_loop(SHAPE, 5, 20, (1, "a")) == open_loop(SHAPE, 5, 20, (1, "a"))
    assert open_loop(SHAPE, 5, 20, (1, "a")) != open_loop(SHAPE, 5, 20, (2, "a"))


def test_as_many_arrive_as_the_rate_says_in_order_and_in_time() -> None:
    dues = open_loop(SHAPE, 7.5, 40, 1)
    assert len(dues) == 300
    moments = [due.scheduled_s for due in dues]
    assert moments == sorted(moments)
    assert 0 <= moments[0] <= moments[-1] <= 40
    assert all(32 <= due.prompt_tokens <= 192 and 16 <= due.output_tokens <= 64 for due in dues)
    assert {due.lane for due in dues} == {"short"}


def test_random_arrivals_have_the_gaps_of_a_poisson_process() -> None:
    moments = [due.scheduled_s for due in open_loop(SHAPE, 100, 200, 3)]
    gaps = [later - at for at, later in pairwise(moments)]
    assert mean(gaps) == pytest.approx(0.01, rel=0.02)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(1.0, abs=0.03), "exponential gaps: CV 1"


def test_even_arrivals_have_equal_gaps() -> None:
    moments = [due.scheduled_s for due in open_loop(SHAPE, 4, 2, 1, is_even=True)]
    assert moments == [0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


def test_a_rate_too_low_for_the_time_still_sends_one() -> None:
    assert len(open_loop(SHAPE, 0.01, 10, 1)) == 1


def test_requests_without_end_differ() -> None:
    lengths = [due.prompt_tokens for due in islice(one_by_one(SHAPE, 1), 200)]
    assert min(lengths) >= 32
    assert max(lengths) <= 192
    assert len(set(lengths)) > 80


@pytest.mark.parametrize(("text", "lengths"), [("128", (128, 128)), ("32-192", (32, 192))])
def test_lengths_are_read(text: str, lengths: tuple[int, int]) -> None:
    assert Lengths.parse(text) == Lengths(*lengths)
    assert str(Lengths.parse(text)) == text


@pytest.mark.parametrize("text", ["", "x", "0", "64-32", "1-", "-5", "1.5"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(BadLengths):
        Lengths.parse(text)
