"""Computing gives way to answering.

A step keeps every core busy. Without this, a finished token, a refusal or a health probe would wait
for a core until the kernel's scheduler takes one away from the step. With a lower priority the
compute threads step aside at once, for the microseconds that HTTP needs; nothing else changes, and
on a machine with nothing else to do the computing is as fast as before.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import get_native_id
from typing import TypeVar

COMPUTE_NICENESS = 5  # more than the rest of the process

T = TypeVar("T")


def give_way() -> None:
    """Lower the priority of the calling thread and of the threads it will start.

    Linux alone knows priorities of threads; elsewhere, and where it is forbidden, nothing happens.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            thread = get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + COMPUTE_NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def giving_way(work: Callable[[], T]) -> T:
    """Do `work` on a thread that gives way, so that the threads it starts do so for ever."""
    with ThreadPoolExecutor(1, initializer=give_way) as pool:
        return pool.submit(work).result()
