"""The desk of a node, read and changed through the gateway in front of it."""

import asyncio
from collections.abc import Iterator

import pytest

from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream.kinds import BackendKind
from kvota.tools.load.desk_settings import put_desk
from kvota.tools.server import ServerUnusable
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_world import gateway_world, model_of, vllm_entry
from tests.support.live_node import MODEL, LiveNode

PATH = "/admin/desk"


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[LiveNode, LiveNode]]:
    first = LiveNode(max_running_requests=6)
    second = LiveNode(max_running_requests=9)
    yield first, second
    first.stop()
    second.stop()


def entry(name: str, node: LiveNode) -> BackendEntry:
    return BackendEntry(name=name, url=node.url, kind=BackendKind.KVOTA)


async def test_the_one_node_behind_a_gateway_needs_no_name(
    nodes: tuple[LiveNode, LiveNode],
) -> None:
    models = [model_of(MODEL, "a")]
    async with gateway_world(entry("a", nodes[0]), models=models) as world:
        seen = await world.get(PATH)
        assert (seen.status, seen.json["max_running_requests"]) == (200, 6)
        changed = await world.http.put(PATH, json={"max_running_requests": 4})
        assert (changed.status_code, changed.json()["max_running_requests"]) == (200, 4)
        assert nodes[0].get(PATH).json["max_running_requests"] == 4
        refused = await world.http.put(PATH, json={"max_running_requests": 7})
        assert refused.status_code == 400
        assert "started for at most 6" in refused.json()["error"]["message"]


async def test_of_several_nodes_one_is_named(nodes: tuple[LiveNode, LiveNode]) -> None:
    models = [model_of(MODEL, "a", "b")]
    entries = (entry("a", nodes[0]), entry("b", nodes[1]))
    async with gateway_world(*entries, models=models) as world:
        which = await world.get(PATH)
        assert (which.status, which.error["param"]) == (400, "backend")
        assert "a, b" in which.error["message"]
        seen = await world.get(f"{PATH}?backend=b")
        assert (seen.status, seen.json["max_running_requests"]) == (200, 9)
        assert (await world.get(f"{PATH}?backend=c")).status == 404


async def test_only_operators_may(nodes: tuple[LiveNode, LiveNode]) -> None:
    async with gateway_world(entry("a", nodes[0]), models=[model_of(MODEL, "a")]) as world:
        plain, admin = await world.key(), await world.key(is_admin=True)
        for method in ("GET", "PUT"):
            headers = {"authorization": f"Bearer {plain}"}
            denied = await world.http.request(method, PATH, json={}, headers=headers)
            assert denied.status_code == 403, method
        assert (await world.get(PATH, admin)).status == 200


async def test_a_foreign_backend_has_no_desk_to_set_and_the_bench_says_what_to_do() -> None:
    async with FakeBackend() as backend:
        models = [model_of("chat", "a")]
        async with gateway_world(vllm_entry("a", backend), models=models) as world:
            url = str(world.http.base_url)
            settings = {"max_running_requests": 3, "max_waiting_queue": 1}
            with pytest.raises(ServerUnusable, match="start vLLM with --max-num-seqs"):
                await asyncio.to_thread(put_desk, url, None, settings)
