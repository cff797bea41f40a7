"""Hundreds of small worlds: whatever is drawn, every invariant holds at every step."""

from collections import Counter

import pytest

from kvota.sim.random_world import run_random_world

NUM_WORLDS = 240
PER_TEST = 20


@pytest.mark.parametrize("first", range(0, NUM_WORLDS, PER_TEST))
def test_every_seeded_world_keeps_every_invariant(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        result = run_random_world(seed)
        assert sum(result.outcomes.values()) == len(result.records)
        assert result.num_checks >= result.num_steps


def test_the_worlds_are_not_all_peaceful() -> None:
    results = [run_random_world(seed) for seed in range(60)]
    outcomes = Counter(outcome for result in results for outcome in result.outcomes)
    assert {"completed", "client_closed", "engine_error", "queue_timeout"} <= set(outcomes)
    assert {"request_timeout"} <= set(outcomes)
    assert sum(result.num_faults for result in results) > 100
    assert {"refused"} <= set(outcomes)
    assert any(record.pauses for result in results for record in result.records)
    assert any(record.preemptions for result in results for record in result.records)
    assert any(record.cached_tokens for result in results for record in result.records)
