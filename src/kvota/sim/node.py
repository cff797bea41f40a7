"""The node of a simulated world: the live one's parts, over an executor that only counts.

A pause is done as any server can do it: the request is cancelled, its tokens are kept, and when it
may go on it is submitted again, under a new name, with them as part of its prompt. Requests for
several choices keep their place in the engine instead and only give up their KV, because their
choices differ.
"""

from dataclasses import dataclass, field, replace
from random import Random

from kvota.core.clock import ManualClock
from kvota.core.errors import Outcome
from kvota.core.plan import Capacity, Executor
from kvota.core.request import Delta, Ended, Event, Request
from kvota.engine.engine import Engine
from kvota.engine.mailbox import Cancel, Mailbox, Submit
from kvota.engine.text import Vocabulary
from kvota.kv.cache import KVCache
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Scheduler
from kvota.sim.checkers import BudgetedExecutor
from kvota.sim.executor import WORD, StepCost, StepCostExecutor
from kvota.sim.faults import FaultPlan, FaultyExecutor

_VOCABULARY = Vocabulary(())  # every token reads as nothing: text costs next to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The simulated machine and the engine's limits."""

    capacity: Capacity
    cost: StepCost
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class Paused:
    """The request's blocks are back, and it can go on."""


@dataclass(slots=True)
class _Run:
    """A request in the engine."""

    request: Request  # as it was first submitted
    engine_id: str  # what the engine knows it by now
    produced: int = 0
    num_preemptions: int = 0
    is_pausing: bool = False


class StepCount:
    """A StepObserver that counts."""

    def __init__(self) -> None:
        self.num_steps = 0

    def observe_step(
        self, *, executor_s: float, overhead_s: float, num_sequences: int, num_prefilled: int,
        num_sampled: int, num_preemptions: int,
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
        self.executor = StepCostExecutor(capacity, settings.cost, clock)
        self.faulty = FaultyExecutor(self.executor, clock, faults, rng)
        executor: Executor = BudgetedExecutor(self.faulty, limits)
        self.cache = KVCache(
            capacity.num_blocks, capacity.block_size, prefix_cache=settings.prefix_cache
        )
        self.scheduler = Scheduler(self.cache, limits)
        self.steps = StepCount()
        self._mailbox = Mailbox()
        self._published: list[tuple[str, Event]] = []
        self._paused: list[str] = []
        self._runs: dict[str, _Run] = {}
        self._names: dict[str, str] = {}  # the engine's name of a request -> its own
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

    def submit(self, request: Request) -> None:
        """Run it; or, if it was paused, let it go on."""
        run = self._runs.get(request.id)
        if run is None:
            self._runs[request.id] = _Run(request, request.id)
            self._names[request.id] = request.id
            self._mailbox.post(Submit(request))
        elif request.n == 1:
            run.engine_id = f"{request.id}+{run.produced}-{run.num_preemptions}"
            self._names[run.engine_id] = request.id
            self._mailbox.post(Submit(_continued(run)))

    def cancel(self, request_id: str) -> None:
        run = self._runs[request_id]
        run.is_pausing = False
        self._mailbox.post(Cancel(run.engine_id))

    def pause(self, request_id: str) -> None:
        """Answered by `Paused`, unless it ends before."""
        run = self._runs[request_id]
        if run.request.n == 1:
            run.is_pausing = True
            self._mailbox.post(Cancel(run.engine_id))
        else:
            self.scheduler.pause(request_id)
            self._paused.append(request_id)

    def forget(self, request_id: str) -> None:
        """A paused request will not go on; nothing more is heard of it."""
        if self._runs.pop(request_id).request.n > 1:
            self._mailbox.post(Cancel(request_id))

    def take(self) -> list[tuple[str, Event | Paused]]:
        """What the engine published since the last call, pauses told apart from endings."""
        published, self._published[:] = self._published.copy(), []
        events: list[tuple[str, Event | Paused]] = [(one, Paused()) for one in self._paused]
        self._paused.clear()
        for engine_id, event in published:
            request_id = self._names[engine_id]
            run = self._runs.get(request_id)
            if isinstance(event, Ended):
                del self._names[engine_id]
            if run is not None:
                events.append((request_id, self._told(run, event)))
        return events

    def _told(self, run: _Run, event: Event) -> Event | Paused:
        if type(event) is Delta:
            run.produced += len(event.token_ids)
        elif isinstance(event, Ended):
            run.num_preemptions += event.num_preemptions
            if run.is_pausing and event.outcome is Outcome.CLIENT_CLOSED:
                run.is_pausing = False
                run.num_preemptions += 1
                return Paused()
            del self._runs[run.request.id]
            return replace(event, num_preemptions=run.num_preemptions)
        return event


def _continued(run: _Run) -> Request:
    """The request with what it has produced as the end of its prompt."""
    request, produced = run.request, run.produced
    sampling = request.sampling
    return replace(
        request,
        id=run.engine_id,
        prompt=[*request.prompt, *[WORD] * produced],
        max_tokens=request.max_tokens - produced,
        sampling=replace(sampling, min_tokens=sampling.min_tokens - produced),
        queue_deadline_s=None,
    )
