import io

import pytest

from kvota.core.clock import ManualClock
from kvota.core.plan import Capacity, Chunk, ChunkResult, StepPlan, StepResult
from kvota.telemetry.steps import (
    RecordingExecutor,
    StepRecord,
    StepTerms,
    read_records,
    terms_of,
)


class SlowExecutor:
    """Takes a quarter of a second, or fails."""

    capacity = Capacity(8, 4, 0)

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.fails = False

    def execute(self, plan: StepPlan) -> StepResult:
        self.clock.advance(0.25)
        if self.fails:
            raise RuntimeError("no")
        return StepResult([ChunkResult() for _ in plan.chunks])


PLAN = StepPlan([Chunk(1, (7,), 20, ()), Chunk(2, (1, 2, 3, 4), 8, ())])


def test_what_is_written_is_read_back() -> None:
    clock, file = ManualClock(), io.StringIO()
    recording = RecordingExecutor(SlowExecutor(clock), clock, file)
    result = recording.execute(PLAN)
    assert len(result.chunks) == 2
    assert recording.capacity == SlowExecutor.capacity
    [record] = read_records(file.getvalue().splitlines())
    assert record == StepRecord(StepTerms(4, 4 * (8 + 2.0), 1, 21), 0.25)


def test_the_gap_is_known_where_somebody_is_in_both_steps() -> None:
    clock, file = ManualClock(), io.StringIO()
    recording = RecordingExecutor(SlowExecutor(clock), clock, file)
    other = StepPlan([Chunk(3, (7,), 20, ())])
    for plan, before_s in ((PLAN, 0.0), (PLAN, 0.125), (other, 5.0), (other, 0.5)):
        clock.advance(before_s)
        recording.execute(plan)
    gaps = [record.gap for record in read_records(file.getvalue().splitlines())]
    assert gaps == [None, 0.125, None, 0.5]


def test_a_failed_step_passes_on_and_is_not_recorded() -> None:
    clock, file = ManualClock(), io.StringIO()
    executor = SlowExecutor(clock)
    executor.fails = True
    with pytest.raises(RuntimeError, match="no"):
        RecordingExecutor(executor, clock, file).execute(PLAN)
    assert file.getvalue() == ""


def test_a_line_that_is_no_record_is_named() -> None:
    good = '{"prefill": 0, "attention": 0.0, "decodes": 1, "context": 5, "seconds": 0.01}'
    with pytest.raises(ValueError, match="line 2"):
        list(read_records([good, '{"prefill": 1}']))


def test_speculated_tokens_are_decodes_at_their_own_positions() -> None:
    guessing = Chunk(1, (7,), 10, (0,), speculated=(8, 9))
    assert terms_of(StepPlan([guessing, Chunk(2, (7,), 4, (1,))])) == StepTerms(
        prefill=0, attention=0.0, decodes=4, context=11 + 12 + 13 + 5
    )
