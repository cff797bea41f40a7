from dataclasses import replace

from bench.desk_policies import Job
from bench.desk_rows import Spread, eta_errors, retry_errors_s, row_of, summed_up
from kvota.core.errors import Outcome, Refusal
from kvota.sim.records import RequestRecord, WorldResult
from kvota.traffic.arrival import Arrival, Scaling

JOB = Job(
    workload="conversation", policy="reserve", kv_tokens=1, load=1.0, cost="cheap",
    num_requests=1, capacity_rps=1.0, returns_max=3,
)  # fmt: skip


def record(at_s: float, **fields: object) -> RequestRecord:
    arrival = Arrival(at_s=at_s, prompt_tokens=1, output_tokens=1, max_tokens=1)
    one = RequestRecord(0, arrival, outcome=Outcome.COMPLETED)
    for name, value in fields.items():
        setattr(one, name, value)
    return one


def refused(at_s: float, **fields: object) -> RequestRecord:
    return record(
        at_s, outcome=Outcome.REFUSED, refusal=Refusal.QUEUE_FULL, retry_after_s=5.0, **fields
    )


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


def test_a_spread_is_the_median_and_the_90th_percentile() -> None:
    assert Spread.of(range(100)) == Spread(50, 90)
    assert Spread.of([1.25, 1.25]).text(".1f") == "1.2 / 1.2"
    assert Spread.of([]).text(".1f") == "–"


def test_the_eta_error_is_relative_to_the_true_wait() -> None:
    told_long = record(10.0, eta_s=6.0, granted_at_s=14.0)
    told_short = record(10.0, eta_s=1.0, granted_at_s=14.0)
    untold = record(10.0, granted_at_s=14.0)
    assert eta_errors(result(told_long, untold)) == [0.5]
    assert eta_errors(result(told_short)) == [0.75]
    assert eta_errors(result(untold)) == []


def test_retry_after_is_judged_by_the_next_newcomer_that_was_let_in() -> None:
    found = retry_errors_s(result(record(9.0), refused(10.0), refused(11.0), record(13.0)))
    assert found == [2.0, 3.0]
    assert retry_errors_s(result(record(9.0), refused(10.0))) == []


def test_a_row_is_the_mean_of_its_stretches_and_has_the_errors_of_all() -> None:
    good = record(0.0, eta_s=1.0, granted_at_s=4.0, queued_s=4.0, token_at_s=[5.0])
    bad = record(0.0, eta_s=3.0, granted_at_s=4.0, outcome=Outcome.QUEUE_TIMEOUT)
    found = row_of(JOB, [result(good, good, bad), result(good)])
    assert (found.goodput_rps, found.completed_rps) == (1.5, 1.5)
    assert found.eta_error == Spread(0.75, 0.75)


def test_those_who_come_back_are_counted_by_how_often_they_had_been_refused() -> None:
    found = summed_up(
        JOB,
        result(
            record(1.0),
            refused(2.0),
            refused(3.0),
            record(7.0, attempt=1),
            refused(8.0, attempt=1),
            record(13.0, attempt=2, outcome=Outcome.QUEUE_TIMEOUT),
        ),
    )
    assert (found.num_clients, found.num_refused) == (3, 2)
    assert found.let_in == [0.5, 1.0]
    assert found.num_completed == 2


def test_without_anybody_refused_nobody_has_come_back() -> None:
    found = summed_up(replace(JOB, returns_max=1), result(record(1.0)))
    assert (found.num_refused, found.let_in) == (0, [])
