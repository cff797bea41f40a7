"""Among replicas that do the same work, one that does it much worse is left out for a while.

The circuit breaker asks whether a backend works; this asks whether it works as well as the others.
A replica is an outlier when, within the window,

    failures   its lowest believable failure rate > highest believable rate of all others together
               + `failure_margin`
    latency    its median is believably above `latency_factor` × the median of all others together

("believable": `evidence.py`, wrong with probability `risk` at most). With few calls nothing is
believable, so `num_calls_min` only saves work. Comparing with the others together, instead of with
mean − k·deviation over replicas as Envoy's outlier detection does, works for two replicas too:
there no replica can be more than one deviation away.

When all get worse together, nobody is an outlier. At most `ejected_share_max` of the replicas
(rounded down) are out at any time, the worst first. Time out: `ejection_s` × how many times in a
row, up to `ejection_max_s`, ± `jitter`; back in, a replica starts with an empty window.

Feed a latency that does not grow with the prompt: seconds per output token, or time to first token
per uncached prompt token. Otherwise a replica with long prompts looks ill.
"""

import statistics
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from kvota.core.errors import ConfigError
from kvota.gateway.policy.chance import Chance, jittered
from kvota.gateway.policy.evidence import Hits, highest_rate, is_surely_above, lowest_rate
from kvota.gateway.policy.window import Counts, OutcomeWindow

_LATENCIES_MAX: Final = 128  # kept for each replica


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierSettings:
    """Raises ConfigError, naming the field, for values that make no sense."""

    window_s: float = 60.0
    num_calls_min: int = 10
    failure_margin: float = 0.1
    latency_factor: float = 3.0
    risk: float = 0.001  # of one wrong verdict about one replica
    ejected_share_max: float = 0.5
    ejection_s: float = 30.0
    ejection_max_s: float = 300.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if not (self.window_s > 0 and self.ejection_s > 0):
            raise ConfigError("outliers: window_s and ejection_s must be above 0.")
        if not self.ejection_max_s >= self.ejection_s:
            raise ConfigError("outliers: ejection_max_s must be at least ejection_s.")
        if self.num_calls_min < 1:
            raise ConfigError(
                f"outliers: num_calls_min must be at least 1, got {self.num_calls_min}."
            )
        for name, least, most in (
            ("failure_margin", 0.0, 1.0),
            ("ejected_share_max", 0.0, 1.0),
            ("jitter", 0.0, 0.99),
        ):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(
                    f"outliers: {name} must be in [{least}, {most}], got {getattr(self, name)}."
                )
        if not (self.latency_factor > 1 and 0 < self.risk < 1):
            raise ConfigError("outliers: latency_factor must be above 1 and risk in (0, 1).")


@dataclass(frozen=True, slots=True)
class Ejection:
    """`reason` is a sentence for the log and the admin page."""

    replica: str
    until_s: float
    reason: str


@dataclass(slots=True)
class _Record:
    """What one replica did lately."""

    window: OutcomeWindow
    latencies: deque[tuple[float, float]] = field(  # (when, seconds), oldest first
        default_factory=lambda: deque(maxlen=_LATENCIES_MAX)
    )
    num_in_row: int = 0  # ejections without a good time between them
    back_since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Evidence:
    """A record as numbers, at one moment."""

    replica: str
    counts: Counts
    latencies: list[float]


class Outliers:
    """Watches the replicas of one model. Memory: `_LATENCIES_MAX` samples for each listed one."""

    def __init__(self, settings: OutlierSettings, chance: Chance) -> None:
        self._settings = settings
        self._chance = chance
        self._records: dict[str, _Record] = {}
        self._ejected: dict[str, Ejection] = {}

    def observe(self, replica: str, ok: bool, latency_s: float | None, now: float) -> None:
        """One call ended. Replicas that no `review` has listed yet are not recorded. O(1)."""
        record = self._records.get(replica)
        if record is None or self.is_ejected(replica, now):
            return  # an answer to a call from before the ejection
        record.window.add(ok, now)
        if ok and latency_s is not None:
            record.latencies.append((now, latency_s))

    def is_ejected(self, replica: str, now: float) -> bool:
        ejection = self._ejected.get(replica)
        return ejection is not None and now < ejection.until_s

    def ejected(self, now: float) -> tuple[Ejection, ...]:
        return tuple(one for one in self._ejected.values() if now < one.until_s)

    def review(self, replicas: Collection[str], now: float) -> tuple[Ejection, ...]:
        """Compare the replicas as they are listed now. Returns the new ejections.

        Call it once a second or so. O(replicas · samples).
        """
        self._list(replicas)
        self._readmit(len(replicas), now)
        seen = [self._evidence(one, now) for one in self._records if one not in self._ejected]
        suspects = sorted(self._suspects(seen), reverse=True)
        num_places = self._num_ejected_max(len(replicas)) - len(self._ejected)
        return tuple(self._eject(replica, why, now) for _, replica, why in suspects[:num_places])

    def check(self) -> None:
        """Prove that the stated share holds and that only listed replicas are remembered."""
        assert self._ejected.keys() <= self._records.keys()
        assert len(self._ejected) <= self._num_ejected_max(len(self._records))

    def _num_ejected_max(self, num_replicas: int) -> int:
        return min(int(self._settings.ejected_share_max * num_replicas), max(num_replicas - 1, 0))

    def _list(self, replicas: Collection[str]) -> None:
        for gone in self._records.keys() - set(replicas):
            del self._records[gone]
            self._ejected.pop(gone, None)
        for new in replicas:
            if new not in self._records:
                self._records[new] = _Record(OutcomeWindow(self._settings.window_s))

    def _readmit(self, num_replicas: int, now: float) -> None:
        """Those whose time is over, and more when too many are out since others are gone."""
        num_over = len(self._ejected) - self._num_ejected_max(num_replicas)
        for place, one in enumerate(sorted(self._ejected.values(), key=lambda one: one.until_s)):
            if place < num_over or one.until_s <= now:
                del self._ejected[one.replica]
                record = self._records[one.replica]
                record.window.clear()
                record.latencies.clear()
                record.back_since_s = now

    def _evidence(self, replica: str, now: float) -> _Evidence:
        record = self._records[replica]
        while record.latencies and record.latencies[0][0] <= now - self._settings.window_s:
            record.latencies.popleft()
        return _Evidence(
            replica, record.window.counts(now), [seconds for _, seconds in record.latencies]
        )

    def _suspects(self, seen: list[_Evidence]) -> Iterable[tuple[float, str, str]]:
        """(how bad: failure rate, or below 0 for slowness; replica; why)."""
        for own in seen:
            if own.counts.num < self._settings.num_calls_min:
                continue
            others = [one for one in seen if one is not own]
            if why := self._fails_more(own, others):
                yield own.counts.failure_rate, own.replica, why
            elif why := self._is_slower(own, others):
                yield -1 / statistics.median(own.latencies), own.replica, why

    def _fails_more(self, own: _Evidence, others: list[_Evidence]) -> str | None:
        risk, margin = self._settings.risk / 2, self._settings.failure_margin
        mine = Hits(own.counts.num_failed, own.counts.num)
        theirs = Hits(
            sum(one.counts.num_failed for one in others), sum(one.counts.num for one in others)
        )
        if theirs.num < self._settings.num_calls_min or mine.rate <= theirs.rate + margin:
            return None
        if lowest_rate(mine, risk) <= highest_rate(theirs, risk) + margin:
            return None
        return (
            f"{mine.hits} of {mine.num} calls failed ({mine.rate:.0%}), "
            f"{theirs.hits} of {theirs.num} ({theirs.rate:.0%}) on the other replicas"
        )

    def _is_slower(self, own: _Evidence, others: list[_Evidence]) -> str | None:
        theirs = [seconds for one in others for seconds in one.latencies]
        if min(len(theirs), len(own.latencies)) < self._settings.num_calls_min:
            return None
        bound_s = self._settings.latency_factor * statistics.median(theirs)
        num_slow = sum(seconds > bound_s for seconds in own.latencies)
        if not is_surely_above(Hits(num_slow, len(own.latencies)), 0.5, self._settings.risk):
            return None
        return (
            f"median latency {statistics.median(own.latencies):.3g} s, more than "
            f"{self._settings.latency_factor:g} times the {statistics.median(theirs):.3g} s "
            "of the other replicas"
        )

    def _eject(self, replica: str, why: str, now: float) -> Ejection:
        settings, record = self._settings, self._records[replica]
        if now - record.back_since_s >= settings.ejection_max_s:
            record.num_in_row = 0
        record.num_in_row += 1
        out_s = min(settings.ejection_s * record.num_in_row, settings.ejection_max_s)
        ejection = Ejection(replica, now + jittered(out_s, settings.jitter, self._chance), why)
        self._ejected[replica] = ejection
        return ejection
