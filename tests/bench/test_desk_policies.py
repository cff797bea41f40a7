import pytest

from bench.desk_policies import (
    CONVERSATION,
    COSTS,
    HISTORY,
    POLICIES,
    STRETCHES,
    WORKLOADS,
    Workload,
    jobs,
    stretch,
    targets_of,
    traffic,
)
from kvota.sim.records import Targets


def test_what_is_judged_is_not_what_was_learned_from() -> None:
    known, judged = traffic("conversation")
    assert len(known) == int(19_366 * 0.6)
    assert len(known) + len(judged) == 19_366
    assert judged[0].at_s == 0.0


def test_each_seed_judges_another_stretch_and_has_learned_from_what_came_before_it() -> None:
    _, judged = traffic("conversation")
    known, first = stretch("conversation", 100, 1)
    then_known, second = stretch("conversation", 100, 2)
    lengths = [one.output_tokens for one in judged[:200]]
    assert [one.output_tokens for one in first + second] == lengths
    assert [one.output_tokens for one in then_known[-100:]] == lengths[:100]
    assert len(known) == len(then_known) == HISTORY
    assert first[0].at_s == second[0].at_s == 0.0


def test_more_requests_than_were_recorded_are_refused() -> None:
    with pytest.raises(ValueError, match="judged requests"):
        stretch("conversation", 5_000, 2)


def test_every_policy_meets_every_load_and_cost_and_ample_memory_only_the_highest_load() -> None:
    capacities = {(kv, cost): 1.0 for kv in CONVERSATION.kv_tokens for cost in COSTS}
    all_jobs = list(jobs(CONVERSATION, 100, capacities, (0.8, 1.5), range(1, 4)))
    tight, middle, ample = CONVERSATION.kv_tokens
    settings = {(job.kv_tokens, job.cost, job.load) for job in all_jobs}
    assert settings == {
        *((kv, cost, load) for kv in (tight, middle) for cost in COSTS for load in (0.8, 1.5)),
        *((ample, cost, 1.5) for cost in COSTS),
    }
    assert len(all_jobs) == len(set(all_jobs)) == len(settings) * len(POLICIES)
    assert all(job.stretches == ((1, 2, 3) if job.load == 1.5 else (1,)) for job in all_jobs)


@pytest.mark.parametrize("workload", WORKLOADS.values())
def test_as_many_stretches_were_recorded_as_judged_rows_take(workload: Workload) -> None:
    known, chosen = stretch(workload.name, workload.num_requests, STRETCHES)
    assert (len(known), len(chosen)) == (HISTORY, workload.num_requests)


@pytest.mark.parametrize("workload", WORKLOADS.values())
def test_dividing_lengths_leaves_blocks_and_token_times_what_they_are(workload: Workload) -> None:
    assert 16 % workload.length == 0
    ttft_s, tpot_s = workload.targets.ttft_s, workload.targets.tpot_s
    assert targets_of(workload) == Targets(ttft_s=ttft_s, tpot_s=tpot_s * workload.length)
    assert all(
        twice == 2 * once
        for once, twice in zip(workload.kv_tokens, workload.kv_tokens[1:], strict=False)
    )
