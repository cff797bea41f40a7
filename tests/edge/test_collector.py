import gc
import weakref
from collections.abc import Iterator

import pytest

from kvota.edge.collector import spare_what_stays


class Knot:
    """Holds itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def spared() -> Iterator[None]:
    thresholds = gc.get_threshold()
    spare_what_stays()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("spared")
def test_the_collector_sees_what_comes_later_and_nothing_of_what_was_there() -> None:
    seen = len(gc.get_objects())
    assert gc.get_freeze_count() > 100 * seen, "all modules are frozen"
    gone = weakref.ref(Knot())
    gc.collect()
    assert gone() is None
