"""What a request held goes when it ends, and not when the collector looks next."""

import gc
from collections.abc import Iterator

import pytest

from kvota.core.request import Request
from kvota.scheduler.sequence import Sequence, SequenceGroup
from tests.support.engine_world import EngineWorld
from tests.support.scripted import ScriptedExecutor, say

HELD = (Sequence, SequenceGroup, Request)


@pytest.fixture(autouse=True)
def others() -> Iterator[dict[int, str]]:
    """What other tests hold. Nothing is collected from here on."""
    gc.collect()
    gc.disable()
    yield held()
    gc.enable()


def held() -> dict[int, str]:
    return {id(one): type(one).__name__ for one in gc.get_objects() if isinstance(one, HELD)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"max_tokens": 0},
        {"prompt": [13]},  # which breaks the model
        {"deadline_s": 0.5},
    ],
)
def test_nothing_is_left_of_a_request(others: dict[int, str], fields: dict[str, object]) -> None:
    world = EngineWorld(ScriptedExecutor(say(), poison=frozenset({13})))
    for name in ("first", "second"):
        world.submit(name, **fields)  # type: ignore[arg-type]
        world.run()
        assert world.ended(name)
    assert held().items() <= others.items()


def test_nothing_is_left_of_a_request_that_was_cancelled(others: dict[int, str]) -> None:
    world = EngineWorld(ScriptedExecutor(say()))
    world.submit("gone", n=2)
    world.step()
    world.cancel("gone")
    world.run()
    assert world.ended("gone")
    assert held().items() <= others.items()
