"""Steps as a live node records them, for `kvota calibrate` to learn what a step costs.

One JSON object a line:

    {"prefill": 384, "attention": 73728.0, "decodes": 12, "context": 5210, "seconds": 0.0412,
     "gap": 0.0004}

prefill    prompt tokens computed, over all chunks of more than one token
attention  Σ over those chunks of tokens · (positions before the chunk + tokens / 2)
decodes    chunks of one token, and speculated tokens: a row each
context    Σ over those of the positions they attend to
seconds    the executor's time for the step
gap        from the end of the step before to the beginning of this one, where somebody is in both:
           nobody was missing then, so it is what the engine takes between steps

A chunk of one token is a decode wherever it comes from: the model cannot tell the difference.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO

from kvota.core.clock import Clock
from kvota.core.plan import Capacity, Executor, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepTerms:
    """What a step's duration depends on."""

    prefill: int
    attention: float
    decodes: int
    context: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    terms: StepTerms
    seconds: float
    gap: float | None = None  # None: the engine may have waited for work


def terms_of(plan: StepPlan) -> StepTerms:
    prefill = decodes = context = 0
    attention = 0.0
    for chunk in plan.chunks:
        num_tokens = len(chunk.token_ids)
        if num_tokens == 1:
            for position in range(chunk.start, chunk.start + 1 + len(chunk.speculated)):
                decodes += 1
                context += position + 1
        else:
            prefill += num_tokens
            attention += num_tokens * (chunk.start + num_tokens / 2)
    return StepTerms(prefill, attention, decodes, context)


class RecordingExecutor:
    """Passes every step on and writes what it was and how long it took. Failed steps are not."""

    def __init__(self, executor: Executor, clock: Clock, file: TextIO) -> None:
        self._executor = executor
        self._clock = clock
        self._file = file
        self._last_ids: set[int] = set()  # of the sequences in the last step
        self._last_s = 0.0  # when it ended

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        ids = {chunk.sequence_id for chunk in plan.chunks}
        started_s = self._clock.now()
        gap = started_s - self._last_s if not ids.isdisjoint(self._last_ids) else None
        self._last_ids = set()
        result = self._executor.execute(plan)
        self._last_ids, self._last_s = ids, self._clock.now()
        write_record(self._file, StepRecord(terms_of(plan), self._last_s - started_s, gap))
        return result


def write_record(file: TextIO, record: StepRecord) -> None:
    terms = record.terms
    row = {
        "prefill": terms.prefill,
        "attention": terms.attention,
        "decodes": terms.decodes,
        "context": terms.context,
        "seconds": record.seconds,
    }
    if record.gap is not None:
        row["gap"] = record.gap
    file.write(json.dumps(row) + "\n")


def read_records(lines: Iterable[str]) -> Iterator[StepRecord]:
    """Raises ValueError, naming the line, when one is not a record."""
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            terms = StepTerms(
                int(row["prefill"]), float(row["attention"]), int(row["decodes"]),
                int(row["context"]),
            )  # fmt: skip
            gap = row.get("gap")
            yield StepRecord(terms, float(row["seconds"]), None if gap is None else float(gap))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is not a recorded step: {error}") from None
