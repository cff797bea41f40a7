"""The engine: one loop, one writer, and exactly one ending for every request.

    while running:  drain ─▶ expire ─▶ plan ─▶ execute ─▶ apply ─▶ publish

- **drain** reads the letters that other threads left: submit, cancel, drain, shutdown.
- **expire** ends what is past its deadline.
- **plan** asks the scheduler for the next step; **execute** hands it to the model.
- **apply** turns sampled tokens into text and ends the choices that are done.
- **publish** hands all events of the turn over in one call.

Ending: whatever the reason, a request's sequences leave the scheduler and their KV blocks are free
before its `Ended` is published, in the same turn. Nothing of it follows.

One request cannot end the loop. A draw that fails ends its own request. A step that raises is
repeated chunk by chunk, and only the requests whose chunk raises alone are ended. When nothing can
be computed any more, turn after turn, and other tokens in the place of the last ones cannot either,
the model itself is broken: `EngineBroken` leaves the loop, and with it the process. A request that
breaks the model and is sent again and again does not do that.

The engine knows no threads. It is called from one, and only `Mailbox` and `gauges` may be used
from another.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kvota.core.clock import Clock
from kvota.core.errors import BackendFailed, ClientClosed, KvotaError, Outcome, RequestError
from kvota.core.plan import Chunk, ChunkResult, Executor, Sampled, StepPlan, StepResult
from kvota.core.request import EngineEvent, Paused, Request
from kvota.engine.answer import Answer, new_answer
from kvota.engine.lateness import not_begun, not_complete
from kvota.engine.mailbox import (
    Cancel,
    Drain,
    Letter,
    Look,
    Mailbox,
    Pause,
    Resume,
    Shutdown,
    Submit,
)
from kvota.engine.text import Vocabulary
from kvota.scheduler.scheduler import Scheduler
from kvota.scheduler.sequence import Sequence as TokenSequence
from kvota.scheduler.sequence import Status
from kvota.telemetry.metrics import EngineGauges

FAILED_STEPS_MAX = 3  # in a row, with nothing computed at all

Publish = Callable[[Sequence[tuple[str, EngineEvent]]], None]


class EngineBroken(RuntimeError):
    """No step can be computed any more. The process should end and be started again."""


class StepObserver(Protocol):
    """What wants to know of every step. Called on the engine's thread; must be quick."""

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
    ) -> None: ...

    def observe_failure(self, error: Exception) -> None:
        """The model runtime raised; the step is being repeated in parts."""


class Engine:
    """Runs requests on an executor. `step` is one turn of the loop."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        vocabulary: Vocabulary,
        clock: Clock,
        mailbox: Mailbox,
        publish: Publish,
        observer: StepObserver,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._vocabulary = vocabulary
        self._clock = clock
        self._mailbox = mailbox
        self._publish = publish
        self._observer = observer
        self._answers: dict[str, Answer] = {}
        self._deadlines: list[tuple[float, str, Outcome]] = []  # a heap
        self._events: list[tuple[str, EngineEvent]] = []
        self._failed_steps = 0
        self._num_taken = 0  # tokens of answers, in this turn
        self._num_preemptions = 0
        self._gauges = self._read_gauges()

    def step(self) -> bool:
        """One turn. False when there was nothing to compute."""
        started_s = self._clock.now()
        self._scheduler.tell_time(started_s)
        self._num_taken = 0
        self._drain()
        self._expire(started_s)
        self._hand_over()  # whoever ended does not wait for the step
        plan = self._scheduler.plan(started_s)
        if plan is None:
            self._hand_over()
            return False
        before_s = self._clock.now()
        result = self._execute(plan)
        executor_s = self._clock.now() - before_s
        self._apply(plan, result)
        self._hand_over()
        self._observe(plan, result, executor_s, self._clock.now() - started_s - executor_s)
        return True

    def has_work(self) -> bool:
        """True while a request has not ended."""
        return bool(self._answers)

    @property
    def gauges(self) -> EngineGauges:
        """The state after the latest turn. May be read from any thread."""
        return self._gauges

    # --- drain and expire ---------------------------------------------------------------------

    def _drain(self) -> None:
        for letter in self._mailbox.drain():
            self._open(letter)

    def _open(self, letter: Letter) -> None:
        match letter:
            case Submit(request):
                self._submit(request)
            case Cancel(request_id, outcome, error):
                gone = error or ClientClosed("The client closed the connection.")
                self._end(request_id, outcome, gone)
            case Pause(request_id):
                if self._scheduler.pause(request_id):
                    self._events.append((request_id, Paused()))
            case Resume(request_id):
                self._scheduler.resume(request_id)
            case Look(tell):
                tell([answer.state() for answer in self._answers.values()])
            case Drain(refusal):
                for request_id in self._never_run():
                    self._end(request_id, Outcome.REFUSED, refusal)
            case Shutdown():
                cut = BackendFailed("The server was shut down before the answer was complete.")
                for request_id in list(self._answers):
                    self._end(request_id, Outcome.SHUTDOWN, cut)

    def _submit(self, request: Request) -> None:
        group = self._scheduler.add(request)
        self._answers[request.id] = new_answer(group, self._vocabulary)
        for deadline_s, outcome in (
            (request.queue_deadline_s, Outcome.QUEUE_TIMEOUT),
            (request.deadline_s, Outcome.REQUEST_TIMEOUT),
        ):
            if deadline_s is not None:
                heapq.heappush(self._deadlines, (deadline_s, request.id, outcome))

    def _never_run(self) -> list[str]:
        return [
            request_id
            for request_id, answer in self._answers.items()
            if answer.group.first_scheduled_s is None
        ]

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, request_id, outcome = heapq.heappop(self._deadlines)
            answer = self._answers.get(request_id)
            if answer is None:
                continue
            limit_s = deadline_s - answer.request.arrived_s
            if outcome is Outcome.REQUEST_TIMEOUT:
                self._end(request_id, outcome, not_complete(limit_s))
            elif answer.group.first_scheduled_s is None:
                # The desk tells those in its own line; of a better moment to come, all that is
                # known here is that this wait was too short.
                self._end(request_id, outcome, not_begun(limit_s, retry_after_s=limit_s))

    # --- execute ------------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            result = self._executor.execute(plan)
        except Exception as error:  # the boundary to the model runtime, which may raise anything
            self._observer.observe_failure(error)
            return self._execute_in_parts(plan)
        self._failed_steps = 0
        return result

    def _execute_in_parts(self, plan: StepPlan) -> StepResult:
        """Repeat a failed step chunk by chunk and end the requests whose chunk fails again.

        Writing a position's KV twice is harmless. The copies go first and alone, so that they
        are not made over what a chunk has already written.
        """
        copied = not plan.copies or self._try(StepPlan((), plan.copies)) is not None
        results = [self._try(StepPlan((chunk,))) if copied else None for chunk in plan.chunks]
        self._failed_steps = 0 if any(results) else self._failed_steps + 1
        if self._failed_steps >= FAILED_STEPS_MAX:
            if not (copied and self._computes_others(plan.chunks[-1])):
                raise EngineBroken(f"{self._failed_steps} steps in a row failed completely")
            self._failed_steps = 0
        for chunk, result in zip(plan.chunks, results, strict=True):
            if result is None:
                self._end_of(chunk.sequence_id, "The model failed on this request.")
        return StepResult([ChunkResult() if r is None else r.chunks[0] for r in results])

    def _computes_others(self, chunk: Chunk) -> bool:
        """Whether as many other tokens can be computed in the place of a chunk that failed.

        Then what failed is the request, which is ended, and with it whatever this writes.
        """
        others = replace(
            chunk,
            token_ids=[0] * len(chunk.token_ids),
            draws=(),
            prompt_logprobs=None,
            next_token=None,
            speculated=(),
        )
        return self._try(StepPlan((others,))) is not None

    def _try(self, plan: StepPlan) -> StepResult | None:
        try:
            return self._executor.execute(plan)
        except Exception as error:  # the same boundary
            self._observer.observe_failure(error)
            return None

    def _end_of(self, sequence_id: int, message: str) -> None:
        sequence = self._scheduler.sequence(sequence_id)
        if sequence is not None:
            request_id = sequence.group.request.id
            self._end(request_id, Outcome.ENGINE_ERROR, BackendFailed(message))

    # --- apply --------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan, result: StepResult) -> None:
        now = self._clock.now()
        self._scheduler.tell_time(now)
        done = self._scheduler.commit(plan, result)
        events = self._events
        for group in done.prompts_read:
            request_id = group.request.id
            answer = self._answers[request_id]
            events.append((request_id, answer.read()))
            if group.request.max_tokens == 0:
                events.extend((request_id, delta) for delta in answer.close_empty())
                self._end(request_id, Outcome.COMPLETED, None)
        for sequence, sampled in done.sampled:
            self._take(sequence, sampled, now)

    def _take(self, sequence: TokenSequence, sampled: Sampled, now: float) -> None:
        """Add a sampled token to its answer, and end what it was the last token of."""
        request_id = sequence.group.request.id
        answer = self._answers.get(request_id)
        if answer is None or sequence.status is Status.FINISHED:
            return  # it has ended in this very step
        if sampled.error is not None:
            self._end(request_id, _outcome_of(sampled.error), sampled.error)
            return
        if answer.first_token_s is None:
            answer.first_token_s = now
        try:
            delta = answer.take(answer.choices[sequence.choice], sampled)
        except ValueError as error:
            self._end(request_id, Outcome.ENGINE_ERROR, BackendFailed(f"Grammar: {error}"))
            return
        self._events.append((request_id, delta))
        self._num_taken += 1
        if delta.finish is not None:
            self._scheduler.finish(sequence)
            if answer.num_open == 0:
                self._end(request_id, Outcome.COMPLETED, None)

    # --- the one ending -----------------------------------------------------------------------

    def _end(self, request_id: str, outcome: Outcome, error: KvotaError | None) -> None:
        """End a request: blocks first, then the word. Ids that have ended are passed over."""
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            now = self._clock.now()
            self._scheduler.tell_time(now)
            self._scheduler.abort(request_id)
            self._events.append((request_id, answer.ended(outcome, error, now)))
            answer.group.let_go()

    # --- publish ------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        self._gauges = self._read_gauges()
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def _observe(
        self, plan: StepPlan, result: StepResult, executor_s: float, overhead_s: float
    ) -> None:
        num_preemptions = self._scheduler.snapshot().preemptions
        num_prefilled = sum(len(c.token_ids) for c in plan.chunks if len(c.token_ids) > 1)
        num_speculated, num_right = _speculated(plan, result)
        self._observer.observe_step(
            executor_s=executor_s,
            overhead_s=overhead_s,
            num_sequences=len(plan.chunks),
            num_prefilled=num_prefilled,
            num_sampled=self._num_taken,
            num_speculated=num_speculated,
            num_speculated_right=num_right,
            num_preemptions=num_preemptions - self._num_preemptions,
        )
        self._num_preemptions = num_preemptions

    def _read_gauges(self) -> EngineGauges:
        now = self._scheduler.snapshot()
        return EngineGauges(
            num_blocks=now.cache.num_blocks,
            num_blocks_free=now.cache.free,
            num_blocks_cached=now.cache.cached,
            num_blocks_used=now.cache.used,
            kv_touched_bytes=now.cache.touched * self._executor.capacity.bytes_per_block,
            num_blocks_held_after_abort=self._scheduler.num_orphaned_blocks,
            block_size=now.cache.block_size,
            num_running=now.running,
            num_waiting=now.waiting + now.preempted,
        )


def _outcome_of(error: KvotaError) -> Outcome:
    """How a request ends whose draw failed."""
    return Outcome.INVALID if isinstance(error, RequestError) else Outcome.ENGINE_ERROR


def _speculated(plan: StepPlan, result: StepResult) -> tuple[int, int]:
    """How many tokens the step guessed, and how many of them were drawn."""
    num_guessed = num_right = 0
    for chunk, answer in zip(plan.chunks, result.chunks, strict=True):
        if chunk.speculated:
            num_guessed += len(chunk.speculated)
            num_right += max(0, len(answer.sampled) - 1)
    return num_guessed, num_right
