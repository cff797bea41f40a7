"""What goes wrong in a simulated world, all of it decided by the seed before it starts.

error        the model runtime raises; sometimes for the whole step only, sometimes again for one
             of its chunks alone, whose request then has to end
slow step    a step takes many times as long
storm        at one moment a share of all open requests is cancelled
leave        a client goes away some time after it asked
clock jump   the machine was suspended: time moves on and nothing was computed
"""

from dataclasses import dataclass, field
from random import Random

from kvota.core.clock import ManualClock
from kvota.core.plan import Capacity, Executor, StepPlan, StepResult


class InjectedError(RuntimeError):
    """The model runtime fails, because the fault plan says so."""


@dataclass(frozen=True, slots=True)
class Storm:
    at_s: float
    share: float  # of the open requests


@dataclass(frozen=True, slots=True)
class Jump:
    at_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Rates are per step or per request; the default is a world where nothing goes wrong."""

    error_rate: float = 0.0  # steps that raise
    chunk_error_rate: float = 0.0  # chunks of such a step that raise again
    slow_rate: float = 0.0
    slow_factor: float = 10.0
    leave_rate: float = 0.0  # clients that go away
    leave_after_s: float = 1.0  # at most, uniform
    storms: tuple[Storm, ...] = ()
    jumps: tuple[Jump, ...] = ()


def draw_faults(rng: Random, duration_s: float) -> FaultPlan:
    """A plan in which every kind of fault is there or not, by chance."""

    def maybe(value: float) -> float:
        return value if rng.random() < 0.5 else 0.0

    storms = [
        Storm(rng.uniform(0, duration_s), rng.uniform(0.2, 1.0)) for _ in range(rng.randint(0, 2))
    ]
    jumps = [
        Jump(rng.uniform(0, duration_s), rng.uniform(0.1, duration_s / 2))
        for _ in range(rng.randint(0, 1))
    ]
    return FaultPlan(
        error_rate=maybe(0.05),
        chunk_error_rate=maybe(0.2),
        slow_rate=maybe(0.03),
        leave_rate=maybe(0.3),
        leave_after_s=rng.uniform(0.01, duration_s),
        storms=tuple(storms),
        jumps=tuple(jumps),
    )


@dataclass(slots=True)
class FaultyExecutor:
    """Wraps an executor and fails as planned.

    The engine repeats a failed step chunk by chunk; the step after that never fails, so that no
    engine gives the model up for what is injected here.
    """

    executor: Executor
    clock: ManualClock
    plan: FaultPlan
    rng: Random
    num_faults: int = 0
    _num_parts: int = field(default=0, init=False)  # of a failed step, still to be repeated
    _is_next_clean: bool = field(default=False, init=False)

    @property
    def capacity(self) -> Capacity:
        return self.executor.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        self._maybe_raise(plan)
        started_s = self.clock.now()
        result = self.executor.execute(plan)
        if self.rng.random() < self.plan.slow_rate:
            self.num_faults += 1
            self.clock.advance((self.clock.now() - started_s) * (self.plan.slow_factor - 1))
        return result

    def _maybe_raise(self, plan: StepPlan) -> None:
        if self._num_parts:
            self._num_parts -= 1
            if plan.chunks and self.rng.random() < self.plan.chunk_error_rate:
                self._fail("one request")
        elif self._is_next_clean:
            self._is_next_clean = False
        elif self.rng.random() < self.plan.error_rate:
            self._num_parts = len(plan.chunks) + bool(plan.copies)
            self._is_next_clean = True
            self._fail("the whole step")

    def _fail(self, what: str) -> None:
        self.num_faults += 1
        raise InjectedError(f"injected: the model failed on {what}")
