"""Every way to end, in every state: one ending, and nothing held after the step it happens in.

The real desk, runner and engine with its thread. The subject is brought into a state while the
engine stands within a step; then it is made to end. `ENDINGS` is the whole table.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvota.core.errors import Outcome
from kvota.core.plan import Chunk, StepPlan, StepResult
from kvota.core.request import Band, Ended, Event, FinishReason, Request, SamplingParams
from kvota.desk.ticket import Stage
from kvota.node.ports import RequestStream, RunnerState
from tests.support.engine_world import HASHING_VOCABULARY
from tests.support.kv_executor import VOCAB_SIZE, reference_tokens
from tests.support.runner_node import (
    PATIENCE_S,
    RunnerNode,
    StepwiseExecutor,
    ended,
    read,
    running,
    tokens,
    until,
)

FIRST_OWN_TOKEN = VOCAB_SIZE + 1_000  # only the subject's prompt has such tokens
PROMPT = range(FIRST_OWN_TOKEN, FIRST_OWN_TOKEN + 40)  # three steps of at most 16 tokens
LATER_S = 5.0

STATES = ("queued", "granted", "prefill", "decode", "pausing", "paused", "closing")
TIMEOUTS = ("queue timeout", "first-token timeout", "request timeout")
AT_ONCE = {"client gone", "delete", *TIMEOUTS}  # need no step of their own

DONE, GONE, LATE = Outcome.COMPLETED, Outcome.CLIENT_CLOSED, Outcome.REQUEST_TIMEOUT
WAITED, BROKE = Outcome.QUEUE_TIMEOUT, Outcome.ENGINE_ERROR
CUT, REFUSED = Outcome.SHUTDOWN, Outcome.REFUSED

# How the subject ends, by state in the order of STATES; None: it cannot happen there.
ENDINGS: dict[str, tuple[Outcome | None, ...]] = {
    "completed": (DONE, DONE, DONE, DONE, DONE, DONE, GONE),
    "stop string": (DONE, DONE, DONE, DONE, DONE, DONE, GONE),
    "client gone": (GONE, GONE, GONE, GONE, GONE, GONE, GONE),
    "delete": (GONE, GONE, GONE, GONE, GONE, GONE, GONE),
    "queue timeout": (WAITED, WAITED, None, None, None, None, None),
    "first-token timeout": (WAITED, LATE, LATE, None, None, None, None),
    "request timeout": (LATE, LATE, LATE, LATE, LATE, LATE, GONE),
    "executor error": (BROKE, BROKE, BROKE, BROKE, BROKE, BROKE, BROKE),
    "drain": (REFUSED, REFUSED, DONE, DONE, DONE, DONE, GONE),
    "shutdown": (REFUSED, REFUSED, CUT, CUT, CUT, CUT, GONE),
}
CASES = [
    (ending, state, outcome)
    for ending, outcomes in ENDINGS.items()
    for state, outcome in zip(STATES, outcomes, strict=True)
    if outcome is not None
]


class FragileExecutor(StepwiseExecutor):
    """When told to, fails every chunk of the subject."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_subject = False

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if self.fails_subject and any(map(_is_subjects, plan.chunks)):
            raise RuntimeError("the subject's chunk fails")
        return result


def _is_subjects(chunk: Chunk) -> bool:
    first = chunk.draws[0].tokens[0] if chunk.draws else chunk.token_ids[0]
    return first >= FIRST_OWN_TOKEN


@dataclass
class Stand:
    """The subject in its state, the engine within a step."""

    node: RunnerNode
    executor: FragileExecutor
    request: Request
    stream: RequestStream
    others: list[RequestStream]


@asynccontextmanager
async def standing(state: str, ending: str) -> AsyncIterator[Stand]:
    executor = FragileExecutor()
    first_s = LATER_S if ending == "first-token timeout" else None
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(
            running(
                executor,
                max_num_batched_tokens=16,
                first_token_timeout_s=first_s,
                preempt_after_s=0.0,
                preempt_min_run_s=0.0,
            )
        )
        stack.callback(executor.allow, 10_000)
        others = []
        if state in ("queued", "granted", "pausing", "paused"):
            num = {"queued": 8, "granted": 1}.get(state, 7)
            others.append(node.submit("other", n=num, max_tokens=30)[1])
            await until(lambda: executor.is_waiting)
        request, stream = _submit_subject(node, ending, state)
        await _reach(state, node, executor, stream, others)
        yield Stand(node, executor, request, stream, others)


def _submit_subject(node: RunnerNode, ending: str, state: str) -> tuple[Request, RequestStream]:
    now = node.clock.now()
    fields: dict[str, Any] = {"max_tokens": 20}
    if ending == "queue timeout":
        fields["queue_deadline_s"] = now + LATER_S
    if ending == "request timeout":
        fields["deadline_s"] = now + LATER_S
    if state in ("pausing", "paused"):
        fields["band"] = Band.BATCH
    if ending == "stop string":
        plain = Request(
            id="", prompt=list(PROMPT), max_tokens=20, sampling=SamplingParams(seed=3),
            arrived_s=now,
        )  # fmt: skip
        text = b"".join(HASHING_VOCABULARY.pieces[token] for token in reference_tokens(plain, 0))
        fields["stop"] = (text[5:8].decode(),)
    return node.submit("subject", PROMPT, **fields)


async def _reach(
    state: str,
    node: RunnerNode,
    executor: FragileExecutor,
    stream: RequestStream,
    others: list[RequestStream],
) -> None:
    stage = {"queued": Stage.QUEUED, "granted": Stage.GRANTED}.get(state)
    if state in ("prefill", "decode", "closing"):
        await executor.do_steps(1 if state == "prefill" else 4)
        stage = Stage.GRANTED if state == "prefill" else Stage.RUNNING
    if state in ("pausing", "paused"):
        while node.desk.stage("subject") is not Stage.RUNNING:
            await executor.do_steps(1)
        others.append(node.submit("urgent", max_tokens=3)[1])
        node.clock.advance(1.0)
        stage = Stage.PAUSING
    await until(lambda: node.desk.stage("subject") is stage)
    if state == "paused":
        await executor.do_steps(1)
        await until(lambda: node.desk.stage("subject") is Stage.PAUSED)
    if state == "closing":
        stream.cancel()
        assert node.desk.stage("subject") is Stage.CLOSING


def _end(ending: str, stand: Stand) -> None:
    node = stand.node
    if ending == "client gone":
        stand.stream.cancel()
        stand.stream.cancel()
    elif ending == "delete":
        node.runner.cancel("subject")
    elif ending in TIMEOUTS:
        node.clock.advance(LATER_S + 0.1)
    elif ending == "executor error":
        stand.executor.fails_subject = True
    elif ending == "drain":
        node.runner.drain()


@pytest.mark.parametrize(("ending", "state", "outcome"), CASES)
async def test_a_request_ends_once_and_holds_nothing_after(
    ending: str, state: str, outcome: Outcome
) -> None:
    async with standing(state, ending) as stand:
        node, executor = stand.node, stand.executor
        reading = asyncio.create_task(read(stand.stream))
        _end(ending, stand)
        stopping = None
        if ending == "shutdown":
            stopping = asyncio.create_task(node.runner.stop())
            await until(lambda: node.runner.state is RunnerState.DRAINING)
        if ending in AT_ONCE or state == "closing":
            await _is_back_within_a_step(stand, reading)
        executor.allow(10_000)
        events = await reading
        for other in stand.others:
            await read(other)
        if stopping is not None:
            await asyncio.wait_for(stopping, PATIENCE_S)
        assert ended(events).outcome is outcome
        assert sum(isinstance(event, Ended) for event in events) == 1
        _check_text(ending, stand.request, events, outcome)
    _check_that_nothing_is_left(stand.node)


async def _is_back_within_a_step(stand: Stand, reading: "asyncio.Task[list[Event]]") -> None:
    """With the step under way, and no other, all that it held is back."""
    node = stand.node
    over = (Stage.CLOSING, Stage.CLOSED)
    await until(lambda: node.desk.stage("subject") in over or _engine_knows_the_deadline(stand))
    stand.executor.allow(2 if stand.executor.fails_subject else 1)  # a failed chunk is tried again
    await asyncio.wait_for(asyncio.shield(reading), PATIENCE_S)
    await until(lambda: node.desk.stage("subject") is Stage.CLOSED)
    await until(lambda: node.desk.snapshot().held_after_end_tokens == 0)  # others were late, too
    assert node.engine.gauges.num_blocks_held_after_abort == 0


def _engine_knows_the_deadline(stand: Stand) -> bool:
    deadlines = (stand.request.queue_deadline_s, stand.request.deadline_s)
    return any(at is not None and at <= stand.node.clock.now() for at in deadlines)


def _check_text(ending: str, request: Request, events: list[Event], outcome: Outcome) -> None:
    """What was produced is what would have been produced alone, as far as it came."""
    produced = tokens(events)
    assert produced == reference_tokens(request, 0)[: len(produced)]
    if outcome is Outcome.COMPLETED:
        finishes = [finish for event in events if (finish := getattr(event, "finish", None))]
        wanted = FinishReason.STOP if ending == "stop string" else FinishReason.LENGTH
        assert finishes == [wanted]


def _check_that_nothing_is_left(node: RunnerNode) -> None:
    node.desk.check()
    node.scheduler.check()  # and with it the cache
    seen, gauges = node.desk.snapshot(), node.engine.gauges
    assert seen.held_tokens == seen.pinned_tokens == seen.num_choices == 0
    assert seen.tally.arrived == seen.tally.ended.total()
    assert sum(seen.running.values()) == sum(seen.waiting.values()) == 0
    assert gauges.num_blocks_used == gauges.num_blocks_held_after_abort == 0
    assert node.runner.num_open == 0
    assert node.crashes == []


def test_the_table_leaves_out_only_what_cannot_be() -> None:
    """A queue deadline ends who has not begun; a first-token one who has no token; no others."""
    assert len(CASES) == len(ENDINGS) * len(STATES) - 5 - 4
