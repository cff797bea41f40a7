"""One of our own nodes as a backend: what comes through the relay is what it answers directly."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from kvota.core.clock import SystemClock
from kvota.gateway.upstream.connection import Upstream, UpstreamSettings
from kvota.gateway.upstream.counting import BackendCounter
from kvota.gateway.upstream.failures import RejectedByBackend
from kvota.gateway.upstream.kinds import BackendKind, TokenizeForm
from kvota.gateway.upstream.outgoing import outgoing_body
from kvota.gateway.upstream.passage import Ask
from kvota.gateway.upstream.probing import Prober
from kvota.gateway.upstream.relay import Relay
from tests.support.exchange_client import ExchangeClient
from tests.support.live_node import MODEL, LiveNode, live_node, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATED = "kvota_generated_tokens_total"
CLOCK = SystemClock()
MESSAGES = [{"role": "user", "content": "Hello, 世界"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "max_tokens": 12, "seed": 1}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 5, "n": 3, "seed": 1, "logprobs": True,
            "top_logprobs": 2}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 5, "seed": 1, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": ["one", "two"], "n": 2, "max_tokens": 6, "seed": 1, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "one", "max_tokens": 3, "seed": 1, "echo": True}),
    (COMPLETIONS, {"prompt": "one", "max_tokens": 3, "seed": 1, "prompt_logprobs": 1}),
]  # fmt: skip


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(max_running_requests=8) as node:
        yield node


@pytest.fixture
async def upstream(node: LiveNode) -> AsyncIterator[Upstream]:
    settings = UpstreamSettings(name="node", url=f"http://127.0.0.1:{node.port}")
    upstream = Upstream(settings, CLOCK)
    yield upstream
    await upstream.close()


def num_choices(body: dict[str, Any]) -> int:
    prompts = body.get("prompt")
    return int(body.get("n", 1)) * (len(prompts) if isinstance(prompts, list) else 1)


def without_ids(body: Any) -> Any:
    """The parts of an answer that every answer has its own of, left out."""
    return {name: value for name, value in body.items() if name not in ("id", "created")}


async def direct(upstream: Upstream, path: str, body: dict[str, Any]) -> Any:
    async with upstream.open(path, json.dumps({"model": MODEL, **body}).encode()) as reply:
        return json.loads(await reply.body())


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("kind", [BackendKind.KVOTA, BackendKind.VLLM])
async def test_a_body_put_together_is_the_body_it_gives(
    upstream: Upstream, path: str, body: dict[str, Any], kind: BackendKind
) -> None:
    """As a node, and as a vLLM that it speaks the dialect of (with running usage)."""
    expected = await direct(upstream, path, {**body, "use_prefix_cache": False})
    content = {"model": "alias", **body, "use_prefix_cache": False}
    sent = outgoing_body(json.dumps(content).encode(), model=MODEL, kind=kind)
    async with upstream.open(path, sent) as reply:
        ask = Ask(is_stream=False, num_choices=num_choices(body))
        relay = Relay(reply, ask, CLOCK)
        assembled = msgspec.to_builtins(await relay.collect())
    if kind is BackendKind.KVOTA:
        assert without_ids(assembled) == without_ids(expected)
    else:  # it was not asked to leave the prefix cache alone
        assert assembled["choices"] == expected["choices"]
    assert relay.tally.output_tokens == expected["usage"]["completion_tokens"]
    assert relay.tally.prompt_tokens == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("path", "body"), BODIES[:5])
async def test_a_stream_says_what_the_body_says(
    upstream: Upstream, path: str, body: dict[str, Any]
) -> None:
    expected = await direct(upstream, path, body)
    content = json.dumps({"model": "alias", **body}).encode()
    sent = outgoing_body(content, model=MODEL, kind=BackendKind.KVOTA)
    client = ExchangeClient()
    async with upstream.open(path, sent) as reply:
        ask = Ask(is_stream=True, num_choices=num_choices(body), model="alias")
        await Relay(reply, ask, CLOCK).stream(client.exchange)
    texts = [""] * num_choices(body)
    for chunk in client.reply.chunks:
        assert chunk["model"] == "alias"
        assert "usage" not in chunk, "nobody asked"
        for choice in chunk["choices"]:
            part = choice.get("text") or choice.get("delta", {}).get("content")
            texts[choice["index"]] += part or ""
    answered = expected["choices"]
    assert texts == [
        one["text"] if "text" in one else one["message"]["content"] for one in answered
    ]
    assert client.reply.events[-1] == "[DONE]"


async def test_it_is_probed_by_the_names_that_outside_schedulers_know(
    node: LiveNode, upstream: Upstream
) -> None:
    state = await Prober(upstream, BackendKind.KVOTA, CLOCK).probe()
    gauges = node.parts.engine.gauges
    assert state.is_healthy, state.why
    assert state.models == (MODEL,)
    assert state.max_model_len == 1024
    assert state.block_size == gauges.block_size
    assert state.capacity_tokens == gauges.num_blocks * gauges.block_size
    assert (state.used_tokens, state.running, state.waiting) == (0, 0, 0)


async def test_it_counts_prompts_as_it_will_charge_them(upstream: Upstream) -> None:
    counter = BackendCounter(upstream, TokenizeForm.VLLM, model=MODEL)
    for path, body in (BODIES[0], BODIES[3]):
        usage = (await direct(upstream, path, body))["usage"]
        counted = await counter.count(json.dumps({"model": MODEL, **body}).encode())
        assert (counted.tokens, counted.is_exact) == (usage["prompt_tokens"], True)


async def test_its_rejections_are_passed_on_word_for_word(upstream: Upstream) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100_000}
    with pytest.raises(RejectedByBackend) as rejected:
        async with upstream.open(CHAT, json.dumps(body).encode()):
            pass
    assert rejected.value.status == 400
    assert rejected.value.code in ("output_too_long", "context_length_exceeded")
    assert "1024" in rejected.value.message


async def test_its_work_stops_when_the_stream_is_left(node: LiveNode, upstream: Upstream) -> None:
    body = {"prompt": [70] * 50, "max_tokens": 900, "stream": True, "model": MODEL}
    generated = await asyncio.to_thread(node.metric, GENERATED)
    with node.stage.held() as gate:
        gate.allow(3)
        others = await asyncio.to_thread(lambda: node.client_ports)
        async with upstream.open(COMPLETIONS, json.dumps(body).encode()) as reply:
            await Relay(reply, Ask(is_stream=True), CLOCK).begin()
        await asyncio.to_thread(until, lambda: node.client_ports <= others, "the close to be seen")
        for _ in range(5):  # turns of the loop: the watcher wakes, the letter is posted
            await asyncio.to_thread(node.on_loop, lambda: None)
    await asyncio.to_thread(node.wait_idle)
    assert await asyncio.to_thread(node.metric, GENERATED) < generated + 20
