"""When to come back to a node that takes no work: computed from what was measured here.

    draining    what is left of the drain, and then a process like this one has to load
    not running a process like this one has to load

How long that takes is known from this very process: same machine, same model, same settings.
"""

import time

import psutil

from kvota.core.clock import Clock
from kvota.core.errors import Refusal, Refused
from kvota.node.ports import RunnerState


class Comeback:
    """`load_s` is what this process took from its start until it could serve."""

    def __init__(self, clock: Clock, *, load_s: float, drain_timeout_s: float) -> None:
        self._clock = clock
        self._load_s = load_s
        self._drain_timeout_s = drain_timeout_s
        self._drain_ends_s: float | None = None  # clock time; None before it begins

    def drain_begins(self) -> None:
        self._drain_ends_s = self._clock.now() + self._drain_timeout_s

    def refusal(self, state: RunnerState) -> Refused:
        """What to tell whoever brings work in a state that takes none."""
        assert state is not RunnerState.RUNNING
        if state is RunnerState.DRAINING:
            return Refused(
                Refusal.DRAINING,
                "The server is shutting down and takes no new requests.",
                retry_after_s=self._drain_left_s() + self._load_s,
            )
        is_starting = state is RunnerState.STARTING
        return self.restart("The engine is starting." if is_starting else "The engine has ended.")

    def restart(self, message: str) -> Refused:
        """What to tell whoever brings work to an engine that has to be started anew."""
        return Refused(Refusal.ENGINE_RESTARTING, message, retry_after_s=self._load_s)

    def _drain_left_s(self) -> float:
        if self._drain_ends_s is None:
            return self._drain_timeout_s
        return max(0.0, self._drain_ends_s - self._clock.now())


def process_age_s() -> float:
    """Seconds since this process was started, interpreter and imports included."""
    started_s: float = psutil.Process().create_time()
    return max(0.0, time.time() - started_s)
