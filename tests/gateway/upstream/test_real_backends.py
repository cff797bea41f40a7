"""The contract with foreign backends, held by real ones: `make test-vllm` starts them.

    KVOTA_REAL_BACKENDS="vllm=http://127.0.0.1:8100 llamacpp=http://127.0.0.1:8101"

Without that variable there is nothing to test here, and everything is skipped. Each backend stands
behind a whole gateway, on real sockets.
"""

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest

from kvota.core.clock import SystemClock
from kvota.gateway.settings import BackendEntry, ModelEntry
from kvota.gateway.upstream.connection import Upstream, UpstreamSettings
from kvota.gateway.upstream.counting import BackendCounter
from kvota.gateway.upstream.kinds import TRAITS, BackendKind
from kvota.gateway.upstream.probing import Prober
from kvota.sizing.vllm import VllmBill, Wishes, vllm_flags
from tests.support.gateway_node import LiveGateway
from tests.support.http_client import CHAT, COMPLETIONS, Client, Reply
from tests.support.live_node import until

REAL: Final = dict(one.split("=", 1) for one in os.environ.get("KVOTA_REAL_BACKENDS", "").split())
MODEL: Final = "real"
GREEDY: Final = {"temperature": 0, "seed": 1}
MAX_RUNNING: Final = 3
PATIENCE_S: Final = 120.0  # a real engine on a busy machine

pytestmark = pytest.mark.skipif(not REAL, reason="KVOTA_REAL_BACKENDS names no backend")


class RealWorld(Client):
    """A gateway in front of one real backend."""

    def __init__(self, kind: BackendKind, url: str) -> None:
        self.kind = kind
        self.backend_url = url
        self.served_as: str = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        entry = BackendEntry(
            name="b", url=url, kind=kind, max_running_requests=MAX_RUNNING, kv_tokens=8192
        )
        model = ModelEntry(name=MODEL, backends=("b",), served_as=self.served_as)
        self.gateway = LiveGateway(entry, models=(model,))
        super().__init__(self.gateway.url, MODEL)

    @property
    def held_tokens(self) -> int:
        """By the desk that the gateway keeps for it."""
        desk = self.gateway.parts.registry["b"].desk
        assert desk is not None
        held: int = self.gateway.on_loop(lambda: desk.snapshot().held_tokens)
        return held

    def direct(self, path: str, body: dict[str, Any]) -> Any:
        """What the backend answers when it is asked without a gateway."""
        body = {**body, "model": self.served_as}
        return httpx.post(self.backend_url + path, json=body, timeout=PATIENCE_S).json()

    def wait_idle(self) -> None:
        until(lambda: self.metric("kvota_gateway_requests_open") == 0, "no open request")
        until(lambda: self.held_tokens == 0, "the desk to hold nothing")

    def stop(self) -> None:
        self.close()
        self.gateway.stop()


@pytest.fixture(scope="module", params=sorted(REAL) or ["none"])
def world(request: pytest.FixtureRequest) -> Iterator[RealWorld]:
    real = RealWorld(BackendKind(request.param), REAL[request.param])
    yield real
    real.stop()


@asynccontextmanager
async def upstream_of(world: RealWorld) -> AsyncIterator[Upstream]:
    upstream = Upstream(UpstreamSettings(name="b", url=world.backend_url), SystemClock())
    yield upstream
    await upstream.close()


async def test_a_probe_finds_it_well_and_reads_its_size(world: RealWorld) -> None:
    async with upstream_of(world) as upstream:
        state = await Prober(upstream, world.kind, SystemClock()).probe()
    assert state.is_healthy, state.why
    assert world.served_as in (state.models or ())
    assert state.max_model_len, "needed to bound an answer without max_tokens"
    if world.kind is BackendKind.VLLM:
        assert state.capacity_tokens, "vllm:cache_config_info says it"
        assert state.used_tokens == 0


BODIES: Final[list[tuple[str, dict[str, Any]]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "Hello, 世界"}], "max_tokens": 12}),
    (COMPLETIONS, {"prompt": "one two three", "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_body_and_stream_say_what_it_says_itself(
    world: RealWorld, path: str, body: dict[str, Any]
) -> None:
    asked = {**body, **GREEDY, "model": MODEL}
    expected = world.direct(path, asked)
    whole = world.post(path, asked)
    stream = world.post(path, {**asked, "stream": True, "stream_options": {"include_usage": True}})
    assert whole.status == stream.status == 200, whole.content
    part = expected["choices"][0]
    text = part["text"] if "text" in part else part["message"]["content"]
    assert whole.text() == stream.text() == text
    assert whole.finish() == stream.finish() == part["finish_reason"]
    assert whole.json["model"] == MODEL
    for reply in (whole, stream):
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert reply.usage[name] == expected["usage"][name], name
    assert stream.events[-1] == "[DONE]"


def test_its_usage_is_kept_whether_or_not_the_client_asks_for_it(world: RealWorld) -> None:
    def total() -> float:
        return world.metric("kvota_gateway_output_tokens_total")

    until(lambda: world.metric("kvota_gateway_requests_open") == 0, "earlier records")
    before = total()
    body = {**BODIES[0][1], **GREEDY, "model": MODEL, "ignore_eos": True}
    reply = world.post(CHAT, {**body, "stream": True})
    assert all(not chunk.get("usage") for chunk in reply.chunks), "nobody asked"
    expected = world.direct(CHAT, body)["usage"]["completion_tokens"]
    until(lambda: total() > before, "the record")
    assert total() - before == expected


async def test_prompts_are_counted_before_as_it_counts_them_after(world: RealWorld) -> None:
    """So that the desk's price is the bill."""
    form = TRAITS[world.kind].tokenize
    if form is None:
        pytest.skip("it cannot be asked")
    for path, body in BODIES:
        usage = (await asyncio.to_thread(world.direct, path, body))["usage"]
        async with upstream_of(world) as upstream:
            counter = BackendCounter(upstream, form, model=world.served_as)
            counted = await counter.count(msgspec.json.encode({**body, "model": world.served_as}))
        assert (counted.tokens, counted.is_exact) == (usage["prompt_tokens"], True), path


def test_several_choices_are_kept_apart(world: RealWorld) -> None:
    body = {"max_tokens": 4, "n": 2, "temperature": 1, "seed": 3}
    reply = world.chat("Hello", **body, stream=True)
    assert reply.status == 200, reply.content
    for choice in (0, 1):
        assert reply.finish(choice) in ("length", "stop")
    assert len(world.chat("Hello", **body).json["choices"]) == 2


def test_a_stop_string_ends_it(world: RealWorld) -> None:
    free = world.complete("one two three", max_tokens=12, **GREEDY).text()
    stop = free[2:4]
    reply = world.complete("one two three", max_tokens=12, **GREEDY, stop=[stop], stream=True)
    assert reply.finish() == "stop"
    assert reply.text() == free[: free.index(stop)]


def test_what_it_rejects_is_the_clients_mistake(world: RealWorld) -> None:
    for wrong in ({"temperature": -3}, {"max_tokens": 10_000_000}):
        reply = world.chat("hi", **wrong)
        assert reply.status == 400, (wrong, reply.content)
        assert reply.error["message"]


def test_who_leaves_stops_its_work(world: RealWorld) -> None:
    body = {**world.chat_body("hi", max_tokens=500), "ignore_eos": True}
    with world.stream(CHAT, body) as stream:
        stream.next_chunk()
    world.wait_idle()
    if world.kind is BackendKind.VLLM:
        page = "vllm:num_requests_running{"

        def running() -> float:
            lines = httpx.get(f"{world.backend_url}/metrics").text.splitlines()
            return sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(page))

        until(lambda: running() == 0, "it to have stopped", PATIENCE_S)
        difference = "kvota_kv_ledger_difference_tokens"
        until(lambda: world.metric(difference) == 0, "its blocks to be free", PATIENCE_S)


def test_more_than_it_may_run_wait_here_and_all_are_answered(world: RealWorld) -> None:
    def ask(number: int) -> Reply:
        return world.chat(f"number {number}", max_tokens=16, stream=number % 2 == 0)

    with ThreadPoolExecutor(4 * MAX_RUNNING) as pool:
        replies = list(pool.map(ask, range(4 * MAX_RUNNING)))
    assert {reply.status for reply in replies} == {200}
    assert all(reply.finish() in ("length", "stop") for reply in replies)
    world.wait_idle()


VLLM_PYTHON: Final = Path(".venv-vllm/bin/python")


@pytest.mark.skipif("vllm" not in REAL, reason="no vLLM is here")
def test_this_vllm_knows_every_flag_that_it_is_given() -> None:
    """What `kvota serve --engine vllm` computes, and the two kinds of KV cache that it asks for."""
    asked = subprocess.run(
        [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--help=all"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    known = {word.rstrip(",") for word in asked.stdout.split() if word.startswith("--")}
    bill = VllmBill(
        device_bytes=80 * 2**30, weight_bytes=2**30, activation_bytes=0, outside_torch_bytes=0,
        graph_bytes=0, others_bytes=0, kv_bytes_per_token=2**16,
    )  # fmt: skip
    flags = vllm_flags(bill, Wishes(context_max=8192, has_fp8=True, tensor_parallel=2))
    fixed = {"--host", "--port", "--served-model-name", "--model", "--enable-prompt-tokens-details"}
    assert {flag.name for flag in flags} | fixed <= known
    [choices] = re.findall(r"--kv-cache-dtype \{([^}]*)\}", asked.stdout)[:1]
    assert {"auto", "fp8"} <= set(choices.split(","))
