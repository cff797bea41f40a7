"""Steps in which nothing is decided, taken in one leap.

Between two arrivals or endings a node mostly decodes: the same sequences, one token each, step
after step. What such a step changes is known before it is taken, so a run of them is computed
without the turns of the loop, several times faster:

    turn   drain · expire · plan · execute · apply · publish · take · tick      for each step
    leap   how long is each step · which blocks are taken and filled · k tokens for everybody

A step can be part of a leap when the engine decides nothing in it: no letter is in its mailbox, no
deadline of its own has passed, nobody can be admitted, and everybody who runs has one choice and is
past the first token. Only the last step of a leap may bring somebody's last token, or end at a
moment at which something happens around the engine: an arrival, a deadline of the desk, a look at
the line. The engine ends whoever it is, and the world and the desk do the rest themselves.

The result is that of the turns to the last bit: floats are added in the same order, blocks are
taken and filled in the same order. For that this file knows more of the parts than anything else
may, and `tests/sim/test_leap.py` holds it to them: the same worlds with and without.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

from kvota.core.clock import ManualClock
from kvota.core.errors import Outcome
from kvota.core.plan import Sampled
from kvota.core.request import Band
from kvota.desk.desk import RECHECK_S, Desk
from kvota.desk.entry import Entry
from kvota.desk.fairness import W_OUT
from kvota.desk.pace import _DECODE_MEMORY
from kvota.desk.ticket import Stage
from kvota.engine.answer import Choice
from kvota.kv.cache import NO_COPIES
from kvota.scheduler.sequence import Sequence as TokenSequence
from kvota.sim.agenda import Agenda
from kvota.sim.desk_door import DeskDoor
from kvota.sim.door import Door
from kvota.sim.executor import END, WORD
from kvota.sim.node import SimulatedNode
from kvota.telemetry.steps import StepTerms

STEPS_MAX = 256  # in one leap


class Runner(NamedTuple):
    """One sequence that decodes, and the desk's entry for it; None where there is no desk."""

    request_id: str
    sequence: TokenSequence
    choice: Choice
    entry: Entry | None
    num_left: int  # tokens, the last one included


@dataclass(frozen=True, slots=True)
class Leapt:
    """When each step ended, the share of all blocks used then, and who got a token in each.

    Those of `ended` got their last one in the last step. The engine has published it.
    """

    ends_s: Sequence[float]
    used: Sequence[float]
    runners: Sequence[Runner]
    ended: Collection[str]  # request ids

    @property
    def num_steps(self) -> int:
        return len(self.ends_s)


class _BlockEvent(NamedTuple):
    """In the order of turns: in each step all take what they need, then all fill."""

    step: int
    is_filled: bool  # else a block is taken
    place: int  # whose, by rank
    num_positions: int  # the table is to have, or has computed


class Leaper:
    """Leaps for one world. A `door` that is no DeskDoor must not need to hear of tokens."""

    def __init__(self, node: SimulatedNode, door: Door, agenda: Agenda, clock: ManualClock) -> None:
        self._node = node
        self._door = door if isinstance(door, DeskDoor) else None
        self._agenda = agenda
        self._clock = clock

    def leap(self, until_s: float) -> Leapt | None:
        """Take the engine as many steps on as it decides nothing in; None when that is none.

        Like turns, they begin before `until_s`. The desk is to be told by `tell_desk`.
        """
        if self._node.has_letters or (self._door and self._door.desk._line.has_in(Band.BATCH)):
            return None
        runners, most = self._runners()
        most = min(most, STEPS_MAX)
        cache, started_s = self._node.cache, self._clock.now()
        if most < 1 or len(runners) * (most // cache.block_size + 1) > cache.num_available:
            return None
        seconds = self._advance_clock(runners, most, until_s)
        if not seconds:
            return None
        ends_s = _sums(started_s, seconds)
        used = self._advance_engine(runners, [started_s, *ends_s])
        ended = [one for one in runners if one.num_left == len(ends_s)]
        if ended:
            self._end(ended)
            used[-1] = self._used
        self._node.has_leapt(seconds)
        return Leapt(ends_s, used, runners, {one.request_id for one in ended})

    def tell_desk(self, leapt: Leapt, first: int, end: int, runners: Sequence[Runner]) -> None:
        """These runners have got the tokens of the steps from `first` to before `end`.

        For all steps but the last of the leap, time has passed at the desk as well.
        """
        if self._door is None or first == end or not runners:
            return
        desk, ends_s = self._door.desk, leapt.ends_s[first:end]
        entries = [one.entry for one in runners if one.entry is not None]
        _pass_pace(desk, entries, ends_s)
        _fill_budget(desk, len(ends_s) * len(entries))
        _charge(desk, entries, len(ends_s))
        for entry in entries:
            entry.produced[0] += len(ends_s)
            entry.progressed_s = ends_s[-1]
            desk._ledger.grow(entry.id, entry.produced[0], 1, None)
            self._door.has_produced(entry.id, len(ends_s))
        if not len(desk._line):
            for now in leapt.ends_s[first : min(end, leapt.num_steps - 1)]:
                if not now - desk._looked_s < RECHECK_S:
                    desk._looked_s = now

    # --- how far --------------------------------------------------------------------------------

    def _runners(self) -> tuple[list[Runner], int]:
        """All that run, by rank, and steps until the first of them has its last token.

        Nobody, and none, when the next step does more than decode them.
        """
        node = self._node
        answers, roster = node.engine._answers, node.scheduler._roster
        head = roster.line.head(with_long=True)
        is_full = head is None or not roster.can_take(head)
        if not is_full or len(roster.running) > node.scheduler._limits.max_num_batched_tokens:
            return [], 0
        runners, most = [], STEPS_MAX
        for sequence in reversed(roster.running):  # the latest is the likeliest at its prompt
            request = sequence.group.request
            choice = answers[request.id].choices[0]
            last = min(request.sampling.min_tokens, request.max_tokens)
            num_left = last - choice.num_tokens
            most = min(most, num_left)
            if most < 1 or request.n > 1 or not _is_decoding(sequence, choice):
                return [], 0
            entry = self._entry(request.id)
            if self._door is not None and entry is None:
                return [], 0
            runners.append(Runner(request.id, sequence, choice, entry, num_left))
        runners.reverse()
        return runners, most if runners else 0

    def _entry(self, request_id: str) -> Entry | None:
        """Of a lease that is simply running."""
        entry = self._door.desk._holders.get(request_id) if self._door is not None else None
        if entry is None or entry.stage is not Stage.RUNNING or entry.reads_tokens is not None:
            return None
        return entry if entry.progressed_s is not None else None

    def _advance_clock(self, runners: Sequence[Runner], most: int, until_s: float) -> list[float]:
        """The duration of each step: until something happens around the engine, or `most`."""
        executor, clock = self._node.executor, self._clock
        begin_by_s = min(until_s, self._engine_deadline_s())
        happens_s, looks_s = self._next_s(), self._looked_s()
        context = sum(len(one.sequence.tokens) for one in runners)
        durations: list[float] = []
        while len(durations) < most and clock.now() < begin_by_s:
            seconds = executor.next_seconds(StepTerms(0, 0.0, len(runners), context))
            clock.advance(seconds)
            durations.append(seconds)
            context += len(runners)
            now = clock.now()
            if now >= happens_s or not now - looks_s < RECHECK_S:
                break
        return durations

    def _engine_deadline_s(self) -> float:
        """Those that mean nothing any more are thrown away."""
        engine = self._node.engine
        while engine._deadlines:
            deadline_s, request_id, outcome = engine._deadlines[0]
            answer = engine._answers.get(request_id)
            has_begun = answer is not None and answer.group.first_scheduled_s is not None
            if answer is not None and not (has_begun and outcome is Outcome.QUEUE_TIMEOUT):
                return deadline_s
            heapq.heappop(engine._deadlines)
        return inf

    def _next_s(self) -> float:
        """When something happens on the agenda or, by its deadlines, at the desk."""
        next_s = self._agenda.next_s
        times_s = [inf if next_s is None else next_s]
        if self._door is not None:
            desk = self._door.desk
            times_s += [-inf] if desk._has_changed else []
            times_s += [desk._deadlines[0][0]] if desk._deadlines else []
        return min(times_s)

    def _looked_s(self) -> float:
        """When the desk looked at its line; where nobody waits, looking changes nothing."""
        desk = self._door.desk if self._door is not None else None
        return desk._looked_s if desk is not None and len(desk._line) else inf

    # --- the engine -----------------------------------------------------------------------------

    def _advance_engine(self, runners: Sequence[Runner], times_s: Sequence[float]) -> list[float]:
        """Everybody's tokens and blocks. Returns the share of blocks used, by step.

        `times_s`: when the first step began, and when each one ended.
        """
        scheduler, num_steps = self._node.scheduler, len(times_s) - 1
        scheduler._step += num_steps
        events = _block_events(runners, self._node.cache.block_size, num_steps)
        words = [WORD] * num_steps
        for _, sequence, choice, _, _ in runners:
            sequence.tokens.extend(words)
            sequence.planned_step = scheduler._step
            choice.num_tokens += num_steps
        used = self._move_blocks(runners, events, times_s)
        for one in runners:
            assert one.sequence.table is not None
            one.sequence.table.num_computed = len(one.sequence.tokens) - 1
        scheduler._long_share.see(has_long=False, has_others=True, now=times_s[-2])
        scheduler.tell_time(times_s[-1])
        return used

    def _end(self, ended: Sequence[Runner]) -> None:
        """The engine takes their last tokens itself, and publishes what comes of it."""
        engine = self._node.engine
        for one in ended:
            one.choice.num_tokens -= 1
            is_stop = one.choice.num_tokens + 1 >= one.sequence.group.request.sampling.min_tokens
            one.sequence.tokens[-1] = END if is_stop else WORD
            engine._take(one.sequence, Sampled(one.sequence.tokens[-1]), self._clock.now())
        engine._hand_over()

    @property
    def _used(self) -> float:
        cache = self._node.cache
        return (cache.num_blocks - cache.num_available) / cache.num_blocks

    def _move_blocks(
        self, runners: Sequence[Runner], events: Sequence[_BlockEvent], times_s: Sequence[float]
    ) -> list[float]:
        cache = self._node.cache
        used: list[float] = []
        for step, is_filled, place, num_positions in events:
            while len(used) < step:
                used.append(self._used)
            sequence = runners[place].sequence
            assert sequence.table is not None
            if is_filled:
                cache.commit(sequence.table, num_positions)
            else:
                sequence.table.num_computed = num_positions - 1
                copies = cache.extend(sequence.table, num_positions)
                assert copies == NO_COPIES, "a leap needs a block that is not there"
                sequence.group.count_blocks(times_s[step])
        return used + [self._used] * (len(times_s) - 1 - len(used))


def _is_decoding(sequence: TokenSequence, choice: Choice) -> bool:
    is_next = len(sequence.tokens) - sequence.num_computed == 1
    return is_next and sequence.group.is_prompt_read and choice.num_tokens > 0


def _sums(start: float, addends: Sequence[float]) -> list[float]:
    """As a clock adds them up."""
    sums = []
    for one in addends:
        start += one
        sums.append(start)
    return sums


def _block_events(runners: Sequence[Runner], block_size: int, num_steps: int) -> list[_BlockEvent]:
    """In step i, from 0, a sequence of n tokens computes position n + i - 1."""
    events = []
    for place, one in enumerate(runners):
        table, known = one.sequence.table, len(one.sequence.tokens)
        assert table is not None
        end = known + num_steps
        for taken in range(len(table.blocks) * block_size + 1, end, block_size):
            events.append(_BlockEvent(taken - known, False, place, taken))
        if table.chain is not None:
            for filled in range(-(-known // block_size) * block_size, end, block_size):
                events.append(_BlockEvent(filled - known, True, place, filled))
    events.sort()
    return events


# --- the desk -----------------------------------------------------------------------------------


def _pass_pace(desk: Desk, entries: Sequence[Entry], ends_s: Sequence[float]) -> None:
    """As `Pace.decoded` for each token, in the order in which they come."""
    tokens, seconds = desk._pace._tokens, desk._pace._seconds
    for entry in entries:
        assert entry.progressed_s is not None
        tokens = tokens * _DECODE_MEMORY + 1
        seconds = seconds * _DECODE_MEMORY + (ends_s[0] - entry.progressed_s)
    for before_s, end_s in pairwise(ends_s):
        each_s = end_s - before_s
        for _ in entries:
            tokens = tokens * _DECODE_MEMORY + 1
            seconds = seconds * _DECODE_MEMORY + each_s
    desk._pace._tokens, desk._pace._seconds = tokens, seconds


def _fill_budget(desk: Desk, num_tokens: int) -> None:
    """As `PauseBudget.computed` for each token."""
    budget = desk._pausing.budget
    for _ in range(num_tokens):
        before = budget._left
        budget.computed(1)
        if budget._left == before:
            return  # it is full, and stays so


def _charge(desk: Desk, entries: Sequence[Entry], num_steps: int) -> None:
    """As `Desk._charge` for each token. Batch can have come into line only for a last step."""
    if desk._line.has_in(Band.BATCH):
        assert num_steps == 1, "batch waits during a leap"
        for entry in entries:
            desk._charge(entry, W_OUT, is_batch_waiting=True)
        return
    desk._bands.forget()
    counters = desk._counters
    for tenant, num in Counter(entry.tenant for entry in entries).items():
        each, total = W_OUT / counters.weight(tenant), counters.counter(tenant)
        for _ in range(num * num_steps):
            total += each
        counters._counters[tenant] = total
