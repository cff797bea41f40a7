"""The team mix is what the workload's description says, whatever the rate."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.desk_live_mix import Ask, fresh_prompts, short_ones, team_mix


@given(rate_rps=st.floats(0.5, 30.0), duration_s=st.floats(2.0, 60.0), seed=st.integers(0, 99))
def test_every_request_has_the_lengths_of_its_kind(
    rate_rps: float, duration_s: float, seed: int
) -> None:
    asks = team_mix(rate_rps, duration_s, seed)
    assert len(asks) == round(rate_rps * duration_s)
    assert sum(one.is_long for one in asks) == round(0.08 * len(asks))
    assert [one.due_s for one in asks] == sorted(one.due_s for one in asks)
    for one in asks:
        assert 0 <= one.due_s <= duration_s
        prompts, outputs = ((1500, 3000), (64, 128)) if one.is_long else ((32, 192), (16, 64))
        assert prompts[0] <= one.prompt_tokens <= prompts[1]
        assert outputs[0] <= one.output_tokens <= outputs[1]


def test_all_lengths_of_a_kind_occur() -> None:
    asks = team_mix(500.0, 60.0, seed=1)
    long = {one.prompt_tokens for one in asks if one.is_long}
    short = {one.prompt_tokens for one in asks if not one.is_long}
    assert short == set(range(32, 193))
    assert min(long) < 1_510
    assert max(long) > 2_990
    assert {one.output_tokens for one in asks if one.is_long} == set(range(64, 129))


def test_gaps_are_those_of_a_poisson_process() -> None:
    """Exponential: their standard deviation is their mean, and 1 − 1/e of them are below it."""
    asks = team_mix(10.0, 2_000.0, seed=3)
    gaps = [b.due_s - a.due_s for a, b in pairwise(asks)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert abs(mean - 0.1) < 0.002
    assert abs(deviation / mean - 1) < 0.05
    assert abs(sum(gap < mean for gap in gaps) / len(gaps) - 0.632) < 0.02


def test_long_ones_come_at_no_special_time() -> None:
    asks = team_mix(50.0, 400.0, seed=2)
    first_half = sum(one.is_long and one.due_s < 200.0 for one in asks)
    num_long = sum(one.is_long for one in asks)
    assert 0.45 < first_half / num_long < 0.55


def test_a_seed_gives_the_same_requests_and_another_seed_others() -> None:
    assert team_mix(3.0, 30.0, seed=1) == team_mix(3.0, 30.0, seed=1)
    assert team_mix(3.0, 30.0, seed=1) != team_mix(3.0, 30.0, seed=2)
    assert not any(one.is_long for one in short_ones(3.0, 30.0, seed=1))
    assert len(short_ones(3.0, 30.0, seed=1)) == 90


def test_prompts_have_their_exact_lengths_and_share_no_beginning() -> None:
    asks = [Ask(0.0, 32 + number, 1) for number in range(200)]
    prompts = fresh_prompts(asks, 49_152, "a") + fresh_prompts(asks, 49_152, "b")
    assert [len(one) for one in prompts] == 2 * [one.prompt_tokens for one in asks]
    assert len({tuple(one[:8]) for one in prompts}) == 400
    assert all(300 <= token < 49_152 for one in prompts for token in one)
