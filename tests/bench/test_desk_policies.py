from bench.desk_policies import CONVERSATION, POLICIES, eta_error, jobs, retry_error_s, traffic
from kvota.core.errors import Outcome, Refusal
from kvota.sim.arrival import Arrival, Scaling
from kvota.sim.records import RequestRecord, WorldResult


def record(at_s: float, **fields: object) -> RequestRecord:
    arrival = Arrival(at_s=at_s, prompt_tokens=1, output_tokens=1, max_tokens=1)
    one = RequestRecord(0, arrival, outcome=Outcome.COMPLETED)
    for name, value in fields.items():
        setattr(one, name, value)
    return one


def result(*records: RequestRecord) -> WorldResult:
    return WorldResult(
        records=records,
        scaling=Scaling(),
        seed=1,
        span_s=1.0,
        ended_s=1.0,
        num_steps=0,
        busy_s=0.0,
        kv_used_mean=0.0,
        recomputed_tokens=0,
        num_checks=0,
        num_faults=0,
    )


def test_the_eta_error_is_relative_to_the_true_wait() -> None:
    told_long = record(10.0, eta_s=6.0, granted_at_s=14.0)
    told_short = record(10.0, eta_s=1.0, granted_at_s=14.0)
    untold = record(10.0, granted_at_s=14.0)
    assert eta_error(result(told_long, untold)) == 0.5
    assert eta_error(result(told_short)) == 0.75
    assert eta_error(result(untold)) is None


def test_retry_after_is_judged_by_the_next_newcomer_that_was_let_in() -> None:
    refused = record(10.0, refusal=Refusal.QUEUE_FULL, retry_after_s=5.0)
    also = record(11.0, refusal=Refusal.QUEUE_FULL, retry_after_s=5.0)
    assert retry_error_s(result(record(9.0), refused, also, record(13.0))) == (2.0 + 3.0) / 2
    assert retry_error_s(result(record(9.0), refused)) is None


def test_what_is_judged_is_not_what_was_learned_from() -> None:
    known, judged = traffic("conversation")
    assert len(known) == 3_000
    assert len(judged) == 19_366 - int(19_366 * 0.6)
    assert judged[0].at_s == 0.0


def test_every_policy_meets_every_load_and_dear_recomputation_only_the_highest() -> None:
    capacities = {(kv, cost): 1.0 for kv in CONVERSATION.kv_tokens for cost in ("cheap", "dear")}
    all_jobs = list(jobs(CONVERSATION, 100, capacities, (0.8, 1.5)))
    assert len(all_jobs) == len(set(all_jobs)) == 3 * 3 * len(POLICIES)
    assert {job.load for job in all_jobs if job.cost == "dear"} == {1.5}
