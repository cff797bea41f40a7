"""What is kept of a request is kept before its client could miss it."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvota.edge.exchange import Exchange
from kvota.edge.settings import EdgeSettings
from kvota.gateway.usage import UsageBook, UsageLine
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_node import GatewayNode, gateway_node
from tests.support.gateway_world import gateway_world, model_of, vllm_entry
from tests.support.http_client import CHAT


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str | UsageLine]:
    """What gateways did, one after the other: a usage line kept, or the end of an answer sent."""
    done: list[str | UsageLine] = []
    deliver, add = Exchange._deliver, UsageBook.add

    async def delivered(self: Exchange, content: bytes, *, more: bool, opening: Any) -> None:
        if type(self._settings) is EdgeSettings and (not more or b"[DONE]" in content):
            done.append("end")
        await deliver(self, content, more=more, opening=opening)

    def added(self: UsageBook, line: UsageLine) -> None:
        done.append(line)
        add(self, line)

    monkeypatch.setattr(Exchange, "_deliver", delivered)
    monkeypatch.setattr(UsageBook, "add", added)
    return done


def check(order: list[str | UsageLine], *, output_tokens: int) -> None:
    kept, end = order
    assert isinstance(kept, UsageLine)
    assert (kept.output_tokens, end) == (output_tokens, "end")
    assert kept.prompt_tokens > 0
    assert bool(kept.kv_block_seconds) == bool(output_tokens)
    order.clear()


@pytest.fixture
def node() -> Iterator[GatewayNode]:
    with gateway_node() as live:
        yield live


@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_of_a_nodes_answer_is_kept_before_its_end_is_sent(
    node: GatewayNode, order: list[str | UsageLine], stream: bool
) -> None:
    reply = node.chat("hi", max_tokens=4, ignore_eos=True, stream=stream)
    assert reply.status == 200
    check(order, output_tokens=4)
    if stream:
        assert reply.events[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_usage_of_a_foreign_answer_is_kept_before_its_end_is_sent(
    order: list[str | UsageLine], stream: bool
) -> None:
    async with (
        FakeBackend() as fake,
        gateway_world(vllm_entry("a", fake), models=[model_of("chat", "a")]) as world,
    ):
        assert (await world.chat(stream=stream)).status == 200
        check(order, output_tokens=8)
        body = {"model": "chat", "input": ["one", "two"]}
        assert (await world.post("/v1/embeddings", body)).status == 200
        check(order, output_tokens=0)


async def test_what_is_refused_is_kept_once_too(order: list[str | UsageLine]) -> None:
    async with (
        FakeBackend() as fake,
        gateway_world(vllm_entry("a", fake), models=[model_of("chat", "a")]) as world,
    ):
        assert (await world.post(CHAT, {"model": "none", "messages": []})).status == 404
        end, kept = order
        assert end == "end"
        assert isinstance(kept, UsageLine)
        assert (kept.requests, kept.output_tokens) == (1, 0)
