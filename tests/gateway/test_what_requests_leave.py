"""What a request held goes when it ends: bodies are large, and the collector counts objects."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvota.edge.exchange import Exchange
from kvota.gateway.attempts import Asked
from kvota.gateway.caller import KeyLimits
from tests.support.fake_backend import FakeBackend, Script, begins, fails
from tests.support.gateway_world import GatewayWorld, gateway_world, model_of, vllm_entry

TURNS_MAX = 50  # the answer is there a little before its call has ended


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend() as fake:
        yield fake


@pytest.fixture
async def world(backend: FakeBackend) -> AsyncIterator[GatewayWorld]:
    models = [model_of("chat", "a", fallback="other"), model_of("other", "a")]
    async with gateway_world(vllm_entry("a", backend), models=models) as made:
        yield made


def held() -> dict[int, str]:
    kinds = Asked | Exchange
    return {id(one): type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds)}


@pytest.fixture(autouse=True)
def others() -> Iterator[dict[int, str]]:
    """What other tests hold. Nothing is collected from here on."""
    gc.collect()
    gc.disable()
    yield held()
    gc.enable()


async def assert_nothing_is_held(others: dict[int, str]) -> None:
    for _ in range(TURNS_MAX):
        if held().items() <= others.items():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"still there: {held().items() - others.items()}")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 200),
        ({"stream": True}, 200),
        ({"temperature": "hot"}, 400),
        ({"max_tokens": -1}, 400),
        ({"model": "another"}, 404),
    ],
)
async def test_nothing_is_left_of_a_request(
    others: dict[int, str], world: GatewayWorld, fields: dict[str, Any], status: int
) -> None:
    reply = await world.chat("hello", **fields)
    assert reply.status == status, reply.content
    await assert_nothing_is_held(others)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "script", [fails(500), fails(400), fails(429)], ids=["broken", "refused", "busy"]
)
async def test_nothing_is_left_where_backends_fail(
    others: dict[int, str],
    world: GatewayWorld,
    backend: FakeBackend,
    script: Script,
    is_stream: bool,
) -> None:
    backend.script = script
    reply = await world.chat("hello", stream=is_stream)
    assert reply.status >= 400
    await assert_nothing_is_held(others)


async def test_nothing_is_left_of_a_stream_that_breaks(
    others: dict[int, str], world: GatewayWorld, backend: FakeBackend
) -> None:
    backend.script = begins(3, lambda wire: wire.drop())
    assert b"error" in (await world.chat("hello", stream=True)).content
    await assert_nothing_is_held(others)


async def test_nothing_is_left_of_who_is_turned_away_at_the_door(
    others: dict[int, str], world: GatewayWorld
) -> None:
    key = await world.key(limits=KeyLimits(requests_per_minute=1))
    assert (await world.chat()).status == 401
    assert (await world.chat(key=key)).status == 200
    assert (await world.chat(key=key)).status == 429
    await assert_nothing_is_held(others)
