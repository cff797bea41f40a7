"""Where is my request, when a foreign engine has it: seen, waited for and ended at the gateway."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from kvota.gateway.settings import BackendEntry, Fleet, ModelEntry
from kvota.gateway.upstream.kinds import BackendKind
from kvota.tools.top import words
from kvota.tools.top.scene import Watch
from kvota.tools.top.server import connect
from kvota.wire.requests import LATEST
from tests.support.fake_backend import FakeBackend, Wire, begins, never_answers
from tests.support.gateway_world import GatewayWorld, gateway_world, model_of, vllm_entry
from tests.support.http_client import Reply
from tests.support.live_node import LiveNode, live_node

PATIENCE_S = 60.0
EMBED = "/v1/embeddings"


@pytest.fixture
async def world(closing: AsyncExitStack, backend: FakeBackend) -> GatewayWorld:
    """One place at the backend; who else comes waits."""
    entry = vllm_entry("gpu-1", backend, max_running_requests=1)
    made = gateway_world(entry, models=[model_of("chat", "gpu-1")])
    return await closing.enter_async_context(made)


class Client:
    """Requests under names of their own, running beside the test."""

    def __init__(self, world: GatewayWorld, key: str | None = None) -> None:
        self._world = world
        self._key = key
        self.tasks: dict[str, asyncio.Task[Reply]] = {}

    def ask(self, name: str, **fields: Any) -> None:
        headers = {"x_request_id": name}
        asking = self._world.chat("a secret", key=self._key, headers=headers, **fields)
        self.tasks[name] = asyncio.create_task(asking)

    async def listed(self, path: str = "/v1/requests") -> dict[str, Any]:
        reply = await self._world.get(path, self._key)
        assert reply.status == 200, reply.content
        assert b"secret" not in reply.content
        return {one["client_id"]: one for one in reply.json["data"]}

    async def delete(self, name: str, path: str = "/v1/requests") -> Reply:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        return Reply(await self._world.http.delete(f"{path}/{name}", headers=headers))

    async def until(self, name: str, phase: str, *, output_tokens: int = 0) -> dict[str, Any]:
        """Wait until it is in this phase and has so many tokens, and say what is seen of it."""
        found: dict[str, Any] = {}

        async def has_come() -> bool:
            found.update((await self.listed()).get(name, {}))
            return found.get("phase") == phase and found["output_tokens"] >= output_tokens

        await until(has_come)
        return found

    async def until_gone(self) -> None:
        async def is_empty() -> bool:
            return not await self.listed()

        await until(is_empty)


async def until(met: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await met():  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.01)


async def one_runs_one_waits(world: GatewayWorld, backend: FakeBackend) -> Client:
    """`first` is at the backend, which never answers it; `second` is in line behind it."""
    client = Client(world)
    backend.script = never_answers
    client.ask("first")
    await client.until("first", "prefill")
    client.ask("second")
    await client.until("second", "queued")
    return client


async def test_a_request_is_seen_in_line_then_at_work_then_no_more(
    world: GatewayWorld, backend: FakeBackend
) -> None:
    client = Client(world)
    backend.scripts.extend([begins(4, Wire.stall), never_answers])
    client.ask("first", stream=True, max_tokens=50)
    first = await client.until("first", "decode", output_tokens=3)
    assert (first["position"], first["eta_s"], first["why"]) == (None, None, None)
    assert (first["model"], first["backend"], first["lane"]) == ("chat", "gpu-1", "short")
    assert (first["output_tokens"], first["max_tokens"], first["num_choices"]) == (3, 50, 1)
    assert first["prompt_tokens"] > 0
    assert first["computed_tokens"] == first["prompt_tokens"] + 3
    assert first["age_s"] >= 0
    assert "tenant" not in first
    client.ask("second", max_tokens=50)
    second = await client.until("second", "queued")
    assert (second["position"], second["why"]) == (1, "all 1 places are taken")
    assert second["eta_s"] > 0
    assert second["eta_basis"] in LATEST, "nothing has ended yet"
    assert (second["output_tokens"], second["computed_tokens"]) == (0, 0)
    client.ask("third", max_tokens=50)
    assert (await client.until("third", "queued"))["position"] == 2
    shown = await client.listed("/admin/requests")
    assert [one["tenant"] for one in shown.values()] == ["anonymous"] * 3

    assert (await client.delete("first")).json["num_cancelled"] == 1
    reply = await client.tasks["first"]
    assert reply.chunks[-1]["error"]["code"] == "request_cancelled"
    async with asyncio.timeout(PATIENCE_S):
        await backend.generations[0].is_gone.wait()
    await client.until("second", "prefill")

    async def is_asked() -> bool:
        return len(backend.generations) == 2

    await until(is_asked)  # else the third one would get its script
    assert (await client.delete(second["id"], "/admin/requests")).status == 200
    reply = await client.tasks["second"]
    assert (reply.status, reply.error["code"]) == (410, "request_cancelled")
    assert (await client.tasks["third"]).status == 200
    await client.until_gone()
    assert (await client.delete("first")).status == 404
    desk = world.parts.registry["gpu-1"].desk
    assert desk is not None
    assert desk.snapshot().held_tokens == 0
    desk.check()


async def test_who_waits_is_cancelled_in_line_and_the_backend_hears_nothing(
    world: GatewayWorld, backend: FakeBackend
) -> None:
    client = await one_runs_one_waits(world, backend)
    assert (await client.delete("second")).status == 200
    assert (await client.tasks["second"]).status == 410
    assert len(backend.generations) == 1
    await client.delete("first")
    await client.tasks["first"]
    ended = 'kvota_gateway_requests_total{model="chat",outcome="client_closed"}'
    assert await world.metrics(ended) == 2
    assert (await world.metrics('kvota_gateway_breaker_state{backend="gpu-1",state="closed"}')) == 1


async def test_a_key_sees_and_ends_only_what_its_tenant_has_asked(
    closing: AsyncExitStack, world: GatewayWorld, backend: FakeBackend
) -> None:
    backend.script = never_answers
    search = Client(world, await world.key(tenant="search"))
    writing = Client(world, await world.key(tenant="writing"))
    operator = Client(world, await world.key(tenant="operations", is_admin=True))
    search.ask("mine")
    await search.until("mine", "prefill")
    writing.ask("theirs")
    await writing.until("theirs", "queued")
    assert list(await search.listed()) == ["mine"]
    assert list(await writing.listed()) == ["theirs"]
    assert await operator.listed() == {}
    shown = await operator.listed("/admin/requests")
    assert {name: one["tenant"] for name, one in shown.items()} == {
        "mine": "search",
        "theirs": "writing",
    }
    assert (await writing.delete("mine")).status == 404
    assert (await writing.delete("mine", "/admin/requests")).status == 403
    assert (await operator.delete("mine", "/admin/requests")).status == 200
    assert (await search.tasks["mine"]).status == 410
    assert (await writing.delete("theirs")).status == 200
    await writing.tasks["theirs"]


@pytest.fixture
def node() -> Iterator[LiveNode]:
    with live_node() as opened:
        yield opened


async def test_own_and_foreign_requests_are_put_together_and_one_that_is_away_hides_nothing(
    closing: AsyncExitStack, backend: FakeBackend, node: LiveNode
) -> None:
    entries = [
        vllm_entry("gpu-1", backend),
        BackendEntry(name="own", url=node.url, kind=BackendKind.KVOTA),
    ]
    models = [model_of("chat", "gpu-1"), ModelEntry(name="tiny", backends=("own",))]
    world = await closing.enter_async_context(gateway_world(*entries, models=models))
    client = Client(world)
    backend.script = never_answers
    with node.stage.held() as gate:
        client.ask("foreign")
        client.ask("own", model="tiny", max_tokens=3)
        await asyncio.to_thread(gate.wait_for_step)
        await client.until("foreign", "prefill")
        shown = await client.listed("/admin/requests")
        assert {name: one["backend"] for name, one in shown.items()} == {
            "foreign": "gpu-1",
            "own": "own",
        }
    assert (await client.tasks["own"]).status == 200
    await world.parts.registry["own"].upstream.close()
    assert list(await client.listed()) == ["foreign"]
    await client.delete("foreign")
    await client.tasks["foreign"]


@pytest.mark.parametrize("backends", ["gone", "changed"])
async def test_what_runs_where_a_reload_has_been_is_seen_and_ended_as_before(
    world: GatewayWorld, backend: FakeBackend, backends: str
) -> None:
    client = Client(world)
    backend.scripts.extend([begins(4, Wire.stall), never_answers])
    client.ask("first", stream=True, max_tokens=50)
    await client.until("first", "decode")
    client.ask("second")
    await client.until("second", "queued")
    name = "gpu-1" if backends == "changed" else "gpu-2"
    entry = vllm_entry(name, backend, max_running_requests=2, idle_timeout_s=50.0)
    world.fleet = Fleet(backends=(entry,), models=(model_of("chat", name),))
    await world.parts.reload()
    client.ask("third")
    await client.until("third", "prefill")
    shown = await client.listed()
    assert {name: one["phase"] for name, one in shown.items()} == {
        "first": "decode",
        "second": "queued",
        "third": "prefill",
    }
    for name in shown:
        assert (await client.delete(name)).json["num_cancelled"] == 1
    await asyncio.gather(*client.tasks.values())
    await client.until_gone()


async def test_who_waits_where_a_reload_has_been_is_refused_by_a_drain(
    world: GatewayWorld, backend: FakeBackend
) -> None:
    client = await one_runs_one_waits(world, backend)
    world.fleet = Fleet(backends=(), models=())
    await world.parts.reload()
    world.parts.begin_drain()
    reply = await client.tasks["second"]
    assert (reply.status, reply.error["code"]) == (503, "draining")
    assert (await client.delete("first")).status == 200
    await client.tasks["first"]


async def test_what_a_node_still_does_that_a_reload_took_out_is_seen_once(
    closing: AsyncExitStack, backend: FakeBackend, node: LiveNode
) -> None:
    entry = BackendEntry(name="own", url=node.url, kind=BackendKind.KVOTA)
    tiny = ModelEntry(name="tiny", backends=("own",))
    world = await closing.enter_async_context(gateway_world(entry, models=[tiny]))
    client = Client(world)
    with node.stage.held() as gate:
        client.ask("first", model="tiny", max_tokens=3)
        await asyncio.to_thread(gate.wait_for_step)
        changed = msgspec.structs.replace(entry, idle_timeout_s=61.0)
        for backends in ((changed,), (vllm_entry("gpu-1", backend),)):
            world.fleet = Fleet(backends=backends)
            await world.parts.reload()
            listed = (await world.get("/v1/requests")).json["data"]
            assert [one["client_id"] for one in listed] == ["first"]
        assert (await client.delete("first")).json["num_cancelled"] == 1
    await client.tasks["first"]


async def test_texts_to_embed_are_seen_and_ended_like_the_rest(
    world: GatewayWorld, backend: FakeBackend
) -> None:
    backend.overrides[EMBED] = never_answers
    client = Client(world)
    asking = world.post(EMBED, {"model": "chat", "input": "a secret"}, x_request_id="vectors")
    client.tasks["vectors"] = asyncio.create_task(asking)
    seen = await client.until("vectors", "prefill")
    assert (seen["backend"], seen["model"]) == ("gpu-1", "chat")
    assert (await client.delete("vectors")).json["num_cancelled"] == 1
    assert (await client.tasks["vectors"]).status == 410
    await client.until_gone()


async def test_kvota_top_shows_them(world: GatewayWorld, backend: FakeBackend) -> None:
    client = Client(world)
    backend.scripts.extend([begins(4, Wire.stall), never_answers])
    client.ask("first", stream=True, max_tokens=50)
    await client.until("first", "decode")
    client.ask("second")
    await client.until("second", "queued")
    server = connect(f"http://127.0.0.1:{world.port}")
    scene = Watch().see(await server.read(), 0.0, unix_s=0.0)
    assert ([one.client_id for one in scene.served], len(scene.line)) == (["first"], 1)
    assert (scene.model, scene.num_running, scene.num_waiting) == ("chat", 1, 1)
    assert set(scene.kv_shares) == {"gpu-1"}
    cells = [cell.strip() for cell in words.row(scene.line[0])]
    assert cells[:4] == ["second", "short", "inter", "queued"]
    assert cells[-1] == "all 1 places are taken"
    assert await server.cancel("second") == 1
    assert await server.cancel(scene.served[0].id) == 1
    await asyncio.gather(*client.tasks.values())
    await server.close()
