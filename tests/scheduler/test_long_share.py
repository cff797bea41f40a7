"""The share of long prompts: what short ones take from it, they get back."""

from random import Random

import pytest

from kvota.scheduler.long_share import DOUBLES_S, OWED_MAX, LongShare

SHARE = 0.1


def seen(*, others_s: float | None, now: float) -> LongShare:
    """A long prompt is there; others were there last at `others_s`."""
    share = LongShare(SHARE)
    if others_s is not None:
        share.see(has_long=True, has_others=True, now=others_s)
    share.see(has_long=True, has_others=False, now=now)
    return share


def test_alone_from_the_first_it_has_everything() -> None:
    assert seen(others_s=None, now=5.0).of_step(5.0, reads_short=False) == 1.0


@pytest.mark.parametrize("num_doubled", [0, 1, 2, 3])
def test_after_others_it_doubles_with_time(num_doubled: int) -> None:
    now = 7.0 + num_doubled * DOUBLES_S
    found = seen(others_s=7.0, now=now).of_step(now, reads_short=False)
    assert found == pytest.approx(SHARE * 2**num_doubled)


def test_in_the_end_it_has_everything_again() -> None:
    assert seen(others_s=7.0, now=1e9).of_step(1e9, reads_short=False) == 1.0


def test_what_it_was_left_out_of_is_paid_back_where_no_short_prompt_is_read() -> None:
    share = seen(others_s=7.0, now=7.0)
    share.defer()
    assert share.of_step(7.0, reads_short=True) == pytest.approx(SHARE)
    assert share.of_step(7.0, reads_short=False) == pytest.approx(2 * SHARE)
    assert share.of_step(7.0, reads_short=False) == pytest.approx(SHARE)


def parts_owed_at_most(share: LongShare) -> int:
    num_parts = 0
    while share.may_defer:
        share.defer()
        num_parts += 1
    return num_parts


@pytest.mark.parametrize(("part", "num_parts"), [(1.0, 4), (0.5, 8), (0.18, 23), (0.1, 40)])
def test_four_whole_steps_are_owed_at_most(part: float, num_parts: int) -> None:
    assert OWED_MAX == 4
    assert parts_owed_at_most(LongShare(part)) == num_parts


def test_debts_end_with_the_long_prompts() -> None:
    share = seen(others_s=7.0, now=7.0)
    assert parts_owed_at_most(share) > 0
    share.see(has_long=False, has_others=True, now=7.0)
    assert share.may_defer
    assert share.of_step(7.0, reads_short=False) == pytest.approx(SHARE)


def test_whatever_comes_it_loses_no_more_than_what_may_be_owed() -> None:
    """Against a share that is never deferred, over any order of steps."""
    rng, share, given, plain = Random(4), seen(others_s=7.0, now=7.0), 0.0, 0.0
    for _ in range(5_000):
        reads_short = rng.random() < 0.6
        if reads_short and share.may_defer:
            share.defer()
        else:
            given += share.of_step(7.0, reads_short=reads_short)
        plain += SHARE
        assert plain - OWED_MAX - 1e-6 <= given <= plain + 1e-6
