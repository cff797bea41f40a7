"""When a backend's own numbers change what may be granted, and when they do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.gateway.upstream.correction import SLACK_BLOCKS, Correction, KvReading


def seen(correction: Correction, used: int | None, held: int, capacity: int | None = None) -> int:
    reading = KvReading(capacity_tokens=capacity, used_tokens=used)
    correction.see(reading, held_tokens=held, num_choices=0)
    return correction.capacity_tokens


def test_what_others_use_is_pinned_once_two_readings_agree() -> None:
    correction = Correction(1000)
    assert seen(correction, used=300, held=100) == 1000
    assert seen(correction, used=350, held=100) == 800
    assert seen(correction, used=350, held=100) == 750


def test_a_passing_difference_pins_nothing() -> None:
    correction = Correction(1000)
    for _ in range(5):  # a request that was just closed still holds its blocks there
        assert seen(correction, used=400, held=0) == 1000
        assert seen(correction, used=0, held=0) == 1000


def test_a_smaller_difference_is_believed_at_once() -> None:
    correction = Correction(1000)
    seen(correction, used=500, held=0)
    assert seen(correction, used=500, held=0) == 500
    assert seen(correction, used=100, held=0) == 900
    assert seen(correction, used=0, held=0) == 1000


def test_less_used_than_we_know_of_changes_nothing() -> None:
    correction = Correction(1000)
    for _ in range(3):
        assert seen(correction, used=10, held=600) == 1000


def test_blocks_and_tokens_on_their_way_are_no_difference() -> None:
    correction = Correction(1000, block_size=16)
    slack = SLACK_BLOCKS * 16 * 3
    for _ in range(3):
        correction.see(KvReading(used_tokens=100 + slack), held_tokens=100, num_choices=3)
    assert correction.capacity_tokens == 1000


def test_the_difference_is_that_of_the_last_word_with_its_sign() -> None:
    correction = Correction(1000)
    seen(correction, used=None, held=100)
    assert correction.difference_tokens is None
    for used, difference in ((300, 200), (40, -60)):
        seen(correction, used=used, held=100)
        assert correction.difference_tokens == difference
    seen(correction, used=None, held=500)
    assert correction.difference_tokens == -60, "it said nothing since"


def test_the_capacity_follows_what_the_backend_reports() -> None:
    correction = Correction(1000, share=0.9)
    assert seen(correction, used=None, held=0) == 1000
    assert seen(correction, used=None, held=0, capacity=500) == 450
    assert seen(correction, used=None, held=0, capacity=2000) == 1800
    assert seen(correction, used=None, held=0, capacity=0) == 1800, "it is still starting"


def test_what_the_operator_says_later_counts_like_what_was_said_at_first() -> None:
    correction = Correction(1000)
    correction.state(800, 0.5)
    assert seen(correction, used=None, held=0) == 800
    assert seen(correction, used=None, held=0, capacity=500) == 250
    correction.state(800, 0.9)
    assert correction.capacity_tokens == 450


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), max_size=20))
def test_the_capacity_stays_between_a_block_and_the_nominal(
    readings: list[tuple[int, int]],
) -> None:
    correction = Correction(2000, block_size=16)
    for used, held in readings:
        assert 16 <= seen(correction, used, held) <= 2000
        assert correction.pinned_tokens <= max(used - held, 0)


@pytest.mark.parametrize(("stated", "share"), [(0, 1.0), (10, 0.0), (10, 1.1)])
def test_nonsense_is_refused(stated: int, share: float) -> None:
    with pytest.raises(ValueError, match="no KV"):
        Correction(stated, share=share)
