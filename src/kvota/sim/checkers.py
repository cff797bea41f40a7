"""What must hold in every world at every moment, whatever is thrown at it.

conservation   every block is free, used or cached, and used ones belong to somebody who runs;
               when all is over none is used and the door holds nothing
one ending     each request that arrived ends exactly once, and nothing of it follows
budget         a step computes no more tokens and sequences than allowed, in blocks that exist
starvation     nobody is open past their deadline, nor in line past the line's
fairness       tenants that both wait get service within the VTC bound of each other (`fairness.py`)

Each raises AssertionError naming the request and the moment. The world calls all of them all the
time; tests share them.
"""

from collections.abc import Sequence

from kvota.core.plan import Capacity, Executor, StepPlan, StepResult
from kvota.scheduler.budget import SchedulerLimits
from kvota.scheduler.scheduler import Scheduler
from kvota.sim.door import Door
from kvota.sim.records import RequestRecord


class Checker:
    """Hears of everything. The hooks do nothing until a checker overrides them."""

    def arrived(self, record: RequestRecord, now: float) -> None:
        """The request exists."""

    def granted(self, record: RequestRecord, now: float) -> None:
        """The door let it through to the engine."""

    def produced(self, record: RequestRecord, num_tokens: int, now: float) -> None:
        """The engine published tokens of it."""

    def ended(self, record: RequestRecord, now: float) -> None:
        """It has its outcome."""

    def stepped(self, now: float) -> None:
        """A turn of the engine is over and everything it published has been taken."""

    def leapt(self, ends_s: Sequence[float]) -> None:
        """As many turns at once, which ended then (`leap.py`)."""
        for end_s in ends_s:
            self.stepped(end_s)

    def finished(self, now: float) -> None:
        """The world is over."""


class Conservation(Checker):
    """Counts after every step; the full proof of all parts every `proof_every` steps."""

    def __init__(self, scheduler: Scheduler, door: Door, proof_every: int) -> None:
        self._scheduler = scheduler
        self._door = door
        self._proof_every = proof_every
        self._num_steps = 0
        self.num_proofs = 0

    def stepped(self, now: float) -> None:
        self.leapt((now,))

    def leapt(self, ends_s: Sequence[float]) -> None:
        """What is true at the end of a leap is all that can be seen of it."""
        cache, now = self._scheduler.snapshot().cache, ends_s[-1]
        total = cache.free + cache.used + cache.cached
        assert total == cache.num_blocks, f"at {now:.3f} s: {total} blocks of {cache.num_blocks}"
        assert self._scheduler.num_orphaned_blocks == 0, f"at {now:.3f} s: orphaned blocks"
        num_before = self._num_steps // self._proof_every
        self._num_steps += len(ends_s)
        if self._num_steps // self._proof_every > num_before:
            self._prove()

    def finished(self, now: float) -> None:
        self._prove()
        assert not self._scheduler.has_work, "sequences are left in the scheduler"
        assert self._scheduler.snapshot().cache.used == 0, "blocks are used by nobody"

    def _prove(self) -> None:
        self._scheduler.check()
        self._door.check()
        self.num_proofs += 1


class OneEnding(Checker):
    """A request is open from its arrival to its one ending."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._ended: set[int] = set()

    def arrived(self, record: RequestRecord, now: float) -> None:
        is_known = record.number in self._open or record.number in self._ended
        assert not is_known, f"#{record.number} arrived twice"
        self._open.add(record.number)

    def granted(self, record: RequestRecord, now: float) -> None:
        assert record.number in self._open, (
            f"#{record.number} granted at {now:.3f} s, after its end"
        )

    def produced(self, record: RequestRecord, num_tokens: int, now: float) -> None:
        assert record.number in self._open, (
            f"#{record.number} produced at {now:.3f} s, after its end"
        )

    def ended(self, record: RequestRecord, now: float) -> None:
        assert record.outcome is not None
        assert record.number in self._open, f"#{record.number} ended twice, again at {now:.3f} s"
        self._open.remove(record.number)
        self._ended.add(record.number)

    def finished(self, now: float) -> None:
        assert not self._open, f"never ended: {sorted(self._open)[:10]}"


class NoStarvation(Checker):
    """Deadlines are kept, up to the longest turn of the engine so far: no turn can be cut short."""

    def __init__(self, queue_timeout_s: float | None, request_timeout_s: float | None) -> None:
        self._queue_timeout_s = queue_timeout_s
        self._request_timeout_s = request_timeout_s
        self._longest_turn_s = 0.0
        self._turn_at_s = 0.0
        self._open: dict[int, RequestRecord] = {}  # in the order of arrival
        self._in_line: dict[int, RequestRecord] = {}

    def arrived(self, record: RequestRecord, now: float) -> None:
        self._open[record.number] = self._in_line[record.number] = record

    def granted(self, record: RequestRecord, now: float) -> None:
        self._in_line.pop(record.number, None)

    def ended(self, record: RequestRecord, now: float) -> None:
        self._open.pop(record.number, None)
        self._in_line.pop(record.number, None)

    def stepped(self, now: float) -> None:
        self._longest_turn_s = max(self._longest_turn_s, now - self._turn_at_s)
        self._turn_at_s = now
        self._oldest_within(self._open, self._request_timeout_s, now, "open")
        self._oldest_within(self._in_line, self._queue_timeout_s, now, "in line")

    def _oldest_within(
        self, places: dict[int, RequestRecord], limit_s: float | None, now: float, where: str
    ) -> None:
        oldest = next(iter(places.values()), None)
        if limit_s is None or oldest is None:
            return
        age_s = now - oldest.arrival.at_s
        assert age_s <= limit_s + 2 * self._longest_turn_s + 1e-6, (
            f"at {now:.3f} s #{oldest.number} is {where} for {age_s:.3f} s; at most {limit_s} s"
        )


class BudgetedExecutor:
    """Holds every plan to the limits before it is executed."""

    def __init__(self, executor: Executor, limits: SchedulerLimits) -> None:
        self._executor = executor
        self._limits = limits

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        capacity, limits = self._executor.capacity, self._limits
        num_tokens, num_draws = 0, 0
        for chunk in plan.chunks:
            length = len(chunk.token_ids) + len(chunk.speculated)
            end = chunk.start + length
            num_tokens += length
            num_draws += len(chunk.draws)
            assert len(chunk.block_table) * capacity.block_size >= end, "a chunk without blocks"
        assert num_tokens <= limits.max_num_batched_tokens, f"a step of {num_tokens} tokens"
        assert len(plan.chunks) <= limits.max_running_requests, "more sequences than may run"
        assert num_draws <= limits.max_running_requests, "more choices than may run"
        return self._executor.execute(plan)


class AllCheckers(Checker):
    """One checker made of several. A hook that nobody overrides costs nothing."""

    def __init__(self, checkers: Sequence[Checker]) -> None:
        def hearing(hook: str) -> list[Checker]:
            plain = getattr(Checker, hook)
            return [one for one in checkers if getattr(type(one), hook) is not plain]

        self._arrived = hearing("arrived")
        self._granted = hearing("granted")
        self._produced = hearing("produced")
        self._ended = hearing("ended")
        self._stepped = hearing("stepped")  # these are told of leaps, too
        self._finished = hearing("finished")

    def arrived(self, record: RequestRecord, now: float) -> None:
        for checker in self._arrived:
            checker.arrived(record, now)

    def granted(self, record: RequestRecord, now: float) -> None:
        for checker in self._granted:
            checker.granted(record, now)

    def produced(self, record: RequestRecord, num_tokens: int, now: float) -> None:
        for checker in self._produced:
            checker.produced(record, num_tokens, now)

    def ended(self, record: RequestRecord, now: float) -> None:
        for checker in self._ended:
            checker.ended(record, now)

    def stepped(self, now: float) -> None:
        for checker in self._stepped:
            checker.stepped(now)

    def leapt(self, ends_s: Sequence[float]) -> None:
        for checker in self._stepped:
            checker.leapt(ends_s)

    def finished(self, now: float) -> None:
        for checker in self._finished:
            checker.finished(now)
