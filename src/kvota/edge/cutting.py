"""A block of one task that others may cut short.

    scope.begin()
    try: …                    # anybody, meanwhile: scope.cut()
    finally: scope.end(kind)  # True: it ended because of that

What `asyncio.timeout(None)` does for who reschedules it, at a fraction of its cost: a request
passes through several of these, and hardly one is ever cut.
"""

import asyncio


class CutScope:
    """Used once. `begin` and `end` in the task that runs the block, `cut` anywhere on its loop."""

    __slots__ = ("_coming", "_is_ended", "_is_wanted", "_num_cancels", "_task")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._coming: asyncio.Handle | None = None  # the cancellation, until it is delivered
        self._num_cancels = 0  # asked of the task by others, before the block
        self._is_wanted = False
        self._is_ended = False

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        task = self._task = asyncio.current_task(loop)
        assert task is not None
        self._num_cancels = task.cancelling()
        if self._is_wanted:
            self._coming = loop.call_soon(self._deliver)

    def cut(self) -> None:
        """Cancel what the block waits for. Before `begin`: as soon as it waits. Idempotent.

        Not at once but with the loop's next round: called from inside, the block may be over by
        then, and its task must not be cancelled in what follows.
        """
        if self._is_wanted or self._is_ended:
            return
        self._is_wanted = True
        if self._task is not None:
            self._coming = asyncio.get_running_loop().call_soon(self._deliver)

    def end(self, kind: type[BaseException] | None) -> bool:
        """`kind` of exception that leaves the block. True: it is the cut's, and no one else's."""
        self._is_ended = True
        if not self._is_wanted:
            return False
        if self._coming is not None:
            self._coming.cancel()
            return False
        assert self._task is not None
        is_ours_alone = self._task.uncancel() <= self._num_cancels
        return is_ours_alone and kind is asyncio.CancelledError

    def _deliver(self) -> None:
        self._coming = None
        assert self._task is not None
        self._task.cancel()
