"""One replay, from the plan to what it amounts to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvota.core.clock import Clock
from kvota.tools.load.asked import Seen
from kvota.tools.load.cut import Cut
from kvota.tools.load.generator import IN_FLIGHT_MAX, Generator
from kvota.tools.load.measure import Measured, Slo, measure
from kvota.tools.load.target import Target
from kvota.tools.replay.plan import Plan
from kvota.tools.replay.tenants import TenantSender

DRAIN_S = 120.0
_WINDOW_MIN_S = 0.001


@dataclass(frozen=True, slots=True)
class Replayed:
    """`refusal` says why the figures mean nothing; None when they do."""

    plan: Plan
    target: Target
    slo: Slo
    seen: list[Seen]
    measured: Measured
    refusal: str | None
    interrupted_s: float | None = None  # after so long it was stopped
    cut: Cut | None = None  # for this reason

    @property
    def cached_share(self) -> float | None:
        """Of the prompt tokens of whole answers, as the server says; None: it does not say."""
        told = [one for one in self.seen if one.is_whole and one.cached_tokens is not None]
        total = sum(one.prompt_tokens or 0 for one in told)
        return sum(one.cached_tokens or 0 for one in told) / total if total else None


async def replay(
    plan: Plan,
    target: Target,
    keys: Mapping[str, str | None],
    slo: Slo,
    *,
    clock: Clock | None = None,
    drain_s: float = DRAIN_S,
    in_flight_max: int = IN_FLIGHT_MAX,
    on_ended: Callable[[Seen], None] = lambda _: None,
) -> Replayed:
    """Send every request at its time and follow all to their ends.

    What is open `drain_s` seconds after the last was due is given up and counts as unfinished. A
    cancellation (Ctrl-C) ends the replay there, and so does a server that is gone; judged is what
    was due until then.
    """
    window_s = plan.recorded.window_s
    async with TenantSender(target, keys) as sender:
        generator = Generator(sender, clock, in_flight_max=in_flight_max, on_ended=on_ended)
        run = await generator.offer(plan.asked, duration_s=window_s, drain_s=drain_s, keeps=True)
    if run.interrupted_s is not None:
        window_s = min(window_s, max(run.interrupted_s, _WINDOW_MIN_S))
    offered_rps = len(run.seen) / window_s
    measured = measure(run.seen, offered_rps, (0.0, window_s), slo, run.lag)
    refusal = refusal_of(measured)
    return Replayed(plan, target, slo, run.seen, measured, refusal, run.interrupted_s, run.cut)


def refusal_of(measured: Measured) -> str | None:
    """Why the figures of a run mean nothing; None when they do."""
    ttft = measured.ttft
    if ttft is None:
        return "not one request was answered, so there is nothing to measure"
    return measured.lag.complaint(ttft.p50, ttft.p99)
