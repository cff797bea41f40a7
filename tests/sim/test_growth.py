from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.sim.growth import NEAR_S, grown
from kvota.sim.workloads import flood
from kvota.traffic.arrival import Arrival
from kvota.traffic.shape import shape_of


def poisson(rate_rps: float = 2.0, duration_s: float = 100.0) -> list[Arrival]:
    stream = flood(
        Random(4), tenant="a", rate_rps=rate_rps, duration_s=duration_s, prompt=(10, 99),
        output=(5, 50), max_tokens=50,
    )  # fmt: skip
    return list(stream)


def conversation(session: str, *at_s: float) -> list[Arrival]:
    return [
        Arrival(at_s=at, prompt_tokens=60, output_tokens=2, max_tokens=2, session=session,
                prefix=(0, int(session), int(session) + 1), prefix_block=16)
        for at in at_s
    ]  # fmt: skip


def test_once_is_the_traffic_itself() -> None:
    assert grown(poisson(), 1.0, seed=1) == poisson()


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 6.0))
def test_so_many_times_the_requests_in_the_same_span(factor: float) -> None:
    before = poisson()
    after = grown(before, factor, seed=2)
    assert len(after) == pytest.approx(factor * len(before), abs=4 * len(before) ** 0.5)
    assert all(one.at_s <= other.at_s for one, other in pairwise(after))
    assert all(0 <= one.at_s <= before[-1].at_s for one in after)


def test_minutes_keep_their_shape_and_moments_are_mixed() -> None:
    """A minute of silence stays one; what came at one moment comes within a minute."""
    busy = [one for one in poisson(duration_s=600) if not 240 <= one.at_s < 420]
    after = grown(busy, 20.0, seed=3)
    assert not [one for one in after if 240 + NEAR_S < one.at_s < 420 - NEAR_S]
    burst = [replace(one, at_s=50.0) if 40 < one.at_s < 60 else one for one in poisson()]
    spread = grown(burst, 10.0, seed=3)
    assert shape_of(spread).bursts[0].peak < shape_of(burst).bursts[0].peak / 2


def test_nothing_piles_up_at_the_ends() -> None:
    counts = [0] * 10
    for one in grown(poisson(), 40.0, seed=5):
        counts[min(int(one.at_s // 10), 9)] += 1
    assert max(counts) < 1.6 * min(counts)


def test_other_users_have_other_texts_and_the_same_system_prompt() -> None:
    before = [one for at in range(1, 9) for one in conversation(str(10 * at), at, at + 2.0)]
    after = grown(before, 3.0, seed=1)
    assert len(after) == 3 * len(before)
    assert all(one.prefix[0] == 0 for one in after)
    own = [one.prefix[1:] for one in after]
    assert len(set(own)) == 24
    assert all(own.count(prefix) == 2 for prefix in own)


def test_conversations_come_whole_or_not_at_all() -> None:
    before = [one for at in range(1, 41) for one in conversation(str(10 * at), at, at + 2.0)]
    after = grown(before, 0.5, seed=1)
    sessions = [one.session for one in after]
    assert 0 < len(after) < len(before)
    assert all(sessions.count(one) == 2 for one in sessions)
