"""Settings that change while requests come in."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from tests.support.fake_backend import FakeBackend
from tests.support.gateway_world import PATIENCE_S, gateway_world, model_of, vllm_entry
from tests.support.http_client import CHAT


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_body_that_is_still_coming_goes_by_the_settings_there_are_when_it_is_whole(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend, path: str
) -> None:
    models = [model_of("chat", "a")]
    world = await closing.enter_async_context(gateway_world(vllm_entry("a", a), models=models))
    fields = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    body, may_go_on = json.dumps(fields).encode(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:10]
        await may_go_on.wait()
        yield body[10:]

    headers = {"content-type": "application/json", "content-length": str(len(body))}
    asking = asyncio.create_task(world.http.post(path, content=slowly(), headers=headers))
    async with asyncio.timeout(PATIENCE_S):
        while not world.parts.live.num_open:  # noqa: ASYNC110 - it comes over a socket
            await asyncio.sleep(0.01)
    world.fleet = msgspec.structs.replace(
        world.fleet, backends=(vllm_entry("b", b),), models=(model_of("chat", "b"),)
    )
    await world.parts.reload()
    may_go_on.set()
    reply = await asking
    assert (reply.status_code, reply.headers["x-kvota-backend"]) == (200, "b")
