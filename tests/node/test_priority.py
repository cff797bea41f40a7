import os
import sys
import threading

import pytest

from kvota.node.priority import COMPUTE_NICENESS, giving_way


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_compute_threads_give_way_and_the_rest_of_the_process_does_not() -> None:
    before = niceness()

    def started_there() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(niceness()))
        thread.start()
        thread.join()
        return found[0]

    assert giving_way(niceness) == min(before + COMPUTE_NICENESS, 19)
    assert giving_way(started_there) == min(before + COMPUTE_NICENESS, 19)
    assert niceness() == before


def test_what_goes_wrong_is_told_to_who_asked() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        giving_way(fail)
