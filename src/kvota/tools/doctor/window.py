"""A server between two looks: what its counters grew by, what its histograms gained. Pure.

Every quantity may have several names, ours and those of other servers; the first that the page
has is meant. A counter that fell belongs to a process that began anew: what it shows now is what
it grew by.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from kvota.tools.doctor.page import Page
from kvota.wire.requests import LiveRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUsage:
    """What one API key asked in all. From the operator's usage pages."""

    key_id: str
    tenant: str
    requests: int
    refusals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the server said of itself at one moment. None: it does not say, or not to us."""

    at_s: float
    page: Page
    not_ready: str | None = None  # why; None when it is ready, or has no such page
    requests: tuple[LiveRequest, ...] | None = None
    usage: tuple[KeyUsage, ...] | None = None
    error: str | None = None  # why nothing could be read; the other fields are empty then


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations of the window. `bounds`: (upper bound, how many are at most that), rising."""

    count: float
    total: float
    bounds: tuple[tuple[float, float], ...] = ()

    @property
    def mean(self) -> float:
        return self.total / self.count

    def share_above(self, bound: float) -> float:
        """Within a bucket, observations are taken as evenly spread."""
        below, low, num_low = 0.0, 0.0, 0.0
        for high, num_high in self.bounds:
            if bound >= high:
                below = num_high
            elif high < inf:
                below = num_low + (num_high - num_low) * (bound - low) / (high - low)
                break
            else:
                break
            low, num_low = high, num_high
        return max(0.0, 1 - below / self.count)

    def quantile(self, share: float) -> float:
        """As Prometheus' histogram_quantile; the last finite bound where it lies above that."""
        wanted, low, num_low = share * self.count, 0.0, 0.0
        for high, num_high in self.bounds:
            if num_high >= wanted and num_high > num_low:
                if high == inf:
                    return low
                return low + (high - low) * (wanted - num_low) / (num_high - num_low)
            low, num_low = (high if high < inf else low), num_high
        return low


@dataclass(frozen=True)
class Window:
    """Readings in order of time, those that failed left out of everything but `is_away`."""

    readings: Sequence[Reading]
    is_cut: bool = False  # by Ctrl-C: it is shorter than was wanted
    _good: Sequence[Reading] = field(init=False)

    def __post_init__(self) -> None:
        good = [one for one in self.readings if one.error is None]
        assert len(good) >= 2, "a window has two ends"
        object.__setattr__(self, "_good", good)

    @property
    def first(self) -> Reading:
        return self._good[0]

    @property
    def last(self) -> Reading:
        return self._good[-1]

    @property
    def span_s(self) -> float:
        return self.last.at_s - self.first.at_s

    @property
    def is_away(self) -> bool:
        """The latest look got no answer."""
        return self.readings[-1].error is not None

    @property
    def is_kvota(self) -> bool:
        return self.has("kvota_requests_running") or self.has("kvota_gateway_requests_open")

    @property
    def has_gateway(self) -> bool:
        return self.has("kvota_gateway_requests_open")

    def has(self, name: str) -> bool:
        return self.last.page.total(name) is not None

    def named(self, *names: str) -> str:
        """What the page calls a quantity; empty when it has none of the names."""
        return next((name for name in names if self.has(name) or self.has(f"{name}_count")), "")

    def grew(self, *names: str) -> float | None:
        """A counter's growth, all labels together; None when the page has none of the names."""
        for name in names:
            now = self.last.page.total(name)
            if now is not None:
                return growth(self.first.page.total(name) or 0.0, now)
        return None

    def grew_by(self, name: str, label: str, **where: str) -> dict[str, float]:
        """A counter's growth for each value of a label; only those that grew."""
        before = self.first.page.where(**where).by(name, label)
        after = self.last.page.where(**where).by(name, label)
        grown = {key: growth(before.get(key, 0.0), value) for key, value in after.items()}
        return {key: value for key, value in grown.items() if value > 0}

    def histogram(self, *names: str) -> Histogram | None:
        """What it gained; None without the names, or without an observation in the window."""
        for name in names:
            count = self.grew(f"{name}_count")
            if count is not None:
                return self._histogram(name, count) if count > 0 else None
        return None

    def _histogram(self, name: str, count: float) -> Histogram:
        before = self.first.page.by(f"{name}_bucket", "le")
        after = self.last.page.by(f"{name}_bucket", "le")
        numbered = [(float(le), growth(before.get(le, 0.0), now)) for le, now in after.items()]
        return Histogram(count, self.grew(f"{name}_sum") or 0.0, tuple(sorted(numbered)))

    def gauge(self, *names: str) -> list[float]:
        """The value at each reading; empty without the names."""
        for name in names:
            values = [one.page.total(name) for one in self._good]
            found = [value for value in values if value is not None]
            if found:
                return found
        return []

    def over_time(self, *names: str) -> list[tuple[float, float]]:
        """Seconds since the first reading, and the value there; empty without the names."""
        found = [(one.at_s - self.first.at_s, _of(one.page, names)) for one in self._good]
        return [(at_s, value) for at_s, value in found if value is not None]

    def rate_over_time(self, *names: str) -> list[tuple[float, float]]:
        """A counter's growth per second at each reading but the first."""
        return [
            (at_s, growth(old, new) / (at_s - before_s))
            for (before_s, old), (at_s, new) in pairwise(self.over_time(*names))
            if at_s > before_s
        ]

    def gauge_by(self, name: str, label: str, value: str) -> list[float]:
        return [one.page.by(name, label).get(value, 0.0) for one in self._good]

    def limit(self, setting: str) -> float | None:
        """What a setting of the desk is now, of several desks the largest; None: not shown."""
        return self.last.page.where(setting=setting).largest("kvota_desk_limit")

    @property
    def live(self) -> list[tuple[LiveRequest, ...]]:
        """The requests that had not ended, at each reading that shows them."""
        return [one.requests for one in self._good if one.requests is not None]

    def phases(self) -> Mapping[str, int]:
        """Requests by phase at the last reading that shows them."""
        return Counter(one.phase for one in self.live[-1]) if self.live else {}

    @property
    def has_restarted(self) -> bool:
        """The process behind the page is another one than at the beginning."""
        starts = self.gauge("process_start_time_seconds")
        return any(later > earlier for earlier, later in pairwise(starts))


def _of(page: Page, names: Sequence[str]) -> float | None:
    return next((value for name in names if (value := page.total(name)) is not None), None)


def growth(before: float, after: float) -> float:
    """Of a counter. One that fell began anew."""
    return after - before if after >= before else after
