"""The node of a simulated world: the live one's parts, over an executor that only counts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from kvota.core.clock import ManualClock
from kvota.core.plan import Capacity, Executor
from kvota.core.request import Ended, EngineEvent, Request
from kvota.engine.engine import Engine
from kvota.engine.mailbox import Cancel, Mailbox, Pause, Resume, Submit
from kvota.engine.text import Vocabulary
from kvota.kv.cache import KVCache
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Scheduler
from kvota.sim.checkers import BudgetedExecutor
from kvota.sim.executor import StepCost, StepCostExecutor
from kvota.sim.faults import FaultPlan, FaultyExecutor
from kvota.sim.jitter import Jitter

_VOCABULARY = Vocabulary(())  # every token reads as nothing: text costs next to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The simulated machine and the engine's limits."""

    capacity: Capacity
    cost: StepCost
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    prefix_cache: bool = True
    jitter: Jitter | None = None  # of the step cost, as calibrated


class StepCount:
    """A StepObserver that counts."""

    def __init__(self) -> None:
        self.num_steps = 0

    def observe_step(
        self, *, executor_s: float, overhead_s: float, num_sequences: int, num_prefilled: int,
        num_sampled: int, num_speculated: int, num_speculated_right: int, num_preemptions: int,
    ) -> None:  # fmt: skip
        self.num_steps += 1

    def observe_failure(self, error: Exception) -> None:
        """Injected; the fault plan counts them."""


class SimulatedNode:
    """Engine, scheduler, cache and executor. Attributes may be read by the world around it."""

    def __init__(
        self, settings: NodeSettings, faults: FaultPlan, clock: ManualClock, rng: Random
    ) -> None:
        capacity, limits = settings.capacity, settings.limits
        jitter = None if settings.jitter is None else settings.jitter.player(rng)
        self.executor = StepCostExecutor(capacity, settings.cost, clock, jitter)
        self.faulty = FaultyExecutor(self.executor, clock, faults, rng)
        executor: Executor = BudgetedExecutor(self.faulty, limits)
        self.cache = KVCache(
            capacity.num_blocks, capacity.block_size, prefix_cache=settings.prefix_cache
        )
        self.scheduler = Scheduler(self.cache, limits)
        self.steps = StepCount()
        self._mailbox = Mailbox()
        self._published: list[tuple[str, EngineEvent]] = []
        self._known: set[str] = set()
        self.engine = Engine(
            executor,
            self.scheduler,
            vocabulary=_VOCABULARY,
            clock=clock,
            mailbox=self._mailbox,
            publish=self._published.extend,
            observer=self.steps,
        )

    @property
    def kv_used(self) -> float:
        """The share of all blocks that somebody uses."""
        gauges = self.engine.gauges
        return gauges.num_blocks_used / gauges.num_blocks

    @property
    def has_letters(self) -> bool:
        """The engine has not read all that was posted to it."""
        return not self._mailbox._letters.empty()

    def has_leapt(self, seconds: Iterable[float]) -> None:
        """Steps of so long were taken without the engine (`leap.py`)."""
        for each_s in seconds:
            self.executor.busy_s += each_s
            self.steps.num_steps += 1
        self.engine._gauges = self.engine._read_gauges()

    def submit(self, request: Request) -> None:
        """Run it; or, if it was paused, let it go on."""
        if request.id in self._known:
            self._mailbox.post(Resume(request.id))
        else:
            self._known.add(request.id)
            self._mailbox.post(Submit(request))

    def cancel(self, request_id: str) -> None:
        self._mailbox.post(Cancel(request_id))

    def pause(self, request_id: str) -> None:
        """Answered by `Paused`, unless it ends before."""
        self._mailbox.post(Pause(request_id))

    def forget(self, request_id: str) -> None:
        """A paused request will not go on; nothing more is heard of it."""
        self._known.remove(request_id)
        self._mailbox.post(Cancel(request_id))

    def take(self) -> list[tuple[str, EngineEvent]]:
        """What the engine published since the last call."""
        published, self._published[:] = self._published.copy(), []
        events = [one for one in published if one[0] in self._known]
        self._known.difference_update(name for name, event in events if isinstance(event, Ended))
        return events
