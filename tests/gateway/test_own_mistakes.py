"""A bug of ours: its client is told, once; the log has the cause, the record says engine_error."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from kvota.edge.settings import EdgeSettings
from kvota.gateway.dispatch import Dispatcher
from kvota.wire import sse
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_world import GatewayWorld, gateway_world, model_of, vllm_entry

EDGES: Mapping[str, EdgeSettings] = {
    "straight": EdgeSettings(),
    "with pages of others": EdgeSettings(cors_origins=("https://a.example",)),
}
CHAT: Any = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
PATH = "/v1/chat/completions"


@pytest.fixture(params=[*EDGES.values()], ids=[*EDGES])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[GatewayWorld]:
    async with FakeBackend() as backend:
        made = gateway_world(
            vllm_entry("a", backend), models=[model_of("chat", "a")], edge=request.param
        )
        async with made as world:
            yield world


async def test_a_bug_before_the_answer_is_a_500_that_names_its_request(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise LookupError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(Dispatcher, "answer", broken)
        reply = await world.post(PATH, CHAT, x_request_id="mine")
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert "a bug" not in reply.content.decode()
    assert reply.headers["x-kvota-request-id"] == "mine"
    assert (await world.post(PATH, CHAT)).status == 200


async def test_a_bug_in_the_middle_of_a_stream_ends_it_without_done(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: Dispatcher, __: Any, ___: Any, exchange: Any, *____: Any) -> None:
        await exchange.write(b"data: {}\n\n")
        raise LookupError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(Dispatcher, "answer", broken)
        with pytest.raises(Exception, match=r"peer closed|incomplete"):
            await world.post(PATH, {**CHAT, "stream": True})
    whole = await world.post(PATH, {**CHAT, "stream": True})
    assert whole.content.endswith(sse.DONE)
