"""What a key's limits are charged for, and what not."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvota.core.clock import ManualClock
from kvota.gateway.caller import KeyLimits
from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream.kinds import BackendKind
from tests.support.fake_backend import FakeBackend, Received, Wire, events
from tests.support.gateway_world import PATIENCE_S, GatewayWorld, gateway_world, model_of


async def world_of(
    closing: AsyncExitStack, backend: FakeBackend, kind: BackendKind, **settings: Any
) -> GatewayWorld:
    """On a clock that stands still: no minute of a limit passes."""
    entry = BackendEntry(name="a", url=backend.url, kind=kind)
    models, clock = [model_of("chat", "a")], ManualClock(1000.0)
    return await closing.enter_async_context(
        gateway_world(entry, models=models, clock=clock, **settings)
    )


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not met():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def stalls(asked: Received, wire: Wire) -> None:
    await wire.stall()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("kind", "block_lists"),
    [(BackendKind.VLLM, ()), (BackendKind.KVOTA, ()), (BackendKind.KVOTA, ("credentials",))],
)
async def test_who_leaves_once_a_backend_is_at_work_has_used_it(
    closing: AsyncExitStack,
    backend: FakeBackend,
    kind: BackendKind,
    block_lists: tuple[str, ...],
    stream: bool,
) -> None:
    world = await world_of(closing, backend, kind, block_lists=block_lists)
    key = await world.key(limits=KeyLimits(requests_per_minute=2, tokens_per_minute=5000))
    backend.script = stalls
    asking = asyncio.create_task(world.chat("words " * 400, key=key, stream=stream, max_tokens=8))
    await until(lambda: bool(backend.generations))
    asking.cancel()
    await until(lambda: '"client_closed"' in world.log)
    backend.script = None
    reply = await world.chat(key=key, max_tokens=8)
    assert reply.status == 200
    assert int(reply.headers["x-ratelimit-remaining-requests"]) == 0
    assert 4000 < int(reply.headers["x-ratelimit-remaining-tokens"]) < 5000 - 400


async def test_who_leaves_the_line_of_a_desk_here_has_used_nothing(
    closing: AsyncExitStack, backend: FakeBackend
) -> None:
    backend.gauges.num_blocks = 4  # 64 tokens
    world = await world_of(closing, backend, BackendKind.VLLM)
    key = await world.key(limits=KeyLimits(requests_per_minute=3))
    backend.scripts.append(stalls)
    first = asyncio.create_task(world.chat(key=key, max_tokens=40))
    await until(lambda: bool(backend.generations))
    second = asyncio.create_task(world.chat(key=key, max_tokens=40))
    desk = world.parts.registry["a"].desk
    assert desk is not None
    await until(lambda: len(desk.places) == 2)
    second.cancel()
    await until(lambda: '"client_closed"' in world.log)
    first.cancel()
    await until(lambda: world.log.count('"client_closed"') == 2)
    reply = await world.chat(key=key, max_tokens=40)
    assert (reply.status, reply.headers["x-ratelimit-remaining-requests"]) == (200, "1")


@pytest.mark.parametrize("stream", [True, False])
async def test_who_has_an_answer_may_ask_again_though_its_backend_has_not_hung_up(
    closing: AsyncExitStack, backend: FakeBackend, stream: bool
) -> None:
    world = await world_of(closing, backend, BackendKind.VLLM)
    key = await world.key(limits=KeyLimits(concurrent_requests=1))
    desk = world.parts.registry["a"].desk
    assert desk is not None
    may_end = asyncio.Event()

    async def ends_late(asked: Received, wire: Wire) -> None:
        await wire.head()
        for one in events(asked.path):
            await wire.send(one)
        await may_end.wait()
        await wire.end()

    backend.script = ends_late
    for _ in range(3):
        assert (await world.chat(key=key, stream=stream)).status == 200
        assert not desk.places
    may_end.set()
