"""Speeds that were put in must come out."""

import pytest

from kvota.desk.pace import Pace
from kvota.desk.ticket import Lane


def test_nothing_is_known_at_first() -> None:
    pace = Pace()
    assert pace.step_s is None
    assert pace.honesty == 1.0
    assert pace.first_token_s(10_000) == 0.0


def test_the_pace_follows_the_engine_when_it_slows_down() -> None:
    pace = Pace()
    for _ in range(1_000):
        pace.decoded(2, 0.1)
    assert pace.step_s == pytest.approx(0.05)
    for _ in range(2_000):
        pace.decoded(1, 0.2)
    assert pace.step_s == pytest.approx(0.2, rel=0.01)


def test_reading_a_prompt_costs_a_constant_and_so_much_per_token() -> None:
    pace = Pace()
    for tokens in (100, 2_000, 300, 1_000) * 5:
        pace.read_prompt(tokens, 0.3 + 0.002 * tokens)
    assert pace.first_token_s(5_000) == pytest.approx(10.3)


def test_prompts_of_one_length_tell_nothing_about_the_slope() -> None:
    pace = Pace()
    for seconds in (0.4, 0.6):
        pace.read_prompt(500, seconds)
    assert pace.first_token_s(5_000) == pytest.approx(0.5, rel=0.05)


def test_longer_prompts_are_never_predicted_to_be_faster() -> None:
    pace = Pace()
    pace.read_prompt(100, 3.0)
    pace.read_prompt(2_000, 1.0)
    assert pace.first_token_s(2_000) >= pace.first_token_s(100) >= 0


def test_waits_that_were_too_rosy_are_corrected_within_bounds() -> None:
    pace = Pace()
    for _ in range(10):
        pace.waited(2.0, 3.0)
    assert pace.honesty == pytest.approx(1.5)
    for _ in range(1_000):
        pace.waited(1.0, 1_000.0)
    assert pace.honesty == 2.0


def test_a_prompt_that_was_given_up_counts_for_as_long_as_was_expected_of_it() -> None:
    pace = Pace()
    for tokens in (100, 2_000, 300, 1_000) * 5:
        pace.read_prompt(tokens, 0.3 + 0.002 * tokens)
    for tokens in (200, 1_500) * 10:
        pace.read_prompt(tokens, 0.1, is_cut=True)
    assert pace.first_token_s(1_000) == pytest.approx(2.3)
    for _ in range(100):
        pace.read_prompt(1_000, 9.0, is_cut=True)
    assert pace.first_token_s(1_000) == pytest.approx(9.0, rel=0.1)


def test_a_line_is_as_fast_as_tickets_leave_it_while_somebody_waits() -> None:
    pace = Pace()
    assert pace.line_s(Lane.SHORT, 3) is None
    pace.began_to_wait(Lane.SHORT, 100.0)
    for left_s in (102.0, 104.0, 106.0):
        pace.left_line(Lane.SHORT, left_s)
    pace.began_to_wait(Lane.SHORT, 500.0)  # nobody waited for a long time
    pace.left_line(Lane.SHORT, 502.0)
    assert pace.line_s(Lane.SHORT, 3) == pytest.approx(8.0)
    assert pace.line_s(Lane.LONG, 3) is None


def test_places_become_free_as_fast_as_they_did_whatever_the_clock_shows() -> None:
    pace = Pace()
    pace.freed_place(1e6)
    assert pace.places_s(5) is None
    pace.freed_place(1e6 + 3.0)
    assert pace.places_s(5) == pytest.approx(15.0)


def test_time_in_which_nobody_holds_anything_does_not_count_for_places() -> None:
    pace = Pace()
    for begun_s in (0.0, 10_000.0, 10_002.0):
        pace.busy(begun_s)
        pace.freed_place(begun_s)
        pace.idle(begun_s + 2.0)
    assert pace.places_s(5) == pytest.approx(10.0)
