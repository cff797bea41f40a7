"""The rows of the benchmark that need no server run, and say what they should."""

import statistics

import pytest

from bench.bookkeeping import bookkeeping
from bench.speed import table
from bench.throughput import Rates, Workload
from bench.waste import lengths, waste
from bench.workload import prompts


def test_prompts_are_fixed_and_never_the_same_twice() -> None:
    assert prompts(3, 64, 49_152, "a") == prompts(3, 64, 49_152, "a")
    first_blocks = {tuple(p[:32]) for seed in range(20) for p in prompts(8, 64, 49_152, seed)}
    assert len(first_blocks) == 160
    assert {len(p) for p in prompts(3, 64, 49_152, "a")} == {64}


def test_the_sample_of_lengths_is_like_the_whole_trace() -> None:
    """The trace's own means are 1,155 and 211 tokens (19,366 requests)."""
    pairs = lengths()
    assert len(pairs) == 1211
    assert statistics.mean(a for a, _ in pairs) == pytest.approx(1155, rel=0.05)
    assert statistics.mean(b for _, b in pairs) == pytest.approx(211, rel=0.05)


def test_waste_is_a_small_share_and_not_nothing() -> None:
    assert 0.005 < waste(limit=60).share < 0.06


def test_bookkeeping_counts_only_steps_in_which_all_decode() -> None:
    found = bookkeeping(4, 10, num_steps=5)
    assert (found.num_running, found.num_waiting) == (4, 10)
    assert found.step_us > 0


def test_a_ratio_is_taken_round_by_round() -> None:
    """A machine that halves its speed between rounds changes no ratio."""
    rates = Rates(
        4,
        kvota=[100, 50, 90],
        unguessed=[50, 25, 30],
        genai=[50, 25, 60],
        genai_over_http=[40, 20, 45],
        first_token_ms=9,
        per_token_ms=2,
    )
    assert rates.ratio == 2.0
    assert rates.ratio_unguessed == 1.0
    assert rates.ratio_over_http == 2.5


def test_the_table_has_a_value_under_every_heading() -> None:
    rates = Rates(4, [90], [30], [60], [45], first_token_ms=9, per_token_ms=2)
    head, rule, line = table([rates]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    assert line == "| 4 | 90 | 30 | 60 | 45 | 1.50 | 0.50 | 2.00 | 9 ms | 2 ms |"


def test_few_clients_send_many_requests_each_and_many_clients_at_least_three() -> None:
    workload = Workload(vocab_size=1000)
    found = {number: workload.num_requests(number) for number in (1, 4, 16, 32, 64, 256)}
    assert found == {1: 8, 4: 32, 16: 96, 32: 96, 64: 192, 256: 768}
    assert Workload(1000, requests_wanted=0).num_requests(4) == 12
