"""What a run of `desk_policies` says: one row of a table.

ETA error: |told − true wait| / true wait of those who were put in line, if they waited 0.5 s.
Retry-After error: seconds between what a refused one was told and the first moment after its
refusal at which somebody who knocked was let in.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from bench.desk_policies import WORKLOADS, Job, run, targets_of
from kvota.core.errors import Outcome
from kvota.sim.records import WorldResult, quantile

RETURNS_MAX = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 90th percentile; of nothing, both are None."""

    median: float | None
    p90: float | None

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        return Spread(quantile(values, 0.5), quantile(values, 0.9)) if values else _NOTHING

    def text(self, form: str) -> str:
        if self.median is None or self.p90 is None:
            return "–"
        return f"{self.median:{form}} / {self.p90:{form}}"


_NOTHING = Spread(None, None)


def eta_errors(result: WorldResult) -> list[float]:
    """Of the wait that was told on joining the line, relative to the true one."""
    waits = [
        (error, record.granted_at_s - record.arrival.at_s)
        for record in result.records
        if record.granted_at_s is not None and (error := record.eta_error_s) is not None
    ]
    return [abs(error) / true_s for error, true_s in waits if true_s > 0.5]


def retry_errors_s(result: WorldResult) -> list[float]:
    """Of Retry-After, against the first later moment at which somebody was let in."""
    let_in = [one.arrival.at_s for one in result.records if one.refusal is None]
    errors = []
    for record in result.records:
        if record.retry_after_s is not None:
            place = bisect_right(let_in, record.arrival.at_s)
            if place < len(let_in):
                errors.append(abs(record.retry_after_s - (let_in[place] - record.arrival.at_s)))
    return errors


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one setting: means over its stretches of traffic, errors of all of them."""

    job: Job
    goodput_rps: float
    completed_rps: float
    preempted: float
    recomputed_per_request: float
    kv_used: float
    eta_error: Spread
    retry_error_s: Spread

    HEADER = (
        "| admission | goodput/s | completed/s | preempted | recomputed tokens per request "
        "| KV used | ETA error, p50 / p90 | Retry-After error, s, p50 / p90 |\n"
        "|---|---|---|---|---|---|---|---|"
    )

    def line(self) -> str:
        return (
            f"| {self.job.policy} | {self.goodput_rps:.2f} | {self.completed_rps:.2f} "
            f"| {self.preempted:.2%} | {self.recomputed_per_request:.0f} | {self.kv_used:.0%} "
            f"| {self.eta_error.text('.0%')} | {self.retry_error_s.text('.1f')} |"
        )


def row(job: Job) -> Row:
    return row_of(job, [run(job, seed) for seed in job.stretches])


def row_of(job: Job, results: Sequence[WorldResult]) -> Row:
    workload = WORKLOADS[job.workload]
    is_good = targets_of(workload).is_met
    num_ran = sum(record.queued_s is not None for one in results for record in one.records)
    recomputed = sum(one.recomputed_tokens for one in results) * workload.length
    return Row(
        job=job,
        goodput_rps=mean(one.goodput_rps(is_good) for one in results),
        completed_rps=mean(one.completed_rps for one in results),
        preempted=mean(one.preempted_share for one in results),
        recomputed_per_request=recomputed / max(num_ran, 1),
        kv_used=mean(one.kv_used_mean for one in results),
        eta_error=Spread.of([error for one in results for error in eta_errors(one)]),
        retry_error_s=Spread.of([error for one in results for error in retry_errors_s(one)]),
    )


@dataclass(frozen=True, slots=True)
class Returns:
    """Clients who do what Retry-After says, up to `RETURNS_MAX` times."""

    job: Job
    num_clients: int
    num_refused: int  # the first time
    let_in: Sequence[float]  # share of those who came back for the 1st, 2nd … time
    num_completed: int
    retry_error_s: Spread

    HEADER = (
        "| setting | clients | refused at first | of those who came back, let in: 1st, 2nd, 3rd "
        "time | completed | Retry-After error, s, p50 / p90 |\n|---|---|---|---|---|---|"
    )

    def line(self) -> str:
        job = self.job
        shares = ", ".join(format(share, ".0%") for share in self.let_in)
        return (
            f"| {job.workload}, {job.kv_tokens:,} tokens, {job.cost} | {self.num_clients} "
            f"| {self.num_refused / self.num_clients:.0%} | {shares} "
            f"| {self.num_completed / self.num_clients:.0%} "
            f"| {self.retry_error_s.text('.1f')} |"
        )


def returns(job: Job) -> Returns:
    return summed_up(job, run(job, job.stretches[0]))


def summed_up(job: Job, result: WorldResult) -> Returns:
    tries = [
        [record for record in result.records if record.attempt == attempt]
        for attempt in range(job.returns_max + 1)
    ]
    let_in = [sum(one.refusal is None for one in some) / len(some) for some in tries[1:] if some]
    return Returns(
        job=job,
        num_clients=len(tries[0]),
        num_refused=sum(one.refusal is not None for one in tries[0]),
        let_in=let_in,
        num_completed=result.count(Outcome.COMPLETED),
        retry_error_s=Spread.of(retry_errors_s(result)),
    )
