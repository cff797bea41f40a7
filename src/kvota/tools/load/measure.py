"""What a run amounts to: pure arithmetic on what the clients saw.

Latencies are of whole answers and count from the scheduled moment. A refusal, however fast, is in
no latency figure; beside each stands the same percentile with every request that was not served
taken as unbounded, so that a server cannot look fast by refusing. Judged are only requests due in
the window, so neither a server that is still empty nor one that drains.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt

from kvota.tools.load.asked import Seen
from kvota.tools.load.lag import Lag
from kvota.tools.load.percentiles import Spread, percentile

MISSED_SHARE = 0.95  # of the requests due; fewer sent in time: the target rate was missed


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer is: both within their limits, in seconds."""

    ttft_s: float
    tpot_s: float

    def is_met(self, seen: Seen) -> bool:
        """Whole, first token in time, and then fast enough (an answer of one token always is)."""
        if not seen.is_whole or seen.first_token_s is None:
            return False
        per_token_s = seen.per_token_s
        return seen.first_token_s <= self.ttft_s and (
            per_token_s is None or per_token_s <= self.tpot_s
        )

    def __str__(self) -> str:
        return f"TTFT ≤ {self.ttft_s:g} s and TPOT ≤ {1000 * self.tpot_s:g} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run at one rate. Seconds, tokens per second, requests per second."""

    offered_rps: float
    sent_rps: float
    window_s: float
    num_due: int
    num_whole: int
    num_refused: int
    num_failed: int
    num_unfinished: int
    num_estimated: int  # outputs whose length the server did not tell
    num_off_length: int  # whole, but not as long as was asked for
    num_off_prompt: int  # the server counted the prompt differently
    errors: Mapping[str, int]
    ttft: Spread | None
    ttft_or_unserved: Spread | None  # with all that were not served as unbounded
    tpot: Spread | None
    stall: Spread | None  # the longest tenth of each answer's gaps
    queued: Spread | None  # as the server says
    total: Spread | None  # scheduled to last byte
    service: Spread | None  # sent to last byte
    goodput_rps: float
    attainment: float  # share of the requests due that were good
    output_tokens_per_s: float  # of all answers, while the window was open
    in_flight_mean: float
    in_flight_p99: float  # that an arriving request found before it
    in_flight_growth: float  # during the window
    lag: Lag

    @property
    def is_rate_missed(self) -> bool:
        """Fewer requests left in the window than were due in it."""
        return self.sent_rps * self.window_s < MISSED_SHARE * self.num_due

    @property
    def is_keeping_up(self) -> bool:
        """Open requests do not grow by more than a tenth of the arrivals, or than chance makes.

        In a stable queue the number of open requests at two moments differs by chance alone; with
        Poisson arrivals and ample places its standard deviation is the root of twice the mean.
        """
        return self.in_flight_growth <= max(
            0.1 * self.num_due, 3 * sqrt(2 * (self.in_flight_mean + 1))
        )


def measure(
    seen: Sequence[Seen], offered_rps: float, window_s: tuple[float, float], slo: Slo, lag: Lag
) -> Measured:
    """`window_s`: from and to, on the clock of `Seen.scheduled_s`."""
    start, end = window_s
    due = [one for one in seen if start <= one.scheduled_s < end]
    whole = [one for one in due if one.is_whole]
    errors = Counter(one.code for one in due if one.code is not None)
    num_good = sum(slo.is_met(one) for one in due)
    first = [one.first_token_s for one in whole if one.first_token_s is not None]
    num_sent = sum(start <= one.scheduled_s + one.sent_s < end for one in seen)
    open_at = OpenRequests(seen)
    found = sorted(float(open_at.before(one)) for one in due)
    return Measured(
        offered_rps=offered_rps,
        sent_rps=num_sent / (end - start),
        window_s=end - start,
        num_due=len(due),
        num_whole=len(whole),
        num_refused=sum(one.is_refused for one in due),
        num_failed=sum(not (one.is_whole or one.is_refused or one.is_unfinished) for one in due),
        num_unfinished=sum(one.is_unfinished for one in due),
        num_estimated=sum(one.is_estimated for one in whole),
        num_off_length=sum(one.is_off_length for one in whole),
        num_off_prompt=sum(has_other_prompt(one) for one in whole),
        errors=dict(errors.most_common()),
        ttft=Spread.of(first),
        ttft_or_unserved=Spread.of(first + [inf] * (len(due) - len(first))),
        tpot=Spread.of(_known(one.per_token_s for one in whole)),
        stall=Spread.of(_known(one.stall_s for one in whole)),
        queued=Spread.of(_known(one.queued_s for one in whole)),
        total=Spread.of(one.ended_s for one in whole),
        service=Spread.of(one.service_s for one in whole),
        goodput_rps=num_good / (end - start),
        attainment=num_good / len(due) if due else 0.0,
        output_tokens_per_s=tokens_within(seen, start, end) / (end - start),
        in_flight_mean=open_at.mean(start, end),
        in_flight_p99=percentile(found, 0.99) if found else 0.0,
        in_flight_growth=open_at.at(end) - open_at.at(start),
        lag=lag,
    )


def tokens_within(seen: Iterable[Seen], start: float, end: float) -> float:
    """Output tokens that came between two moments of the run, also of answers without an end.

    An event may hold several tokens; an answer's tokens are spread evenly over its events.
    """
    total = 0.0
    for one in seen:
        if one.token_s:
            inside = sum(start <= one.scheduled_s + at < end for at in one.token_s)
            total += max(one.output_tokens, len(one.token_s)) * inside / len(one.token_s)
    return total


class OpenRequests:
    """How many requests were sent and had not ended, at any moment of the run."""

    def __init__(self, seen: Iterable[Seen]) -> None:
        spans = [(one.scheduled_s + one.sent_s, one.scheduled_s + one.ended_s) for one in seen]
        self._begins = sorted(begin for begin, _ in spans)
        self._ends = sorted(end for _, end in spans)

    def at(self, moment: float) -> int:
        return bisect_right(self._begins, moment) - bisect_right(self._ends, moment)

    def before(self, one: Seen) -> int:
        """What a request found when it was sent, itself left out."""
        moment = one.scheduled_s + one.sent_s
        return bisect_left(self._begins, moment) - bisect_right(self._ends, moment)

    def mean(self, start: float, end: float) -> float:
        """Over time."""
        area, last, num = 0.0, start, self.at(start)
        steps = heapq.merge(
            ((at, 1) for at in self._begins if start < at <= end),
            ((at, -1) for at in self._ends if start < at <= end),
        )
        for moment, change in steps:
            area += num * (moment - last)
            last, num = moment, num + change
        return (area + num * (end - last)) / (end - start)


def has_other_prompt(one: Seen) -> bool:
    """The server counted another number of prompt tokens than was meant."""
    meant = one.asked_prompt_tokens
    return meant is not None and one.prompt_tokens not in (None, meant)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
