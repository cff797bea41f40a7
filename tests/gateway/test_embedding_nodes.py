"""Nodes of ours behind a gateway, over real sockets: one that embeds, and one that does not."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvota.edge.listening import bind_unix, http_server, listen
from kvota.gateway.caller import KeyLimits
from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream.kinds import BackendKind
from tests.support.embedding_node import MODEL, POISON, EmbeddingNode, embedding_node
from tests.support.gateway_node import GatewayNode, gateway_node
from tests.support.gateway_world import GatewayWorld, gateway_world

EMBED = "/v1/embeddings"
PATIENCE_S = 60.0


@asynccontextmanager
async def node_and_gateway(
    folder: Path, *, line: dict[str, Any] | None = None, is_open: bool = True, **settings: Any
) -> AsyncIterator[tuple[EmbeddingNode, GatewayWorld]]:
    """`settings` are the node's. It listens on a unix socket, as one that `kvota serve` starts."""
    socket = folder / "node.sock"
    entry = BackendEntry(name="node", unix_socket=str(socket), kind=BackendKind.KVOTA)
    async with embedding_node(line=line, is_open=is_open, **settings) as node:
        with bind_unix(socket) as taken:
            listen(taken)
            server = http_server(running(node.app))
            serving = asyncio.create_task(server.serve(sockets=[taken]))
            try:
                async with gateway_world(entry) as world:
                    yield node, world
            finally:
                node.passes.gate.set()
                server.should_exit = True
                await serving


def running(app: ASGIApp) -> ASGIApp:
    """The application as one whose life has begun already."""

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for what in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{what}.complete"})

    return asgi


@pytest.mark.parametrize("trusts_gateway", [True, False])
async def test_a_nodes_vectors_pass_as_they_are_and_its_count_is_kept(
    tmp_path: Path, trusts_gateway: bool
) -> None:
    async with node_and_gateway(tmp_path, trusts_gateway=trusts_gateway) as (node, world):
        admin = await world.key(is_admin=True)
        key = await world.key(tenant="team-a", limits=KeyLimits(tokens_per_minute=100))
        body = {"model": MODEL, "input": ["a bb", "ccc dd e"]}
        reply = await world.post(EMBED, body, key, x_request_id="mine")
        assert reply.status == 200
        assert [row["embedding"] for row in reply.json["data"]] == [[1.0, 2.0], [3.0, 3.0]]
        assert reply.headers["x-kvota-request-id"] == "mine"
        assert (reply.headers["x-kvota-backend"], reply.headers["x-kvota-model"]) == ("node", MODEL)
        assert "x-kvota-usage" not in reply.headers
        packed = await world.post(EMBED, {**body, "encoding_format": "base64"}, key)
        left = [int(one.headers["x-ratelimit-remaining-tokens"]) for one in (reply, packed)]
        assert left[0] - left[1] == 5
        [row] = (await world.get("/admin/usage?tenant=team-a", admin)).json["data"]
        assert (row["requests"], row["prompt_tokens"]) == (2, 10)
        assert node.records[0].request_id == "mine"
        assert node.records[0].tenant == ("team-a" if trusts_gateway else "anonymous")


async def test_a_nodes_own_words_are_its_clients(tmp_path: Path) -> None:
    async with node_and_gateway(tmp_path) as (_, world):
        long = await world.post(EMBED, {"model": MODEL, "input": 17 * "a "})
        assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
        assert long.error["param"] == "input"
        poisoned = await world.post(EMBED, {"model": MODEL, "input": [POISON]})
        assert (poisoned.status, poisoned.error["code"]) == (502, "backend_error")
        prompt = await world.post("/tokenize", {"model": MODEL, "prompt": "a"})
        assert (prompt.status, prompt.error["code"]) == (404, "not_found")
        fine = await world.post(EMBED, {"model": MODEL, "input": "a"})
        assert fine.status == 200, "none of these was the node's fault for long"


async def test_a_full_node_refuses_and_who_leaves_makes_room(tmp_path: Path) -> None:
    sizes = {"max_batch_tokens": 16, "max_waiting_tokens": 16}
    async with node_and_gateway(tmp_path, line=sizes, is_open=False) as (node, world):

        async def post() -> Any:
            return await world.post(EMBED, {"model": MODEL, "input": 9 * "a "})

        first = asyncio.create_task(post())
        await node.begun()
        second = asyncio.create_task(post())
        await node.in_line(1)
        refused = await post()
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        second.cancel()
        await node.in_line(0)
        node.passes.gate.set()
        assert (await first).status == 200
        assert (await post()).status == 200


def logged_requests(node: GatewayNode, number: int) -> list[Any]:
    """The log's lines of requests, once there are so many: one is written after its answer."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        events = [json.loads(line) for line in node.gateway.log.splitlines()]
        lines = [one for one in events if one["event"] == "request"]
        if len(lines) >= number or time.monotonic() > end_s:
            return lines
        time.sleep(0.01)


def test_a_node_that_generates_says_that_it_does_not_embed() -> None:
    with gateway_node() as node:
        reply = node.post(EMBED, {"model": node.model, "input": "hi"})
        assert (reply.status, reply.error["code"]) == (404, "not_found")
        ids = node.post("/tokenize", {"prompt": "hi"}, x_request_id="mine")
        assert ids.status == 200
        assert (ids.headers["x-kvota-backend"], ids.headers["x-kvota-request-id"]) == (
            "node",
            "mine",
        )
        back = node.post("/detokenize", {"model": node.model, "tokens": ids.json["tokens"]})
        assert back.json["prompt"] == "hi"
        lines = logged_requests(node, 3)
        assert [(one["endpoint"], one["status"]) for one in lines] == [
            ("embeddings", 404),
            ("tokenize", 200),
            ("detokenize", 200),
        ]
