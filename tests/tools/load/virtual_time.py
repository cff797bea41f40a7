"""An event loop whose time jumps to the next timer, so that hours pass in no time and exactly."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.DefaultSelector):
    """Instead of waiting for a timer it moves the clock there."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left that could happen"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` moves only by what timers wait for."""

    def __init__(self) -> None:
        self._still = _NoWaiting()
        super().__init__(self._still)

    def time(self) -> float:
        return float(self._still.now_s)


class LoopClock:
    """The clock of the running loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
