"""Full batch or the longest wait, whichever comes first; a bounded line; nothing lost."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import Refusal
from kvota.desk.batching import BUCKET_EDGES, BatchLine, BatchSettings, Text, TextBatch

SETTINGS = BatchSettings(
    max_batch_tokens=64, max_batch_texts=4, max_wait_s=0.5, max_waiting_tokens=200
)
FOREVER = 1e9


def text(key: int, num_tokens: int = 8, at: float = 0.0, deadline_s: float = FOREVER) -> Text:
    return Text(key, num_tokens, at, deadline_s)


def keys(batch: TextBatch | None) -> list[int]:
    return [] if batch is None else [one.key for one in batch.texts]


def test_a_lone_text_waits_for_company_and_no_longer() -> None:
    line = BatchLine(SETTINGS)
    assert line.next_due_s() is None
    assert line.arrive([text(1, at=10.0)], 10.0) is None
    assert line.due(10.4) is None
    assert line.next_due_s() == 10.5
    assert keys(line.due(10.5)) == [1]
    assert line.due(20.0) is None


def test_a_full_batch_goes_at_once() -> None:
    line = BatchLine(SETTINGS)
    line.arrive([text(1), text(2), text(3)], 0.0)
    assert line.due(0.0) is None
    line.arrive([text(4), text(5)], 0.0)
    assert keys(line.due(0.0)) == [1, 2, 3, 4]
    assert line.due(0.0) is None


def test_a_batch_is_full_when_its_padded_tokens_are() -> None:
    line = BatchLine(SETTINGS)
    line.arrive([text(1, 30), text(2, 25)], 0.0)  # both in the bucket of 32; 64 tokens a batch
    batch = line.due(0.0)
    assert batch is not None
    assert (keys(batch), batch.num_computed) == ([1, 2], 60)


def test_a_text_longer_than_a_batch_goes_alone() -> None:
    line = BatchLine(SETTINGS)
    line.arrive([text(1, 180)], 0.0)
    assert keys(line.due(0.0)) == [1]


def test_texts_of_unlike_length_do_not_share_a_batch() -> None:
    line = BatchLine(SETTINGS)
    line.arrive([text(1, 4), text(2, 40), text(3, 5)], 0.0)
    assert keys(line.due(1.0)) == [1, 3]
    assert keys(line.due(1.0)) == [2]


def test_the_longest_waiting_goes_first() -> None:
    line = BatchLine(SETTINGS)
    line.arrive([text(1, 40, at=1.0)], 1.0)
    line.arrive([text(2, 8, at=0.0)], 1.0)
    assert [keys(line.due(5.0)), keys(line.due(5.0))] == [[2], [1]]


def test_a_row_is_padded_by_a_third_at_most() -> None:
    assert all(after <= 1.5 * before for before, after in pairwise(BUCKET_EDGES))


def test_a_full_line_refuses_the_whole_request() -> None:
    line = BatchLine(SETTINGS)
    line.arrive([text(1, 150)], 0.0)
    refused = line.arrive([text(2, 20), text(3, 40)], 0.0)
    assert refused is not None
    assert refused.reason is Refusal.QUEUE_FULL
    assert "150 tokens are in line and this request has 60; the limit is 200" in refused.message
    assert (line.num_waiting, line.waiting_tokens) == (1, 150)


def test_a_request_longer_than_the_line_may_come_in_alone() -> None:
    line = BatchLine(SETTINGS)
    assert line.arrive([text(1, 250)], 0.0) is None
    assert line.arrive([text(2, 1)], 0.0) is not None


def full_batch() -> TextBatch:
    return TextBatch([text(key, 10) for key in range(4)], 40)


def test_what_comes_back_later_is_told_by_the_measured_speed() -> None:
    line = BatchLine(SETTINGS)
    line.computed(full_batch(), seconds=4.0)  # a tenth of a second a token
    line.arrive([text(1, 180)], 0.0)
    assert line.wait_s() == pytest.approx(18.0)
    refused = line.arrive([text(2, 60)], 0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(18.0)


def test_who_cannot_be_served_in_time_is_told_at_the_door() -> None:
    line = BatchLine(SETTINGS)
    line.computed(full_batch(), seconds=4.0)
    line.arrive([text(1, 100)], 0.0)
    refused = line.arrive([text(2, 8, deadline_s=5.0)], 0.0)
    assert refused is not None
    assert refused.reason is Refusal.DEADLINE_UNREACHABLE
    assert line.arrive([text(3, 8, deadline_s=11.0)], 0.0) is None


def test_who_waited_too_long_leaves_the_line() -> None:
    line = BatchLine(SETTINGS)
    early, late = text(1, deadline_s=2.0), text(2, deadline_s=9.0)
    line.arrive([early, late], 0.0)
    assert line.expire(2.0) == [early]
    assert keys(line.due(3.0)) == [2]


def test_speed_follows_the_newest_batches() -> None:
    line = BatchLine(SETTINGS)
    for _ in range(50):
        line.computed(full_batch(), seconds=4.0)
    for _ in range(50):
        line.computed(full_batch(), seconds=0.4)
    line.arrive([text(1, 100)], 0.0)
    assert line.wait_s() == pytest.approx(1.0, rel=0.01)


def test_a_batch_of_few_tells_how_fast_a_line_goes_only_where_it_was_faster() -> None:
    """Whatever its size a pass has a fixed cost, and in a line batches are full."""
    line, few = BatchLine(SETTINGS), TextBatch([text(9, 2)], 2)
    line.computed(few, seconds=4.0)
    line.arrive([text(1, 100)], 0.0)
    assert line.wait_s() is None
    assert line.arrive([text(2, 8, deadline_s=5.0)], 0.0) is None
    line.computed(full_batch(), seconds=4.0)
    line.computed(few, seconds=4.0)
    assert line.wait_s() == pytest.approx(10.8)
    line.computed(few, seconds=0.1)
    assert line.wait_s() == pytest.approx(5.4)


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_text_leaves_exactly_once(rng: Random) -> None:
    line, now, left, waiting = BatchLine(SETTINGS), 0.0, [], {}
    for key in range(60):
        now += rng.choice([0.0, 0.1, 0.7])
        one = text(key, rng.randint(1, 80), now, now + rng.choice([0.3, 2.0, FOREVER]))
        if line.arrive([one], now) is None:
            waiting[key] = one
        else:
            left.append(key)
        if waiting and rng.random() < 0.2:
            gone = waiting.pop(rng.choice(sorted(waiting)))
            line.cancel(gone)
            left.append(gone.key)
        for expired in line.expire(now):
            assert expired.deadline_s <= now
            left.append(waiting.pop(expired.key).key)
        batch = line.due(now) if rng.random() < 0.6 else None
        if batch is not None:
            assert len(batch.texts) == 1 or batch.num_computed <= SETTINGS.max_batch_tokens
            assert len(batch.texts) <= SETTINGS.max_batch_texts
            left += [waiting.pop(done).key for done in keys(batch)]
        line.check()
        due_s = line.next_due_s()
        assert (due_s is None) == (not waiting)
        assert due_s is None or due_s == pytest.approx(
            min(one.arrived_s for one in waiting.values()) + SETTINGS.max_wait_s
        )
    while (batch := line.due(now + 1.0)) is not None:
        left += [waiting.pop(done).key for done in keys(batch)]
    assert not waiting
    assert sorted(left) == list(range(60))
