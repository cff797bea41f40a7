"""The real engine, scheduler and KV cache over a model that does nothing: their cost alone."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvota.core.clock import SystemClock
from kvota.core.plan import Capacity, ChunkResult, Sampled, StepPlan, StepResult
from kvota.core.request import EngineEvent, Request, SamplingParams
from kvota.engine.engine import Engine
from kvota.engine.mailbox import Mailbox, Submit
from kvota.engine.text import Vocabulary
from kvota.kv.cache import KVCache
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Scheduler

BLOCK_SIZE = 32
PIECES = [f" word{i}".encode() for i in range(1000)]


class NullExecutor:
    """Samples the same ordinary token for every draw, at once."""

    def __init__(self, num_blocks: int) -> None:
        self.capacity = Capacity(num_blocks, BLOCK_SIZE, bytes_per_block=0)
        self._answers = {n: ChunkResult([Sampled(7)] * n) for n in (0, 1)}

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([self._answers[len(chunk.draws)] for chunk in plan.chunks])


@dataclass(slots=True)
class Overheads:
    """A StepObserver that keeps, per step, the seconds spent outside the executor."""

    seconds: list[float] = field(default_factory=list)
    num_sequences: list[int] = field(default_factory=list)
    num_preemptions: int = 0

    def observe_step(
        self,
        *,
        executor_s: float,
        overhead_s: float,
        num_sequences: int,
        num_prefilled: int,
        num_sampled: int,
        num_speculated: int,
        num_speculated_right: int,
        num_preemptions: int,
    ) -> None:
        self.seconds.append(overhead_s)
        self.num_sequences.append(num_sequences)
        self.num_preemptions += num_preemptions

    def observe_failure(self, error: Exception) -> None:
        raise error

    def median_s(self, num_sequences: int) -> float:
        """Median over the steps with exactly so many sequences."""
        pairs = zip(self.seconds, self.num_sequences, strict=True)
        return statistics.median(seconds for seconds, number in pairs if number == num_sequences)


@dataclass(slots=True)
class NullEngine:
    """An engine whose requests are posted and whose turns are taken by hand."""

    cache: KVCache
    scheduler: Scheduler
    engine: Engine
    mailbox: Mailbox
    overheads: Overheads
    num_submitted: int = 0

    def submit(self, prompt: Sequence[int], num_tokens: int) -> None:
        number = self.num_submitted = self.num_submitted + 1
        request = Request(
            id=f"r{number}",
            prompt=list(prompt),
            max_tokens=num_tokens,
            sampling=SamplingParams(temperature=0.0),
            arrived_s=0.0,
        )
        self.mailbox.post(Submit(request))


def null_engine(num_blocks: int, limits: SchedulerLimits) -> NullEngine:
    cache = KVCache(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(cache, limits)
    mailbox, overheads = Mailbox(), Overheads()

    def publish(events: Sequence[tuple[str, EngineEvent]]) -> None:
        """Nobody listens; handing over to another thread is measured with the server."""

    engine = Engine(
        NullExecutor(num_blocks),
        scheduler,
        vocabulary=Vocabulary(PIECES),
        clock=SystemClock(),
        mailbox=mailbox,
        publish=publish,
        observer=overheads,
    )
    return NullEngine(cache, scheduler, engine, mailbox, overheads)
