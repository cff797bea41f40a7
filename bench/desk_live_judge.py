"""What became of each request, and what a run amounts to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.desk_live_load import Seen
from bench.desk_live_mix import Ask
from kvota.core.errors import Refusal
from kvota.sim.records import quantile

SHORT_TTFT_MAX_S, SHORT_TPOT_MAX_S, LONG_TTFT_MAX_S = 3.0, 0.25, 20.0
# How the desk refuses whoever has just come. Other refusals end a wait, and are as slow as it was.
DOOR_MESSAGES = ("The line is full", "The first token is expected in")
LAG_P99_MAX_S = 0.025


class Fate(StrEnum):
    GOOD = "good"
    LATE = "late"  # whole, but outside its targets
    REFUSED = "refused"  # a 503, or the same as an event of a stream that a comment has opened
    TIMED_OUT = "timed out"  # a 504, or the same as an event of the stream
    FAILED = "failed"  # anything else that ended
    HANGING = "hanging"  # no ending at all


def fate(one: Ask, seen: Seen) -> Fate:
    """How it ended, for whoever asked."""
    if seen.is_hanging:
        return Fate.HANGING
    if seen.code in set(Refusal):
        return Fate.REFUSED
    if seen.status == 504 or seen.code == "request_timeout":
        return Fate.TIMED_OUT
    if not seen.is_whole or seen.num_tokens != one.output_tokens:
        return Fate.FAILED
    return Fate.GOOD if _is_in_time(one, seen) else Fate.LATE


def is_at_the_door(seen: Seen) -> bool:
    """It was refused on arrival."""
    return seen.status == 503 and (seen.message or "").startswith(DOOR_MESSAGES)


def _is_in_time(one: Ask, seen: Seen) -> bool:
    """Short: TTFT ≤ 3 s and TPOT ≤ 0.25 s. Long: TTFT ≤ 20 s."""
    assert seen.first_s is not None
    if one.is_long:
        return seen.first_s <= LONG_TTFT_MAX_S
    return seen.first_s <= SHORT_TTFT_MAX_S and seen.per_token_s <= SHORT_TPOT_MAX_S


@dataclass(frozen=True, slots=True)
class Verdict:
    """One run at one rate. Fates and codes are of all requests, goodput of the judged ones."""

    rate_rps: float
    num_asks: int
    goodput_rps: float
    attainment: float  # share of the judged requests that were good
    long_attainment: float
    fates: Counter[Fate]
    codes: Counter[str]
    refusal_p50_s: float
    refusal_p99_s: float
    lag_p99_s: float
    lag_max_s: float

    @property
    def is_valid(self) -> bool:
        """The generator kept its plan."""
        return self.lag_p99_s <= LAG_P99_MAX_S


def judge(
    asks: Sequence[Ask], seen: Sequence[Seen], rate_rps: float, window_s: tuple[float, float]
) -> Verdict:
    """Goodput counts requests due within `window_s`, so neither an empty nor a draining server."""
    ends = [(one, fate(one, saw)) for one, saw in zip(asks, seen, strict=True)]
    judged = [(one, end) for one, end in ends if window_s[0] <= one.due_s < window_s[1]]
    refusals = [saw.ended_s for saw in seen if is_at_the_door(saw)]
    lags = [saw.lag_s for saw in seen]
    num_good = sum(end is Fate.GOOD for _, end in judged)
    return Verdict(
        rate_rps=rate_rps,
        num_asks=len(asks),
        goodput_rps=num_good / (window_s[1] - window_s[0]),
        attainment=_share_good([end for _, end in judged]),
        long_attainment=_share_good([end for one, end in judged if one.is_long]),
        fates=Counter(end for _, end in ends),
        codes=Counter(saw.code or "no answer" for saw in seen if not saw.is_whole),
        refusal_p50_s=quantile(refusals, 0.5),
        refusal_p99_s=quantile(refusals, 0.99),
        lag_p99_s=quantile(lags, 0.99),
        lag_max_s=max(lags, default=0.0),
    )


def _share_good(fates: Sequence[Fate]) -> float:
    return sum(end is Fate.GOOD for end in fates) / len(fates) if fates else 1.0
