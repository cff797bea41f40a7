"""The overload plateau on the real server: the team mix at 0.5, 1, 2 and 5 times the knee.

The server is told, as an operator would, how long clients wait for a first token: 3 s, and 20 s
when the prompt is long. Each run is judged on the requests due in its middle, so that neither the
empty server at its beginning nor the quiet one at its end helps.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.desk_live_bench import Finding, LiveBench
from bench.desk_live_judge import Fate, Verdict, judge
from bench.desk_live_knee import NoKnee, find_knee
from bench.desk_live_load import offer
from bench.desk_live_mix import team_mix
from bench.server_process import RunningServer

FLAGS = (
    "--kv-memory", "1GiB", "--max-num-batched-tokens", "96", "--max-running-requests", "24",
    "--max-waiting-queue", "64", "--long-request-threshold", "1000",
    "--first-token-timeout-s", "3", "--long-first-token-timeout-s", "20",
)  # fmt: skip
FACTORS = (0.5, 1.0, 2.0, 5.0)
FIRST_RPS = 1.0
NUM_HALVINGS = 2
LEAD_IN_S, LEAD_OUT_S = 8.0, 4.0
KNEE_JUDGED_S, POINT_JUDGED_S = 16.0, 32.0
HANG_S = 130.0  # the longest whole answer that the server allows is 120 s
REFUSAL_P99_MAX_S = 0.050
PLATEAU_MIN = 0.9

HEADER = (
    "| offered / knee | offered/s | requests | goodput/s | of the knee's | served well "
    "| of the long | late | refused | timed out | failed | hanging | refusal p50, p99, ms "
    "| lag p99, max, ms |\n"
    "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def overload(bench: LiveBench) -> Iterator[Finding]:
    """The row: knee, table, targets."""
    with bench.server(FLAGS) as server:
        load = _Load(bench, server)
        load.warm_up()
        try:
            knee = find_knee(load.attainment, FIRST_RPS, NUM_HALVINGS).rate_rps
        except NoKnee as error:
            yield Finding(False, f"there is no knee to compare with: {error}")
            return
        bench.say(f"\nknee: {knee:.2f} requests/s\n")
        points = [
            load.run(factor * knee, POINT_JUDGED_S, seed=number)
            for number, factor in enumerate(FACTORS)
        ]
    bench.say(HEADER)
    for found in points:
        bench.say(line(found, points[FACTORS.index(1.0)]))
    bench.say("")
    yield from findings(points)


@dataclass(frozen=True, slots=True)
class _Load:
    """The team mix on one server, at any rate."""

    bench: LiveBench
    server: RunningServer

    def warm_up(self) -> None:
        """Let the server see lengths and speeds: a desk that knows nothing predicts nothing."""
        self.run(FIRST_RPS, LEAD_IN_S, seed=99)

    def attainment(self, rate_rps: float, attempt: int) -> float:
        """Share of requests served well at this rate, told as it is found."""
        found = self.run(rate_rps, KNEE_JUDGED_S, seed=100 + attempt)
        self.bench.say(f"- {rate_rps:.2f}/s: {found.attainment:.0%} served well")
        return found.attainment

    def run(self, rate_rps: float, judged_s: float, seed: int) -> Verdict:
        window_s = (LEAD_IN_S, LEAD_IN_S + self.bench.scale * judged_s)
        asks = team_mix(rate_rps, window_s[1] + LEAD_OUT_S, seed)
        seen = offer(self.bench.job(self.server, asks, HANG_S, (seed, rate_rps)))
        return judge(asks, seen, rate_rps, window_s)


def line(found: Verdict, knee: Verdict) -> str:
    """One line of the table; `knee` is the run at the knee."""
    fates = found.fates
    of_knee = found.goodput_rps / knee.goodput_rps if knee.goodput_rps else 0.0
    return (
        f"| {found.rate_rps / knee.rate_rps:g}× | {found.rate_rps:.2f} | {found.num_asks} "
        f"| {found.goodput_rps:.2f} | {of_knee:.2f} "
        f"| {found.attainment:.0%} | {found.long_attainment:.0%} | {fates[Fate.LATE]} "
        f"| {_refused(fates[Fate.REFUSED], found.codes)} | {fates[Fate.TIMED_OUT]} "
        f"| {fates[Fate.FAILED]} | {fates[Fate.HANGING]} "
        f"| {1000 * found.refusal_p50_s:.1f}, {1000 * found.refusal_p99_s:.1f} "
        f"| {1000 * found.lag_p99_s:.1f}, {1000 * found.lag_max_s:.1f} |"
    )


def _refused(num: int, codes: Counter[str]) -> str:
    parts = ", ".join(f"{code} {count}" for code, count in sorted(codes.items()))
    return f"{num} ({parts})" if parts else str(num)


def findings(points: Sequence[Verdict]) -> Iterator[Finding]:
    """The targets of overload; `points` in the order of FACTORS."""
    if not all(one.is_valid for one in points):
        yield Finding(False, "the generator was late: these figures say nothing of the server")
    knee = points[FACTORS.index(1.0)]
    for factor, found in zip(FACTORS, points, strict=True):
        if factor > 1:
            share = found.goodput_rps / knee.goodput_rps if knee.goodput_rps else 0.0
            yield Finding(
                share >= PLATEAU_MIN,
                f"goodput at {factor:g}× is {share:.2f} of the knee's (at least {PLATEAU_MIN})",
            )
    worst_s = max(one.refusal_p99_s for one in points)
    yield Finding(
        worst_s < REFUSAL_P99_MAX_S,
        f"refusals are answered within {1000 * worst_s:.1f} ms at p99 (under 50)",
    )
    for end, what in ((Fate.HANGING, "left hanging"), (Fate.FAILED, "failed otherwise")):
        num = sum(one.fates[end] for one in points)
        yield Finding(num == 0, f"{num} clients {what} (0)")
