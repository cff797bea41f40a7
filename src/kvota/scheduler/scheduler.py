"""Who computes how many tokens in the next step.

    add ─▶ waiting line ─▶ running ─▶ finish          plan ─▶ [executor] ─▶ commit
                 ▲            │
                 └── preempt ─┘

There is no prefill phase and no decode phase: each running sequence has tokens whose KV is not
there yet, and a step computes some of them. `plan` fills one step under a token budget:

1. every running decode, one token each, in order of rank (in turns when they exceed the budget);
2. chunks of prompts in progress, oldest first, long ones within their share (`long_share.py`);
3. new sequences from the heads of the line (`line.py`), as long as their KV fits;
4. unless someone still waits, what may follow the decodes' tokens (`speculation.py`).

All blocks of what is known of a sequence are taken when it is admitted, so only growth by decoding
can run out of memory; then somebody is preempted (`preemption.py`).

`plan` decides, `commit` records what came out. Between the two nothing else needs to happen, but
`finish` and `abort` are allowed. Single-writer, no clock: `now` is handed in, in seconds.
Cost of a step: O(running), whatever waits.

Invariant, proved by `check()`: a sequence is in exactly one place, and holds blocks exactly while
it runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvota.core.plan import BlockCopy, Chunk, ChunkResult, Sampled, StepPlan, StepResult
from kvota.core.request import Request
from kvota.kv.cache import BlockTable, CacheSnapshot, KVCache
from kvota.scheduler.budget import SchedulerLimits, StepBudget
from kvota.scheduler.line import Lane, rank_of
from kvota.scheduler.long_share import LongShare
from kvota.scheduler.preemption import VictimChoice
from kvota.scheduler.roster import Roster
from kvota.scheduler.sequence import Sequence, SequenceGroup, Status
from kvota.scheduler.speculation import LookupRecord, chance_needed


@dataclass(slots=True)
class Committed:
    """What a step brought: prompts that are now whole in KV, and sampled tokens.

    A group's prompt is reported once, also after preemptions, and before its first token. The
    tokens are already appended, except where `Sampled.error` is set: then none was.
    """

    prompts_read: list[SequenceGroup] = field(default_factory=list)
    sampled: list[tuple[Sequence, Sampled]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """Counts of this moment. `running` counts sequences as `max_running_requests` does."""

    running: int
    waiting: int  # in line and never run
    preempted: int  # in line again
    preemptions: int  # since the start
    recomputed_tokens: int  # since the start: KV given up by preemption and not found again
    cache: CacheSnapshot


@dataclass(slots=True)
class _Draft:
    """A step being planned."""

    budget: StepBudget
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    is_short_of_memory: bool = False
    num_decodes: int = 0
    left_out: list[Sequence] = field(default_factory=list)  # long prompts, for short ones


class Scheduler:
    """Plans steps for the sequences that were added, over the KV memory it was given.

    The engine's loop is:

        group = scheduler.add(request)            # may be called before any plan
        while plan := scheduler.plan(now):        # None: nothing can run
            done = scheduler.commit(plan, executor.execute(plan))
            for sequence, sampled in done.sampled: … scheduler.finish(sequence)

    When the executor raises, abort the requests that it cannot compute, and commit what came out
    of the others, as the engine does.
    """

    def __init__(self, cache: KVCache, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._roster = Roster(cache, limits)
        self._victims = VictimChoice(limits)
        self._long_share = LongShare(limits.long_prefill_share)
        self._lookups = LookupRecord()
        self._in_flight: StepPlan | None = None
        self._step = 0
        self._turn = 0

    @property
    def has_work(self) -> bool:
        """True while any sequence is not finished."""
        return bool(self._roster.sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.line)

    @property
    def num_orphaned_blocks(self) -> int:
        """Blocks in use that no running sequence refers to. Anything but 0 is a leak."""
        running = self._roster.running
        if self._cache.num_tables == len(running):
            return 0
        tables = (sequence.table for sequence in running if sequence.table is not None)
        owned = {block for table in tables for block in table.blocks}
        return self._cache.snapshot().used - len(owned)

    def sequence(self, sequence_id: int) -> Sequence | None:
        """A sequence that has not ended."""
        return self._roster.sequences.get(sequence_id)

    def group(self, request_id: str) -> SequenceGroup | None:
        """The group of a request that has not ended."""
        return self._roster.groups.get(request_id)

    def tell_time(self, now: float) -> None:
        """Whatever ends or is given up from here on is so at `now`. `plan` tells it as well."""
        self._roster.now_s = now

    def add(self, request: Request) -> SequenceGroup:
        """Put a request in line. Its id must be unique among those that have not ended.

        The caller has checked `max_model_len`; a request that could never fit the pool, or the
        running limit, is a bug of the caller. May raise what `request.new_constraint` raises.
        """
        return self._roster.add(request)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when no sequence has anything to compute.

        Every plan must be answered by `commit` before the next one. Block tables and token lists
        in it are live: the executor reads them and does not keep them.
        """
        assert self._in_flight is None, "the last plan was not committed"
        self._step += 1
        self._roster.now_s = now
        draft = self._draft(now)
        while not draft.chunks and draft.is_short_of_memory:
            assert len(self._roster.running) > 1, "one sequence alone must always fit"
            self._preempt(self._roster.running[-1])
            draft = self._draft(now, admits=False)
        if not draft.chunks:
            return None
        self._in_flight = StepPlan(draft.chunks, draft.copies)
        return self._in_flight

    def commit(self, plan: StepPlan, result: StepResult) -> Committed:
        """Record what the executor answered. Sequences that ended meanwhile are passed over."""
        assert plan is self._in_flight, "this plan is not the one in flight"
        self._in_flight = None
        done = Committed()
        for chunk, answer in zip(plan.chunks, result.chunks, strict=True):
            sequence = self._roster.sequences.get(chunk.sequence_id)
            if sequence is None:
                continue  # it ended while the step ran
            assert sequence.table is not None
            num_computed = chunk.start + len(chunk.token_ids)
            if chunk.speculated and answer.sampled:
                self._append_run(sequence, answer, done)
                num_computed += len(answer.sampled) - 1
            self._commit(sequence, sequence.table, num_computed)
            if not sequence.group.is_prompt_read:
                self._read_prompt(sequence, chunk, answer, done)
            if answer.sampled and not chunk.speculated:
                self._append(sequence, answer, done)
        return done

    def finish(self, sequence: Sequence) -> None:
        """The sequence ends now, from whatever state; its blocks are back when this returns.

        Raises IllegalTransition, and changes nothing, if it had ended before.
        """
        self._roster.finish(sequence)

    def abort(self, request_id: str) -> SequenceGroup | None:
        """End all sequences of a request. None when there is no such request (any more)."""
        group = self._roster.groups.get(request_id)
        for sequence in _unfinished(group):
            self.finish(sequence)
        return group

    def pause(self, request_id: str) -> bool:
        """Take a request out: its KV is given up, its tokens stay, and it waits for `resume`.

        Between steps only. False when there is no such request (any more).
        """
        assert self._in_flight is None, "pause between steps: a sampled token would be lost"
        group = self._roster.groups.get(request_id)
        for sequence in _unfinished(group):
            if sequence.id not in self._roster.held:
                self._roster.hold(sequence)
        return group is not None

    def resume(self, request_id: str) -> None:
        """Let a paused request go on, from the front of its line; others are passed over."""
        for sequence in _unfinished(self._roster.groups.get(request_id)):
            if sequence.id in self._roster.held:
                self._roster.unhold(sequence)

    def snapshot(self) -> SchedulerSnapshot:
        """Counts of this moment, in O(1)."""
        return SchedulerSnapshot(
            running=self._roster.num_slots,
            waiting=len(self._roster.line) - self._roster.num_preempted,
            preempted=self._roster.num_preempted,
            preemptions=self._roster.num_preemptions,
            recomputed_tokens=self._roster.recomputed_tokens,
            cache=self._cache.snapshot(),
        )

    def running(self) -> Iterator[Sequence]:
        """The running sequences, first in rank first."""
        return iter(self._roster.running)

    def check(self) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        self._roster.check()
        self._cache.check()

    # --- planning -----------------------------------------------------------------------------

    def _draft(self, now: float, *, admits: bool = True) -> _Draft:
        draft = _Draft(StepBudget(self._limits))
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self._roster.running:
            num_remaining = len(sequence.tokens) - sequence.num_computed
            if num_remaining == 1 and sequence.group.is_prompt_read:
                decodes.append(sequence)
            elif num_remaining:
                prompts.append(sequence)
        num_before = self._roster.num_preemptions
        self._plan_decodes(draft, decodes, has_prompts=bool(prompts))
        self._plan_prompts(draft, prompts, now)
        is_tight = draft.is_short_of_memory or self._roster.num_preemptions > num_before
        if admits and not is_tight:
            self._admit(draft, now)
        if draft.left_out:
            self._settle_left_out(draft, now, admits=admits and not is_tight)
        if self._limits.speculative_tokens and not self.num_waiting:
            self._speculate(draft)
        return draft

    def _plan_decodes(self, draft: _Draft, decodes: list[Sequence], *, has_prompts: bool) -> None:
        most = draft.budget.decodes_max(has_prompts=has_prompts)
        if len(decodes) > most:
            decodes = self._in_turns(decodes, most)
        chunks = draft.chunks
        for sequence in decodes:
            table = sequence.table
            if table is None:
                continue  # preempted for one before it
            tokens, num_held = sequence.tokens, len(table.blocks)
            copies = self._cache.extend(table, len(tokens))
            if copies is None:
                copies = self._extend_by_preempting(sequence, table)
                if copies is None:
                    draft.is_short_of_memory = True
                    continue
            if copies:
                draft.copies.extend(copies)
            if copies or len(table.blocks) > num_held:
                sequence.group.count_blocks(self._roster.now_s)
            sequence.planned_step = self._step
            chunk = Chunk(
                sequence.id, (tokens[-1],), table.num_computed, table.blocks, sequence.draws
            )
            chunks.append(chunk)
        draft.num_decodes = len(chunks)
        draft.budget.left -= len(chunks)

    def _in_turns(self, decodes: list[Sequence], most: int) -> list[Sequence]:
        """`most` of them, beginning where the last such step ended; the first in rank first."""
        first = self._turn % len(decodes)
        self._turn = first + most
        return sorted((decodes[first:] + decodes[:first])[:most], key=rank_of)

    def _extend_by_preempting(
        self, sequence: Sequence, table: BlockTable
    ) -> tuple[BlockCopy, ...] | None:
        """Preempt until the table can grow; None when nobody is left who may be preempted."""
        while victim := self._victims.choose(self._roster.running, sequence, self._step):
            self._preempt(victim)
            copies = self._cache.extend(table, len(sequence.tokens))
            if copies is not None:
                return copies
        return None

    def _plan_prompts(self, draft: _Draft, prompts: list[Sequence], now: float) -> None:
        budget = draft.budget
        still = [sequence for sequence in prompts if sequence.table is not None]
        long = [sequence for sequence in still if budget.is_long(sequence.num_to_read)]
        has_waiting = self._roster.line.num_in(Lane.SHORT) > 0
        has_others = has_waiting or len(self._roster.running) > len(long)
        self._long_share.see(has_long=bool(long), has_others=has_others, now=now)
        has_short = has_waiting or len(still) > len(long)
        if long and has_short and self._long_share.may_defer:
            draft.left_out = long
            share = 0.0
        else:
            share = self._long_share.of_step(now, reads_short=has_short)
        budget.open_prompts(has_long=bool(long), share=share)
        for sequence in still:
            self._plan_prompt(draft, sequence)

    def _settle_left_out(self, draft: _Draft, now: float, *, admits: bool) -> None:
        """Owe it to the long prompts, or let them in after all where no short one was read."""
        if len(draft.chunks) > draft.num_decodes:
            self._long_share.defer()
            return
        share = self._long_share.of_step(now, reads_short=False)
        draft.budget.open_prompts(has_long=True, share=share)
        for sequence in draft.left_out:
            self._plan_prompt(draft, sequence)
        if admits:
            self._admit(draft, now)

    def _plan_prompt(self, draft: _Draft, sequence: Sequence) -> None:
        """As much of the sequence's tokens as the budget gives it; its blocks are there."""
        table = sequence.table
        assert table is not None
        tokens, start = sequence.tokens, table.num_computed
        wants_logprobs = sequence.wants_prompt_logprobs
        budget = draft.budget
        is_long = budget.is_long(sequence.num_to_read)
        room = budget.room(len(tokens) - start, is_long=is_long, wants_logprobs=wants_logprobs)
        if room == 0:
            return
        budget.take(room, is_long=is_long, wants_logprobs=wants_logprobs)
        end = start + room
        sequence.planned_step = self._step
        draft.chunks.append(
            Chunk(
                sequence.id,
                tokens[start:end],
                start,
                table.blocks,
                sequence.draws if end == len(tokens) else (),
                sequence.group.request.prompt_logprobs if wants_logprobs else None,
                tokens[end] if wants_logprobs and end < len(tokens) else None,
                sequence.num_prompt,
            )
        )

    def _admit(self, draft: _Draft, now: float) -> None:
        """Start sequences from the heads of the line until one does not fit."""
        with_long = True
        while draft.budget.left_for_new > 0:
            sequence = self._roster.line.head(with_long=with_long)
            if sequence is None or not self._roster.can_take(sequence):
                return
            is_long = self._roster.line.lane_of(sequence) is Lane.LONG
            if is_long and not self._has_room(draft, sequence):
                with_long = False
            elif self._roster.start(sequence, now):
                self._plan_prompt(draft, sequence)
            else:
                return

    def _speculate(self, draft: _Draft) -> None:
        """Add to decodes what may follow, as far as the step has room when all else is planned."""
        chance_min = chance_needed(draft.num_decodes)
        for place, chunk in enumerate(draft.chunks[: draft.num_decodes]):
            sequence = self.sequence(chunk.sequence_id)
            assert sequence is not None, "nobody planned has left"
            most = min(self._limits.speculative_tokens, draft.budget.left)
            guesses = self._guesses(sequence, most, chance_min)
            if guesses:
                draft.chunks[place] = replace(chunk, speculated=guesses)
                draft.budget.left -= len(guesses)

    def _guesses(self, sequence: Sequence, most: int, chance_min: float) -> tuple[int, ...]:
        """What may follow the sequence's tokens, within the blocks that it holds anyway."""
        table = sequence.table
        if table is None or sequence.draws[0].constraint is not None:
            return ()  # a grammar learns of tokens one by one, when they have been drawn
        num_slots = len(table.blocks) * self._cache.block_size - len(sequence.tokens)
        num_to_come = sequence.group.request.max_tokens - sequence.num_output - 1
        most = min(most, num_slots, num_to_come)
        return sequence.lookup.guesses(
            sequence.tokens, self._lookups, most=most, chance_min=chance_min
        )

    def _has_room(self, draft: _Draft, sequence: Sequence) -> bool:
        """True when this step could compute something of it, were it admitted."""
        wants_logprobs = sequence.wants_prompt_logprobs
        chain = None if wants_logprobs else sequence.chain
        num_cached = self._cache.match(chain) if chain is not None else 0
        remaining = len(sequence.tokens) - num_cached
        is_long = draft.budget.is_long(remaining)
        return draft.budget.room(remaining, is_long=is_long, wants_logprobs=wants_logprobs) > 0

    def _preempt(self, sequence: Sequence) -> None:
        self._victims.record(sequence)
        self._roster.preempt(sequence)

    # --- recording a step ---------------------------------------------------------------------

    def _read_prompt(
        self, sequence: Sequence, chunk: Chunk, answer: ChunkResult, done: Committed
    ) -> None:
        """Collect the prompt's logprobs, each once, and fork when the prompt is whole."""
        group = sequence.group
        num_known = len(group.prompt_logprobs) - chunk.start
        group.prompt_logprobs.extend(answer.prompt_logprobs[max(num_known, 0) :])
        if sequence.num_computed >= sequence.num_prompt:
            group.is_prompt_read = True
            self._roster.fork(sequence)
            done.prompts_read.append(group)

    def _commit(self, sequence: Sequence, table: BlockTable, num_computed: int) -> None:
        num_indexed = table.num_indexed
        self._cache.commit(table, num_computed)
        if sequence.group.request.n > 1 and table.num_indexed > num_indexed:
            # Choices that say the same share the block from here on.
            sequence.group.count_blocks(self._roster.now_s)

    def _append(self, sequence: Sequence, answer: ChunkResult, done: Committed) -> None:
        """Append to each choice the token drawn for it."""
        drawn = [sequence] if len(answer.sampled) == 1 else sequence.group.sequences
        for one, sampled in zip(drawn, answer.sampled, strict=True):
            if sampled.error is None:
                one.tokens.append(sampled.token)
            done.sampled.append((one, sampled))

    def _append_run(self, sequence: Sequence, answer: ChunkResult, done: Committed) -> None:
        """Append what was drawn for one choice in a row: all but the last as it was guessed."""
        for sampled in answer.sampled:
            if sampled.error is None:
                sequence.tokens.append(sampled.token)
            done.sampled.append((sequence, sampled))


def _unfinished(group: SequenceGroup | None) -> list[Sequence]:
    sequences = group.sequences if group is not None else []
    return [sequence for sequence in sequences if sequence.status is not Status.FINISHED]
