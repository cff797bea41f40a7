"""Open loop at rising rates: where the service stops to serve well, and what to plan with.

    alone ─▶ rates by `knee.next_rate` until it is content ─▶ the recommended rate, as often

The recommended rate has to hold like the knee did: where it does not, the machine was not the same
all the time, and nothing is recommended.

Each rate runs a warm-up that is not judged, then a window in which every request counts. A trial in
which the generator was the bottleneck is repeated, and refused with the whole sweep if it stays so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from kvota.tools.load.bench import Bench
from kvota.tools.load.capacity import Cap, cap_for
from kvota.tools.load.cut import Cut, kept_until_cut
from kvota.tools.load.knee import Knee, Search, Trial, has_held, knee_of, next_rate
from kvota.tools.load.measure import Measured, Slo, measure
from kvota.tools.load.percentiles import percentile
from kvota.tools.load.schedule import Shape

NUM_ALONE = 6  # requests before the sweep, of which the first is not counted
FIRST_SHARE = 0.5  # of the rate that one request after another would make
NUM_INVALID_MAX = 3  # trials at one rate in which the generator was late
WARM_SHARE = 0.25  # of the window, and at least WARM_ANSWERS lone answers
WARM_ANSWERS = 1.5
WINDOW_MAX = 6  # times as long as was asked for, where the rate is low
NUM_DUE_MIN = 10  # requests in a window, below which it says nothing
DRAIN_S = 5.0  # beyond what an answer within the SLO can take


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """`seconds`: the window of a rate, longer where fewer than `num_requests_min` would come."""

    shape: Shape
    slo: Slo
    seconds: float = 20.0
    num_requests_min: int = 60
    first_rps: float | None = None  # None: half of what one request after another makes
    rate_max_rps: float = float("inf")
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Alone:
    """A request on the idle server; medians, in seconds."""

    ttft_s: float
    tpot_s: float | None
    total_s: float

    def is_good(self, slo: Slo) -> bool:
        """The SLO can be met at all."""
        return self.ttft_s <= slo.ttft_s and (self.tpot_s or 0.0) <= slo.tpot_s


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of the mode. `complaint`: why it says nothing of the server."""

    slo: Slo
    alone: Alone
    trials: Sequence[Measured]
    knee: Knee | None
    safe: Sequence[Measured] = ()  # at the recommended rate
    cap: Cap | None = None
    complaint: str | None = None
    cut: Cut | None = None  # why there are no more trials

    @property
    def is_good(self) -> bool:
        return self.complaint is None and self.cut is None and self.knee is not None


@dataclass(slots=True)
class _Trials:
    """What has been run so far."""

    measured: list[Measured] = field(default_factory=list)

    @property
    def judged(self) -> list[Trial]:
        return [
            Trial(one.offered_rps, has_held(one.attainment, is_keeping_up=one.is_keeping_up))
            for one in self.measured
        ]


class GeneratorLate(Exception):
    """The generator could not do at this rate what it was to do. The message says why."""


async def sweep(bench: Bench, options: SweepOptions) -> Sweep:
    """Find the knee, recommend a rate, measure it, and derive the cap from that.

    Where it is cut, the trials until then are there, and nothing is recommended.
    """
    shape, slo = options.shape, options.slo
    bench.target.check_length(shape.prompt.most, shape.output.most)
    alone = await measure_alone(bench, shape)
    if not alone.is_good(slo):
        return Sweep(slo, alone, [], None)
    trials = _Trials()
    safe: list[Measured] = []
    try:
        with kept_until_cut() as end:
            await _search_and_prove(bench, options, alone, trials, safe)
    except GeneratorLate as late:
        return Sweep(slo, alone, trials.measured, knee_of(trials.judged), complaint=str(late))
    knee = knee_of(trials.judged)
    if end.cut is not None or knee is None:
        return Sweep(slo, alone, trials.measured, knee, safe, cut=end.cut)
    if not _is_safe(safe):
        return Sweep(slo, alone, trials.measured, knee, safe, complaint=_unsteady(knee, safe))
    cap = cap_for(
        safe_rps=knee.safe_rps,
        in_flight_p99=median(one.in_flight_p99 for one in safe),
        ttft_slo_s=slo.ttft_s,
        idle_ttft_s=alone.ttft_s,
    )
    return Sweep(slo, alone, trials.measured, knee, safe, cap)


async def _search_and_prove(
    bench: Bench, options: SweepOptions, alone: Alone, trials: _Trials, safe: list[Measured]
) -> None:
    """Adds the trials until the knee is known, and then those at the recommended rate."""
    search = _search(options, alone)
    while (rate := next_rate(search, trials.judged)) is not None:
        trials.measured.append(await trial(bench, options, alone, rate, len(trials.measured)))
    knee = knee_of(trials.judged)
    if knee is None:
        return
    for number in range(options.repeats):
        safe.append(await trial(bench, options, alone, knee.safe_rps, ("safe", number)))


def _is_safe(safe: Sequence[Measured]) -> bool:
    """The recommended rate holds, by the rule of the knee."""
    held = [has_held(one.attainment, is_keeping_up=one.is_keeping_up) for one in safe]
    return 2 * sum(held) > len(held)


def _unsteady(knee: Knee, safe: Sequence[Measured]) -> str:
    good = median(one.attainment for one in safe)
    return (
        f"{knee.rate_rps:.3g} requests/s held, but at {knee.safe_rps:.3g} only {good:.0%} were "
        "good. The machine was not the same all the time: keep others off it and run again."
    )


def _search(options: SweepOptions, alone: Alone) -> Search:
    """Rates that are too low to be judged within the longest window are not tried."""
    least = NUM_DUE_MIN / (WINDOW_MAX * options.seconds)
    most = max(least, options.rate_max_rps)
    first = options.first_rps or FIRST_SHARE / alone.total_s
    return Search(
        first_rps=min(max(first, least), most),
        rate_min_rps=least,
        rate_max_rps=most,
        repeats=options.repeats,
    )


async def measure_alone(bench: Bench, shape: Shape) -> Alone:
    """Medians of a few requests on the idle server. Raises NothingServed."""
    await bench.wait_idle()
    whole = await bench.alone("alone", shape, NUM_ALONE)
    seen = whole[1:] or whole
    first = sorted(one.first_token_s for one in seen if one.first_token_s is not None)
    per_token = sorted(one.per_token_s for one in seen if one.per_token_s is not None)
    return Alone(
        percentile(first, 0.5),
        percentile(per_token, 0.5) if per_token else None,
        percentile(sorted(one.ended_s for one in seen), 0.5),
    )


async def trial(
    bench: Bench, options: SweepOptions, alone: Alone, rate_rps: float, attempt: object
) -> Measured:
    """One rate, measured on a server that was idle. Raises GeneratorLate."""
    complaint = None
    for number in range(NUM_INVALID_MAX):
        measured = await _measured(bench, options, alone, rate_rps, (attempt, number))
        complaint = complaint_of(measured)
        if complaint is None:
            return measured
    raise GeneratorLate(f"at {rate_rps:.3g} requests/s {complaint}")


def complaint_of(measured: Measured) -> str | None:
    """Why it says nothing of the server; None when it does, or when nothing was served at all."""
    ttft = measured.ttft
    return None if ttft is None else measured.lag.complaint(ttft.p50, ttft.p99)


async def _measured(
    bench: Bench, options: SweepOptions, alone: Alone, rate_rps: float, attempt: object
) -> Measured:
    window_s = window_of(options, rate_rps)
    warm_s = max(WARM_SHARE * options.seconds, WARM_ANSWERS * alone.total_s)
    await bench.wait_idle()
    run = await bench.offer(
        f"{rate_rps:.3g} requests/s",
        options.shape,
        rate_rps,
        seconds=warm_s + window_s,
        drain_s=_longest_good_s(options) + DRAIN_S,
        attempt=attempt,
    )
    return measure(run.seen, rate_rps, (warm_s, warm_s + window_s), options.slo, run.lag)


def window_of(options: SweepOptions, rate_rps: float) -> float:
    """Long enough for the wanted number of requests, within reason."""
    wanted_s = options.num_requests_min / rate_rps
    return min(max(options.seconds, wanted_s), WINDOW_MAX * options.seconds)


def _longest_good_s(options: SweepOptions) -> float:
    """What an answer can take and still meet the SLO."""
    return options.slo.ttft_s + options.slo.tpot_s * options.shape.output.most
