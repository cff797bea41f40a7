"""The life of a supervised engine process, as a table: when to start it, end it, and end it harder.

                 ┌────────────── exited ◀───────────────┐
                 ▼                                      │
    stop ◀─── DOWN ──start──▶ STARTING ──ready──▶ UP ───┤ stuck or silent too long: kill
     │          ▲                 │ exited, or too late │ too fat: terminate
     ▼          └─────────────────┘                     ▼
  STOPPED ◀──exited after stop──────────────────────  ENDING ── still there after its time: kill

Nothing here starts or signals a process. The supervisor tells what it sees, asks `order(now)` what
is to be done, and does it. Times are seconds of one clock; sizes are bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 30.0
LOAD_UNKNOWN_S: Final = 10.0  # before the first start has been measured
RETRY_AFTER_STOPPING_S: Final = 30.0  # whoever restarts the gateway needs about so long


class State(StrEnum):
    DOWN = "down"  # no process; starts when its back-off is over
    STARTING = "starting"  # a process that does not serve yet
    UP = "up"
    ENDING = "ending"  # told to drain and go
    STOPPED = "stopped"  # for good


TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    State.DOWN: frozenset({State.STARTING, State.STOPPED}),
    State.STARTING: frozenset({State.UP, State.ENDING, State.DOWN, State.STOPPED}),
    State.UP: frozenset({State.ENDING, State.DOWN, State.STOPPED}),
    State.ENDING: frozenset({State.DOWN, State.STOPPED}),
    State.STOPPED: frozenset(),
}


class Probe(Enum):
    """What a look at the process shows."""

    FINE = "fine"
    STUCK = "stuck"  # it answers, and says that it makes no progress
    SILENT = "silent"  # it does not answer


class Order(Enum):
    START = "start"
    TERMINATE = "terminate"  # drain what runs, then go
    KILL = "kill"


class Reason(StrEnum):
    """Why a process went. The value is a metric label."""

    EXITED = "exited"  # by itself, or somebody else's signal
    STUCK = "stuck"
    SILENT = "silent"
    TOO_FAT = "too_fat"
    TOO_SLOW = "too_slow"  # to start
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """When patience ends."""

    stuck_patience_s: float = 5.0  # on top of what the node itself waits before it says so
    silent_patience_s: float = 20.0
    resident_bytes_max: int | None = None  # None: any size
    drain_timeout_s: float = 30.0
    kill_grace_s: float = 7.0  # beyond the drain, for closing
    start_timeout_s: float = 600.0  # of restarts; the first start may fetch a model
    stable_after_s: float = 30.0  # up for so long: an earlier failure is forgotten


class IllegalMove(RuntimeError):
    """The supervisor reported what cannot be. A bug of ours."""


class NodeLife:
    """One process after the other, of the same engine. Born DOWN and due at once."""

    def __init__(self, bounds: Bounds, now: float) -> None:
        self.bounds = bounds
        self.state = State.DOWN
        self.num_starts = 0
        self.load_s: float | None = None  # what the latest start took
        self.resident_bytes = 0
        self.why = Reason.EXITED  # of the end that is coming or came last
        self._since_s = now  # in this state
        self._due_s = now  # DOWN: to start; ENDING: to be killed
        self._num_failures = 0
        self._bad_since_s: dict[Probe, float] = {}
        self._is_stopping = False

    @property
    def is_up(self) -> bool:
        return self.state is State.UP

    def order(self, now: float) -> Order | None:
        """What is to be done now. Repeats itself until it is told that it was done."""
        match self.state:
            case State.DOWN:
                return Order.START if now >= self._due_s else None
            case State.STARTING:
                return self._judged_start(now)
            case State.UP:
                return self._judged(now)
            case State.ENDING:
                return Order.KILL if now >= self._due_s else None
        return None

    def _judged_start(self, now: float) -> Order | None:
        is_late = self.num_starts > 1 and now - self._since_s > self.bounds.start_timeout_s
        if is_late:
            self.why = Reason.TOO_SLOW
        return Order.KILL if is_late else None

    def _judged(self, now: float) -> Order | None:
        bounds = self.bounds
        for probe, patience_s, reason in (
            (Probe.STUCK, bounds.stuck_patience_s, Reason.STUCK),
            (Probe.SILENT, bounds.silent_patience_s, Reason.SILENT),
        ):
            since_s = self._bad_since_s.get(probe)
            if since_s is not None and now - since_s >= patience_s:
                self.why = reason
                return Order.KILL
        limit = bounds.resident_bytes_max
        if limit is not None and self.resident_bytes > limit:
            self.why = Reason.TOO_FAT
            return Order.TERMINATE
        return None

    # --- what the supervisor reports

    def started(self, now: float) -> None:
        self._move(State.STARTING, now)
        self.num_starts += 1
        self.resident_bytes = 0
        self.why = Reason.EXITED

    def ready(self, now: float) -> None:
        self.load_s = now - self._since_s
        self._move(State.UP, now)
        self._bad_since_s.clear()

    def probed(self, probe: Probe, now: float) -> None:
        """A look at a process that is UP; in other states it means nothing."""
        if probe is Probe.FINE:
            self._bad_since_s.clear()
        else:
            self._bad_since_s.setdefault(probe, now)

    def weighed(self, resident_bytes: int) -> None:
        self.resident_bytes = resident_bytes

    def terminated(self, now: float) -> None:
        """It has been told to drain and go."""
        self._move(State.ENDING, now)
        self._due_s = now + self.bounds.drain_timeout_s + self.bounds.kill_grace_s

    def stop(self, now: float) -> Order | None:
        """No more starts. What to do about the process that there may be."""
        self._is_stopping = True
        if self.state is State.DOWN:
            self._move(State.STOPPED, now)
            return None
        if self.state in (State.STARTING, State.UP):
            self.why = Reason.STOPPED
            return Order.TERMINATE
        return None  # ENDING already

    def exited(self, now: float) -> None:
        """The process is gone, whatever the cause."""
        was, lasted_s = self.state, now - self._since_s
        if self._is_stopping:
            self._move(State.STOPPED, now)
            return
        self._move(State.DOWN, now)
        if was is State.UP and lasted_s >= self.bounds.stable_after_s:
            self._num_failures = 0
        wait_s = 0.0
        if was is not State.ENDING:  # an end that was ordered is no failure
            wait_s = _backoff_s(self._num_failures)
            self._num_failures += 1
        self._due_s = now + wait_s

    # --- what clients are told

    def retry_after_s(self, now: float) -> float:
        """When it is expected to serve again, from the time that its latest start took."""
        load_s = LOAD_UNKNOWN_S if self.load_s is None else self.load_s
        if self._is_stopping:
            return RETRY_AFTER_STOPPING_S
        match self.state:
            case State.DOWN:
                return max(self._due_s - now, 0.0) + load_s
            case State.STARTING:
                return max(load_s - (now - self._since_s), 1.0)
            case State.ENDING:
                return load_s + min(self.bounds.drain_timeout_s, max(self._due_s - now, 0.0))
        return load_s  # up as far as is known here: whoever asks has seen it fail

    def _move(self, new: State, now: float) -> None:
        if new not in TRANSITIONS[self.state]:
            raise IllegalMove(f"an engine process that is {self.state} cannot become {new}")
        self.state, self._since_s = new, now


def _backoff_s(num_failures: int) -> float:
    """At once after the first failure, then 0.5, 1, 2, … seconds."""
    if num_failures == 0:
        return 0.0
    return float(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** (num_failures - 1)))
