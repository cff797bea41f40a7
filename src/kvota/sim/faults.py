"""What goes wrong in a simulated world, all of it decided before it starts.

error        the model runtime raises; sometimes for the whole step only, sometimes again for one
             of its chunks alone, whose request then has to end
slow step    a step takes longer than it should
storm        at one moment a share of all open requests is cancelled
leave        a client goes away some time after it asked
clock jump   the machine was suspended: time moves on and nothing was computed

Errors and slow steps come by chance, at a rate, or at a moment: then they strike the first step
that begins after it. Whom a storm cancels and whose chunks fail again is drawn from the seed.
"""

from collections import deque
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class StepError:
    at_s: float
    share: float = 0.0  # of the step's requests, that fail again alone


@dataclass(frozen=True, slots=True)
class SlowStep:
    at_s: float
    seconds: float  # longer than it should be


Fault = StepError | SlowStep | Storm | Jump


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that was planned for a moment, and what it did."""

    fault: Fault
    at_s: float
    effect: str


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
    errors: tuple[StepError, ...] = ()
    slow_steps: tuple[SlowStep, ...] = ()

    @property
    def of_steps(self) -> Sequence[StepError | SlowStep]:
        return [*self.errors, *self.slow_steps]


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
    _struck: list[Strike] = field(default_factory=list, init=False)
    _errors_due: deque[StepError] = field(default_factory=deque, init=False)
    _slow_due: deque[SlowStep] = field(default_factory=deque, init=False)
    _num_parts: int = field(default=0, init=False)  # of a failed step, still to be repeated
    _again_rate: float = field(default=0.0, init=False)  # of those parts, that fail again
    _is_next_clean: bool = field(default=False, init=False)

    @property
    def capacity(self) -> Capacity:
        return self.executor.capacity

    @property
    def struck(self) -> Sequence[Strike]:
        """The faults of a moment that have struck."""
        return self._struck

    def strike_next(self, fault: StepError | SlowStep) -> None:
        """Its moment has come: it strikes the next step."""
        if isinstance(fault, StepError):
            self._errors_due.append(fault)
        else:
            self._slow_due.append(fault)

    def execute(self, plan: StepPlan) -> StepResult:
        self._maybe_raise(plan)
        started_s = self.clock.now()
        result = self.executor.execute(plan)
        if self.rng.random() < self.plan.slow_rate:
            self.num_faults += 1
            self.clock.advance((self.clock.now() - started_s) * (self.plan.slow_factor - 1))
        if self._slow_due:
            self._be_late(self._slow_due.popleft())
        return result

    def _maybe_raise(self, plan: StepPlan) -> None:
        if self._num_parts:
            self._num_parts -= 1
            if plan.chunks and self.rng.random() < self._again_rate:
                self._fail("one request")
        elif self._is_next_clean:
            self._is_next_clean = False
        elif self._errors_due:
            error = self._errors_due.popleft()
            self._note(error, f"a step of {len(plan.chunks)} sequences failed")
            self._fail_step(plan, error.share)
        elif self.rng.random() < self.plan.error_rate:
            self._fail_step(plan, self.plan.chunk_error_rate)

    def _fail_step(self, plan: StepPlan, again_rate: float) -> None:
        self._num_parts = len(plan.chunks) + bool(plan.copies)
        self._again_rate = again_rate
        self._is_next_clean = True
        self._fail("the whole step")

    def _be_late(self, slow: SlowStep) -> None:
        self.num_faults += 1
        self.clock.advance(slow.seconds)
        self._note(slow, f"a step took {slow.seconds:g} s longer")

    def _note(self, fault: Fault, effect: str) -> None:
        self._struck.append(Strike(fault, self.clock.now(), effect))

    def _fail(self, what: str) -> None:
        self.num_faults += 1
        raise InjectedError(f"injected: the model failed on {what}")
