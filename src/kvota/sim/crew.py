"""Processes that each run some nodes of a fleet, so that all cores of a machine simulate.

    fleet ──(slice, arrivals)──▶ worker 1: replicas 0, 2, 4 …       answers come back by replica,
          ──(slice, arrivals)──▶ worker 2: replicas 1, 3, 5 …       so their number changes nothing

The processes are started once and get one fleet after another.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from kvota.sim.shard import Arriving, NodesPlan, Shard, Slice, Worked

JOIN_S = 5.0


class WorkerLost(RuntimeError):
    """A process that ran nodes has ended, most likely for lack of memory."""


class Crew:
    """`num` processes. Use it in a `with`."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._workers: list[_Worker] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # A fresh interpreter each: what this one has open, or runs in threads, stays its own.
        context = get_context("spawn")
        for _ in range(self.num):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            worker = _Worker(process, ours)
            self._stack.callback(worker.stop)
            self._workers.append(worker)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def fleet(self, plan: NodesPlan, num_replicas: int) -> "FarNodes":
        """The nodes of a new fleet; those of the last one are gone."""
        return FarNodes(self._workers[:num_replicas], plan, num_replicas)


class FarNodes:
    """All nodes of one fleet, dealt out to the workers."""

    def __init__(self, workers: Sequence["_Worker"], plan: NodesPlan, num_replicas: int) -> None:
        self._workers = workers
        self._hands = [range(at, num_replicas, len(workers)) for at in range(len(workers))]
        for worker, hand in zip(workers, self._hands, strict=True):
            worker.ask("build", plan, tuple(hand))
        for worker in workers:
            worker.answer()

    def begin(self, end_s: float, arriving: Sequence[Arriving]) -> None:
        parts: list[list[Arriving]] = [[] for _ in self._workers]
        for one in arriving:
            parts[one.replica % len(parts)].append(one)
        for worker, part in zip(self._workers, parts, strict=True):
            worker.ask("slice", end_s, part)

    def result(self) -> Slice:
        answers: list[Slice] = [worker.answer() for worker in self._workers]
        return Slice(
            self._by_replica([one.ended for one in answers]),
            self._by_replica([one.loads for one in answers]),
            any(one.has_more for one in answers),
        )

    def finish(self) -> list[Worked]:
        for worker in self._workers:
            worker.ask("finish")
        return self._by_replica([worker.answer() for worker in self._workers])

    def _by_replica(self, hands: Sequence[Sequence[Any]]) -> list[Any]:
        num = sum(map(len, self._hands))
        return [hands[at % len(hands)][at // len(hands)] for at in range(num)]


class _Worker:
    def __init__(self, process: BaseProcess, pipe: "Connection[Any, Any]") -> None:
        self._process = process
        self._pipe = pipe

    def ask(self, what: str, *words: object) -> None:
        try:
            self._pipe.send((what, words))
        except OSError:
            raise self._lost() from None

    def answer(self) -> Any:
        """Raises what broke there."""
        try:
            found = self._pipe.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        if isinstance(found, AssertionError):
            raise found
        return found

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(JOIN_S)
        self._process.terminate()

    def _lost(self) -> WorkerLost:
        self._process.join(JOIN_S)
        return WorkerLost(f"a worker of the simulation ended with {self._process.exitcode}")


def _work(pipe: "Connection[Any, Any]") -> None:
    """The life of a worker: until nobody asks any more."""
    shard: Shard | None = None
    try:
        while True:
            what, words = pipe.recv()
            try:
                if what == "build":
                    shard = None  # the old nodes go before the new ones come
                    shard = Shard(*words)
                    pipe.send(None)
                else:
                    assert shard is not None, "no nodes were built"
                    pipe.send(_asked(shard, what, words))
            except AssertionError as broken:
                pipe.send(broken)
    except (EOFError, OSError, KeyboardInterrupt):
        pipe.close()


def _asked(shard: Shard, what: str, words: Sequence[Any]) -> Slice | Sequence[Worked]:
    if what == "finish":
        return shard.finish()
    shard.begin(*words)
    return shard.result()
