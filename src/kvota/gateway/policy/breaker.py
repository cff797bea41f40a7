"""A circuit breaker for one backend: who fails too often is left alone for a while, then tried.

    state \\ event   TRIP        HOLD             ELAPSE        PROVE
    CLOSED          OPEN        OPEN
    OPEN                        (longer)         HALF_OPEN
    HALF_OPEN       OPEN        OPEN                           CLOSED

    TRIP    closed: the failure rate of the window reached `failure_rate_max` with at least
            `num_calls_min` calls in it, or `failures_in_row_max` calls failed one after the other.
            half-open: a probe failed, or said nothing for `probe_timeout_s`.
    HOLD    the backend itself asked for peace (429 or 503 with Retry-After), or turned out to be
            set up wrongly (401), which is a fault. Two holds: the later end counts.
    ELAPSE  the open time is over; or the backend's health page, which had been bad, is good again:
            then what is left of the open time is let go, but not of a hold.
    PROVE   `probes_to_close` probes succeeded. A probe has when its first content is there, so that
            long streams keep nobody waiting; it may still fail after that, and trips.

Open time: `open_s` at first, times `open_growth` for every further trip up to `open_max_s`, all of
it ± `jitter` so that many gateways do not come back together. It starts small again once the
breaker has stayed closed for a whole window; closing alone does not, so a backend that works for
three probes and then fails again is left alone longer and longer.

Every change of state is a new generation. A permit belongs to the generation that gave it out, and
a report for an older one changes nothing: an answer that left a minute ago must neither open what
has proved itself since, nor close what has failed since.

Pattern: M. Nygard, "Release It!"; generations as in sony/gobreaker; growth with jitter after
M. Brooker, "Exponential Backoff And Jitter" (AWS, 2015).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kvota.core.errors import ConfigError
from kvota.gateway.policy.chance import Chance, jittered
from kvota.gateway.policy.window import Counts, OutcomeWindow


class State(StrEnum):
    """The value is the metric label."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(StrEnum):
    TRIP = "trip"
    HOLD = "hold"
    ELAPSE = "elapse"
    PROVE = "prove"


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = MappingProxyType(
    {
        (State.CLOSED, Event.TRIP): State.OPEN,
        (State.CLOSED, Event.HOLD): State.OPEN,
        (State.OPEN, Event.ELAPSE): State.HALF_OPEN,
        (State.HALF_OPEN, Event.TRIP): State.OPEN,
        (State.HALF_OPEN, Event.HOLD): State.OPEN,
        (State.HALF_OPEN, Event.PROVE): State.CLOSED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """Raises ConfigError, naming the field, for values that make no sense."""

    window_s: float = 30.0
    failure_rate_max: float = 0.5
    num_calls_min: int = 10  # in the window, before its rate means anything
    failures_in_row_max: int = 5  # for backends with little traffic, and for dead ones
    open_s: float = 5.0
    open_growth: float = 2.0
    open_max_s: float = 30.0  # what clients may still wait after it is well, if it stands alone
    jitter: float = 0.2
    probes_max: int = 3  # at once
    probes_to_close: int = 3
    probe_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("num_calls_min", "failures_in_row_max", "probes_max", "probes_to_close"):
            if getattr(self, name) < 1:
                raise ConfigError(f"breaker: {name} must be at least 1, got {getattr(self, name)}.")
        for name in ("window_s", "open_s", "probe_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"breaker: {name} must be above 0, got {getattr(self, name)}.")
        if not 0 < self.failure_rate_max <= 1:
            raise ConfigError(
                f"breaker: failure_rate_max must be in (0, 1], got {self.failure_rate_max}."
            )
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"breaker: jitter must be in [0, 1), got {self.jitter}.")
        if not (self.open_growth >= 1 and self.open_max_s >= self.open_s):
            raise ConfigError(
                "breaker: open_growth must be at least 1 and open_max_s at least open_s, "
                f"got {self.open_growth} and {self.open_max_s} (open_s = {self.open_s})."
            )


@dataclass(slots=True, eq=False)
class Permit:
    """Leave for one attempt. Ends once, by `Breaker.report` or `Breaker.withdraw`."""

    generation: int
    granted_s: float
    has_ended: bool = field(default=False, init=False)
    has_proven: bool = field(default=False, init=False)  # as a probe, before its end


@dataclass(frozen=True, slots=True)
class BreakerSnapshot:
    """For metrics, logs and the admin page."""

    state: State
    generation: int
    counts: Counts  # of the window
    num_probes: int  # out now
    retry_after_s: float  # 0: may be asked now


class Breaker:
    """One backend's. Constant memory; every call is O(1) in calls, O(probes_max) when half-open."""

    def __init__(self, settings: BreakerSettings, chance: Chance) -> None:
        self._settings = settings
        self._chance = chance
        self._state = State.CLOSED
        self._generation = 0
        self._window = OutcomeWindow(settings.window_s)
        self._num_failed_in_row = 0
        self._closed_since_s: float | None = None  # None: never was anything else
        self._next_open_s = settings.open_s
        self._open_until_s = 0.0
        self._held_until_s = 0.0  # the part of it that the backend itself asked for
        self._probes: list[Permit] = []
        self._num_proven = 0
        self._num_trips_in_row = 0

    def state(self, now: float) -> State:
        self._keep_time(now)
        return self._state

    @property
    def generation(self) -> int:
        return self._generation

    def can_pass(self, now: float) -> bool:
        """Whether `may_pass` would give a permit. Takes nothing; for the filter before a pick."""
        self._keep_time(now)
        if self._state is State.HALF_OPEN:
            return len(self._probes) < self._settings.probes_max
        return self._state is State.CLOSED

    def may_pass(self, now: float) -> Permit | None:
        """A permit for one attempt, or None. Whoever takes it must end it."""
        if not self.can_pass(now):
            return None
        permit = Permit(self._generation, now)
        if self._state is State.HALF_OPEN:
            self._probes.append(permit)
        return permit

    def begun(self, permit: Permit, now: float) -> None:
        """The attempt has its first content. It still ends, well or not."""
        self._keep_time(now)
        if permit in self._probes:
            self._probes.remove(permit)
            permit.has_proven = True
            self._judge_probe(True, now)

    def report(self, permit: Permit, ok: bool, now: float) -> None:
        """How the attempt went, at its end."""
        if not self._end(permit, now):
            return
        if self._state is not State.HALF_OPEN:
            self._judge_call(ok, now)
        elif not (ok and permit.has_proven):
            self._judge_probe(ok, now)

    def withdraw(self, permit: Permit, now: float) -> None:
        """The attempt says nothing about the backend: the client left, or its request was wrong."""
        self._end(permit, now)

    def hold(self, until_s: float, now: float, *, is_fault: bool = False) -> None:
        """Leave the backend alone until then, or longer if it is already left alone longer.

        `is_fault`: it did not ask for that, so it counts as a trip in `num_trips_in_row`.
        """
        self._keep_time(now)
        if until_s <= now:
            return
        if self._state is not State.OPEN:
            before = self._num_trips_in_row
            self._move(Event.HOLD)
            self._num_trips_in_row = before + 1 if is_fault else 0
            self._open_until_s = until_s
        self._open_until_s = max(self._open_until_s, until_s)
        self._held_until_s = max(self._held_until_s, until_s)

    def recovered(self, now: float) -> None:
        """The backend was seen to be unwell, and is now seen to be well: let probes out at once.

        Not for a backend that merely goes on looking well: its page may be fine while its answers
        are not, and those are what the open time is for.
        """
        self._keep_time(now)  # first: a silent probe gives up before, and is forgiven too
        self._open_until_s = min(self._open_until_s, max(now, self._held_until_s))
        self._keep_time(now)

    def retry_after_s(self, now: float) -> float:
        """Seconds until it may be asked again; 0 unless open."""
        self._keep_time(now)
        return self._open_until_s - now if self._state is State.OPEN else 0.0

    def num_trips_in_row(self, now: float) -> int:
        """How often failing calls have opened it since it was last good; 0 unless it is open.

        A hold ends the row, unless it is for a fault: a backend that asks for peace does not fail.
        """
        return self._num_trips_in_row if self.state(now) is State.OPEN else 0

    def snapshot(self, now: float) -> BreakerSnapshot:
        return BreakerSnapshot(
            state=self.state(now),
            generation=self._generation,
            counts=self._window.counts(now),
            num_probes=len(self._probes),
            retry_after_s=self.retry_after_s(now),
        )

    def check(self) -> None:
        """Prove that probes exist only half-open, are of this generation, and within bounds."""
        assert self._state is State.HALF_OPEN or not (self._probes or self._num_proven)
        assert len(self._probes) <= self._settings.probes_max
        assert all(probe.generation == self._generation for probe in self._probes)
        assert self._num_proven < self._settings.probes_to_close
        assert self._settings.open_s <= self._next_open_s <= self._settings.open_max_s

    def _keep_time(self, now: float) -> None:
        """Do what only time does: end the open time, and give up on silent probes."""
        if self._state is State.OPEN and now >= self._open_until_s:
            self._move(Event.ELAPSE)
        if not self._probes:
            return
        silent_since_s = now - self._settings.probe_timeout_s
        if any(probe.granted_s <= silent_since_s for probe in self._probes):
            self._trip(now)

    def _end(self, permit: Permit, now: float) -> bool:
        """True when the permit may still change something."""
        self._keep_time(now)
        if permit.has_ended:
            return False
        permit.has_ended = True
        if permit.generation != self._generation:
            return False
        if self._state is State.HALF_OPEN and not permit.has_proven:
            self._probes.remove(permit)
        return True

    def _judge_probe(self, ok: bool, now: float) -> None:
        if not ok:
            self._trip(now)
            return
        self._num_proven += 1
        if self._num_proven == self._settings.probes_to_close:
            self._move(Event.PROVE)
            self._closed_since_s = now

    def _judge_call(self, ok: bool, now: float) -> None:
        self._window.add(ok, now)
        if ok:
            self._num_failed_in_row = 0
            return
        self._num_failed_in_row += 1
        settings, counts = self._settings, self._window.counts(now)
        is_frequent = (
            counts.num >= settings.num_calls_min
            and counts.failure_rate >= settings.failure_rate_max
        )
        if is_frequent or self._num_failed_in_row >= settings.failures_in_row_max:
            self._trip(now)

    def _trip(self, now: float) -> None:
        settings = self._settings
        if self._state is State.CLOSED and self._has_been_good(now):
            self._next_open_s = settings.open_s
        self._open_until_s = now + jittered(self._next_open_s, settings.jitter, self._chance)
        self._next_open_s = min(self._next_open_s * settings.open_growth, settings.open_max_s)
        self._move(Event.TRIP)

    def _has_been_good(self, now: float) -> bool:
        since_s = self._closed_since_s
        return since_s is not None and now - since_s >= self._settings.window_s

    def _move(self, event: Event) -> None:
        if event is Event.TRIP:
            self._num_trips_in_row += 1
        elif event is not Event.ELAPSE:
            self._num_trips_in_row = 0
        self._state = TRANSITIONS[self._state, event]
        self._generation += 1
        self._window.clear()
        self._num_failed_in_row = 0
        self._num_proven = 0
        self._probes.clear()
