"""Speeds that were put in must come out."""

import pytest

from kvota.desk.pace import Pace


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
