"""Who is where: every sequence that has not ended, and the moves from place to place.

    add ─▶ line ──start──▶ running ──finish──▶ gone       fork: new ones, running at once
            ▲ ▲               │
            │ └────preempt────┤
            └──unhold── held ◀┘ hold

A sequence is in exactly one place and holds a block table exactly while it runs. All blocks of
what is known of a sequence are taken when it starts, so only decoding makes a table grow.
"""

from bisect import bisect_left, insort
from math import ceil

from kvota.core.request import Request
from kvota.kv.cache import KVCache
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.line import WaitingLine, rank_of
from kvota.scheduler.sequence import Sequence, SequenceGroup, Status


class Roster:
    """Everybody's place. Attributes may be read; only the methods change them."""

    def __init__(self, cache: KVCache, limits: SchedulerLimits) -> None:
        self.line = WaitingLine(limits.long_prefill_threshold)
        self.running: list[Sequence] = []  # by rank
        self.held: dict[int, Sequence] = {}  # out of line until they are asked to go on
        self.groups: dict[str, SequenceGroup] = {}  # not finished, by request id
        self.sequences: dict[int, Sequence] = {}  # not finished
        self.num_slots = 0  # in use, of max_running_requests
        self.num_preempted = 0  # in line now
        self.num_preemptions = 0  # since the start
        self.recomputed_tokens = 0  # since the start
        self.now_s = 0.0  # as told last: when blocks were taken and given back
        self._cache = cache
        self._num_slots_max = limits.max_running_requests
        self._watermark = ceil(limits.watermark * cache.num_blocks)
        self._num_arrivals = 0
        self._num_sequences = 0

    def add(self, request: Request) -> SequenceGroup:
        """A new group at the end of its line. May raise what `request.new_constraint` raises."""
        assert request.id not in self.groups, f"request {request.id} is already here"
        assert request.prompt, "an empty prompt has no position to sample from"
        assert 1 <= request.n <= self._num_slots_max, f"n={request.n} can never run"
        num_positions = len(request.prompt) + max(request.max_tokens - 1, 0)
        assert self._cache.blocks_for(num_positions) <= self._cache.num_blocks, (
            f"{num_positions} positions can never fit {self._cache.num_blocks} blocks"
        )
        new_constraint = request.new_constraint
        constraints = tuple(new_constraint() if new_constraint else None for _ in range(request.n))
        group = SequenceGroup(request=request, arrival=self._num_arrivals, constraints=constraints)
        self._num_arrivals += 1
        self.groups[request.id] = group
        self.line.push(self._first_of(group))
        return group

    def can_take(self, sequence: Sequence) -> bool:
        """True when the running limit leaves room for the sequence and its pending forks."""
        return self.num_slots + sequence.num_slots <= self._num_slots_max

    def start(self, sequence: Sequence, now: float) -> bool:
        """Give a waiting sequence its blocks and let it run; False when they do not fit.

        While others run, a watermark stays free for their growth, and a block for each fork.
        """
        table = self._cache.reserve(
            len(sequence.tokens),
            sequence.chain,
            reads=not sequence.wants_prompt_logprobs,
            spare=self._watermark + sequence.num_pending_forks if self.running else 0,
        )
        if table is None:
            return False
        self._leave_line(sequence, sequence.status)
        self.recomputed_tokens += max(0, sequence.num_given_up - table.num_computed)
        sequence.move(Status.RUNNING)
        sequence.table = table
        sequence.num_tokens_at_start = len(sequence.tokens)
        sequence.num_cached_at_start = table.num_computed
        self.num_slots += sequence.num_slots
        insort(self.running, sequence, key=rank_of)
        group = sequence.group
        group.count_blocks(now)
        if group.first_scheduled_s is None:
            group.first_scheduled_s = now
            group.cached_tokens = table.num_computed
        return True

    def fork(self, first: Sequence) -> None:
        """Let the pending forks of a sequence whose prompt is computed run. Takes no blocks."""
        assert first.table is not None
        group = first.group
        first.draws = first.draws[:1]
        first.num_pending_forks = 0
        for choice in range(1, group.request.n):
            tokens = list(first.tokens)
            table = self._cache.fork(first.table, tokens)
            fork = Sequence(
                id=self._next_id(),
                group=group,
                choice=choice,
                tokens=tokens,
                chain=table.chain,
                draws=(group.new_draw(choice, tokens),) if first.draws else (),
                status=Status.RUNNING,
                table=table,
                num_tokens_at_start=len(tokens),
            )
            self._enter(fork)
            insort(self.running, fork, key=rank_of)

    def preempt(self, sequence: Sequence) -> None:
        """Give up its KV and put it back in line with all the tokens it has."""
        num_given_up = sequence.num_computed
        sequence.move(Status.PREEMPTED)
        sequence.num_given_up = num_given_up
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.num_preempted += 1
        self._leave_running(sequence)
        self.line.push(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Take it out of line, or out of the running, until `unhold`."""
        if sequence.status is Status.RUNNING:
            self.preempt(sequence)
        self._leave_line(sequence, sequence.status)
        self.held[sequence.id] = sequence

    def unhold(self, sequence: Sequence) -> None:
        """Put it back in line."""
        del self.held[sequence.id]
        self.num_preempted += sequence.status is Status.PREEMPTED
        self.line.push(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End it, from whatever state. Raises IllegalTransition, changing nothing, if it had."""
        was = sequence.status
        sequence.move(Status.FINISHED)
        if was is Status.RUNNING:
            self._leave_running(sequence)
        else:
            self._leave_line(sequence, was)
        del self.sequences[sequence.id]
        if sequence.group.is_finished:
            del self.groups[sequence.group.request.id]

    def check(self) -> None:
        """Prove the invariants; raises AssertionError on the first that does not hold."""
        waiting, held = list(self.line), list(self.held.values())
        places = [sequence.id for sequence in self.running + waiting + held]
        assert sorted(places) == sorted(self.sequences), "a sequence is in no place, or in two"
        ranks = [sequence.rank for sequence in self.running]
        assert ranks == sorted(ranks), "running sequences are out of order"
        assert self.num_slots == sum(sequence.num_slots for sequence in self.running)
        assert self.num_slots <= self._num_slots_max, "more run than may"
        for sequence in self.running:
            assert sequence.status is Status.RUNNING
            assert sequence.table is not None
            assert sequence.num_computed <= len(sequence.tokens)
        for sequence in waiting + held:
            assert sequence.status in (Status.WAITING, Status.PREEMPTED)
            assert sequence.table is None, f"sequence {sequence.id} waits with blocks"
        assert self.num_preempted == sum(s.status is Status.PREEMPTED for s in waiting)
        assert not any(group.is_finished for group in self.groups.values())
        assert self._cache.num_tables == len(self.running), "a block table without a sequence"

    def _first_of(self, group: SequenceGroup) -> Sequence:
        """The sequence that reads the prompt for all choices."""
        request = group.request
        tokens = list(request.prompt)
        is_cached = request.use_prefix_cache and self._cache.has_prefix_cache
        chain = self._cache.chain(tokens, request.cache_salt) if is_cached else None
        choices = range(request.n if request.max_tokens else 0)
        first = Sequence(
            id=self._next_id(),
            group=group,
            choice=0,
            tokens=tokens,
            chain=chain,
            draws=tuple(group.new_draw(choice, tokens) for choice in choices),
            num_pending_forks=request.n - 1,
        )
        self._enter(first)
        return first

    def _next_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences

    def _enter(self, sequence: Sequence) -> None:
        sequence.group.sequences.append(sequence)
        self.sequences[sequence.id] = sequence

    def _leave_line(self, sequence: Sequence, was: Status) -> None:
        if self.held.pop(sequence.id, None) is None:
            self.line.remove(sequence)
            self.num_preempted -= was is Status.PREEMPTED

    def _leave_running(self, sequence: Sequence) -> None:
        """It runs no longer: blocks and slots go back."""
        assert sequence.table is not None
        self._cache.release(sequence.table)
        sequence.table = None
        sequence.group.count_blocks(self.now_s)
        self.num_slots -= sequence.num_slots
        del self.running[bisect_left(self.running, sequence.rank, key=rank_of)]
