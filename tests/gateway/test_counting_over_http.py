"""A prompt is counted before it is sent: nobody has to wait for that longer than for an answer."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvota.gateway.backends import Backend
from kvota.gateway.upstream.counting import PromptCount
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_world import (
    PATIENCE_S,
    GatewayWorld,
    gateway_world,
    model_of,
    vllm_entry,
)


class Endless:
    """A tokenizer that is asked, and never says."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.is_left = asyncio.Event()

    async def count(self, body: bytes) -> PromptCount:
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.is_left.set()
        raise AssertionError("nobody says anything")


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Endless:
    made = Endless()
    monkeypatch.setattr(Backend, "counter", lambda self, model: made)
    monkeypatch.setattr(Backend, "estimate_max_tokens", 0)
    return made


@pytest.fixture
async def world(closing: AsyncExitStack, backend: FakeBackend, counter: Endless) -> GatewayWorld:
    made = gateway_world(vllm_entry("a", backend), models=[model_of("chat", "a")])
    return await closing.enter_async_context(made)


@pytest.mark.parametrize("stream", [True, False])
async def test_counting_ends_when_its_client_leaves(
    world: GatewayWorld, backend: FakeBackend, counter: Endless, stream: bool
) -> None:
    asking = asyncio.create_task(world.chat(stream=stream))
    async with asyncio.timeout(PATIENCE_S):
        await counter.is_asked.wait()
        asking.cancel()
        await counter.is_left.wait()
        await world.parts.live.wait_idle()
    assert '"client_closed"' in world.log
    assert not backend.generations


async def test_counting_ends_with_the_time_of_its_request(
    world: GatewayWorld, backend: FakeBackend, counter: Endless
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        reply = await world.chat(headers={"x-kvota-deadline-s": "0.2"})
    assert counter.is_left.is_set()
    assert reply.error["code"] in ("request_timeout", "deadline_unreachable")
    assert not backend.generations
