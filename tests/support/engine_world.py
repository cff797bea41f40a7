"""An engine without threads, model or real time: the whole of it in one object, stepped by hand."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from kvota.core.clock import ManualClock
from kvota.core.plan import Executor
from kvota.core.request import (
    Delta,
    Ended,
    EngineEvent,
    PromptRead,
    Request,
    SamplingParams,
)
from kvota.engine.engine import Engine
from kvota.engine.mailbox import Cancel, Mailbox, Submit
from kvota.engine.text import Vocabulary
from kvota.kv.cache import KVCache
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Scheduler
from tests.support.kv_executor import VOCAB_SIZE, HashingExecutor

# Token t of the hashing executor reads as one printable character.
HASHING_VOCABULARY = Vocabulary([bytes([33 + token % 90]) for token in range(VOCAB_SIZE)])


class NullObserver:
    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.totals: Counter[str] = Counter()  # of everything that steps are observed with

    def observe_step(self, **observed: Any) -> None:
        self.totals.update(observed)

    def observe_failure(self, error: Exception) -> None:
        self.failures.append(error)


class EngineWorld:
    """Submit, step, look. `check()` of the scheduler runs after every step."""

    def __init__(
        self,
        executor: Executor | None = None,
        *,
        vocabulary: Vocabulary = HASHING_VOCABULARY,
        prefix_cache: bool = True,
        **limits: Any,
    ) -> None:
        self.executor = executor or HashingExecutor(num_blocks=64, block_size=4)
        capacity = self.executor.capacity
        self.clock = ManualClock(100.0)
        self.mailbox = Mailbox()
        self.observer = NullObserver()
        self.scheduler = Scheduler(
            KVCache(capacity.num_blocks, capacity.block_size, prefix_cache=prefix_cache),
            SchedulerLimits(**limits),
        )
        self.events: dict[str, list[EngineEvent]] = defaultdict(list)
        self.engine = Engine(
            self.executor,
            self.scheduler,
            vocabulary=vocabulary,
            clock=self.clock,
            mailbox=self.mailbox,
            publish=self._keep,
            observer=self.observer,
        )

    def submit(self, request_id: str, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> Request:
        sampling = fields.pop("sampling", SamplingParams(seed=7))
        fields = {"max_tokens": 8, "arrived_s": self.clock.now()} | fields
        request = Request(id=request_id, prompt=list(prompt), sampling=sampling, **fields)
        self.mailbox.post(Submit(request))
        return request

    def cancel(self, request_id: str) -> None:
        self.mailbox.post(Cancel(request_id))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()
            self.clock.advance(0.01)
            self.scheduler.check()

    def run(self, steps_max: int = 10_000) -> None:
        """Step until nothing is left to do."""
        self.step()
        while self.engine.has_work():
            assert steps_max > 0, "the engine does not come to an end"
            steps_max -= 1
            self.step()

    def deltas(self, request_id: str, choice: int = 0) -> list[Delta]:
        events = self.events[request_id]
        return [e for e in events if isinstance(e, Delta) and e.choice == choice]

    def text(self, request_id: str, choice: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas(request_id, choice))

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        return [token for delta in self.deltas(request_id, choice) for token in delta.token_ids]

    def ended(self, request_id: str) -> Ended:
        """The one ending; it must be there, be alone and be last."""
        endings = [event for event in self.events[request_id] if isinstance(event, Ended)]
        assert len(endings) == 1, f"{request_id} ended {len(endings)} times"
        assert self.events[request_id][-1] is endings[0]
        return endings[0]

    def prompt_read(self, request_id: str) -> PromptRead:
        [read] = [event for event in self.events[request_id] if isinstance(event, PromptRead)]
        return read

    @property
    def num_blocks_used(self) -> int:
        return self.scheduler.snapshot().cache.used

    def _keep(self, events: Sequence[tuple[str, EngineEvent]]) -> None:
        for request_id, event in events:
            assert not (self.events[request_id] and isinstance(self.events[request_id][-1], Ended))
            self.events[request_id].append(event)
