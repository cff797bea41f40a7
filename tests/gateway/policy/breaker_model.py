"""The breaker again, slow and obvious: it keeps everything and decides from the whole history."""

from dataclasses import dataclass, field

from kvota.gateway.policy.breaker import BreakerSettings, State


@dataclass(eq=False)
class Call:
    born: int  # how many changes of state there had been
    granted_s: float
    ended: bool = False
    begun: bool = False


@dataclass
class BreakerModel:
    """`settings.jitter` must be 0, `window_s / 10` a slice, as in `OutcomeWindow`."""

    settings: BreakerSettings
    state: State = State.CLOSED
    changes: int = 0
    reports: list[tuple[float, bool]] = field(default_factory=list)  # since the last change
    proven: int = 0
    calls: list[Call] = field(default_factory=list)
    until_s: float = 0.0
    holds: list[float] = field(default_factory=list)  # every end of one that was asked for
    num_trips: int = 0  # since it was last closed for a whole window
    closed_s: float = float("-inf")

    def change(self, state: State) -> None:
        self.state = state
        self.changes += 1
        self.reports = []
        self.proven = 0

    def probes(self) -> list[Call]:
        if self.state is not State.HALF_OPEN:
            return []
        return [
            one
            for one in self.calls
            if one.born == self.changes and not one.ended and not one.begun
        ]

    def trip(self, now: float) -> None:
        long_closed = now - self.closed_s >= self.settings.window_s
        if self.state is State.CLOSED and long_closed:
            self.num_trips = 0
        open_s = self.settings.open_s * self.settings.open_growth**self.num_trips
        self.until_s = now + min(open_s, self.settings.open_max_s)
        self.num_trips += 1
        self.change(State.OPEN)

    def keep_time(self, now: float) -> None:
        if self.state is State.OPEN and now >= self.until_s:
            self.change(State.HALF_OPEN)
        timeout_s = self.settings.probe_timeout_s
        if any(one.granted_s <= now - timeout_s for one in self.probes()):
            self.trip(now)

    def ask(self, now: float) -> Call | None:
        self.keep_time(now)
        if self.state is State.OPEN:
            return None
        if len(self.probes()) >= self.settings.probes_max:
            return None
        self.calls.append(Call(self.changes, now))
        return self.calls[-1]

    def begin(self, call: Call, now: float) -> None:
        self.keep_time(now)
        if call in self.probes():
            call.begun = True
            self.prove(now)

    def prove(self, now: float) -> None:
        self.proven += 1
        if self.proven == self.settings.probes_to_close:
            self.change(State.CLOSED)
            self.closed_s = now

    def report(self, call: Call, ok: bool | None, now: float) -> None:
        self.keep_time(now)
        counts = not call.ended and call.born == self.changes
        call.ended = True
        if not counts or ok is None:
            return
        if self.state is State.HALF_OPEN:
            if not ok:
                self.trip(now)
            elif not call.begun:
                self.prove(now)
            return
        self.reports.append((now, ok))
        if not ok and self.is_bad(now):
            self.trip(now)

    def is_bad(self, now: float) -> bool:
        settings = self.settings
        in_row = [ok for _, ok in self.reports[-settings.failures_in_row_max :]]
        if len(in_row) == settings.failures_in_row_max and not any(in_row):
            return True
        slice_s = settings.window_s / 10
        oldest = int(now // slice_s) - 9
        held = [ok for at, ok in self.reports if int(at // slice_s) >= oldest]
        return (
            len(held) >= settings.num_calls_min
            and held.count(False) / len(held) >= settings.failure_rate_max
        )

    def hold(self, until_s: float, now: float) -> None:
        self.keep_time(now)
        if until_s <= now:
            return
        self.holds.append(until_s)
        if self.state is State.OPEN:
            self.until_s = max(self.until_s, until_s)
        else:
            self.until_s = until_s
            self.change(State.OPEN)

    def recovered(self, now: float) -> None:
        self.keep_time(now)
        is_held = any(end_s > now for end_s in self.holds)
        if self.state is State.OPEN:
            self.until_s = min(self.until_s, max(self.holds)) if is_held else now
        self.keep_time(now)
