"""Where is my request, and away with it."""

from collections.abc import Callable
from typing import Any

import pytest

from kvota.core.errors import Outcome
from kvota.node.ports import Waiting
from tests.support.asgi_caller import Call
from tests.support.http import MODEL, Node, ScriptedStream, delta, make_node, read

CHAT = "/v1/chat/completions"
SOON_S = 0.02
FIELDS = {
    "id", "object", "client_id", "model", "lane", "band", "phase", "age_s", "position", "eta_s",
    "eta_basis", "why", "prompt_tokens", "computed_tokens", "cached_tokens", "output_tokens",
    "max_tokens", "num_choices", "tokens_per_s", "kv_blocks", "num_preemptions",
}  # fmt: skip


async def begin(
    node: Node, name: str, *, text: str | list[str] = "hi", path: str = CHAT, **fields: Any
) -> tuple[Call, ScriptedStream]:
    """A request that the engine has accepted and not answered."""
    before = len(node.runner.streams)
    prompt = {"prompt": text} if path != CHAT else {"messages": [{"role": "user", "content": text}]}
    body = {"model": MODEL, **prompt, **fields}
    call = node.caller.begin("POST", path, body, {"x-request-id": name})
    streams = await node.runner.submitted(before + 1)
    return call, streams[before]


async def test_nothing_is_listed_while_nothing_is_asked() -> None:
    for path in ("/v1/requests", "/admin/requests"):
        reply = await make_node().get(path)
        assert (reply.status, reply.json) == (200, {"object": "list", "data": []})


async def test_a_client_sees_where_its_requests_are() -> None:
    node = make_node()
    _, served = await begin(node, "mine", n=2, max_tokens=7)
    _, waiting = await begin(node, "next")
    waiting.place = Waiting(1, 3.14159, "4 blocks of KV", latest_by="max_tokens")
    first, second = (await node.get("/v1/requests")).json["data"]
    assert set(first) == FIELDS
    assert first["object"] == "request"
    assert (first["id"], first["client_id"]) == (served.request.id, "mine")
    assert (first["phase"], first["num_choices"], first["max_tokens"]) == ("prefill", 2, 7)
    assert (first["tokens_per_s"], first["age_s"], first["kv_blocks"]) == (12.3, 1.235, 3)
    assert first["position"] is first["eta_s"] is first["eta_basis"] is first["why"] is None
    assert (second["phase"], second["position"]) == ("queued", 1)
    assert (second["eta_s"], second["why"]) == (3.1, "4 blocks of KV")
    assert second["eta_basis"] == "max_tokens"


async def test_only_operators_are_shown_tenants() -> None:
    node = make_node()
    await begin(node, "mine")
    [shown] = (await node.get("/admin/requests")).json["data"]
    assert set(shown) == FIELDS | {"tenant"}
    assert shown["tenant"] == "team-a"


async def test_what_a_request_says_is_shown_to_nobody() -> None:
    node = make_node()
    _, stream = await begin(node, "mine", text="a secret question", stream=True)
    stream.push(read(stream.request), delta(stream.request, "a secret answer"))
    for path in ("/v1/requests", "/admin/requests"):
        assert b"secret" not in (await node.get(path)).content


# --- DELETE


def our_id(stream: ScriptedStream) -> str:
    return stream.request.id


def id_in_chunks(stream: ScriptedStream) -> str:
    return "chatcmpl-" + stream.request.id.removesuffix("-0")


@pytest.mark.parametrize("root", ["/v1", "/admin"])
@pytest.mark.parametrize("name_of", [our_id, id_in_chunks, lambda _: "org/run:7"])
async def test_a_request_is_cancelled_by_any_of_its_names(
    root: str, name_of: Callable[[ScriptedStream], str]
) -> None:
    node = make_node()
    call, stream = await begin(node, "org/run:7")
    _, other = await begin(node, "other")
    name = name_of(stream)
    reply = await node.caller.request("DELETE", f"{root}/requests/{name}")
    assert reply.status == 200
    assert reply.json == {
        "id": name, "object": "request.deleted", "deleted": True, "num_cancelled": 1,
    }  # fmt: skip
    assert stream.is_cancelled
    assert not other.is_cancelled
    assert (await call.end()).is_complete


async def test_all_live_requests_that_share_a_name_are_cancelled_and_counted() -> None:
    node = make_node()
    calls = [(await begin(node, "same"))[0] for _ in range(3)]
    assert (await node.caller.request("DELETE", "/v1/requests/same")).json["num_cancelled"] == 3
    assert {(await call.end()).status for call in calls} == {410}


async def test_a_request_of_several_prompts_is_cancelled_as_a_whole() -> None:
    node = make_node()
    call, first = await begin(node, "mine", path="/v1/completions", text=["a", "b"])
    await node.caller.request("DELETE", f"/v1/requests/{first.request.id}")
    assert (await call.end()).status == 410
    assert all(stream.is_cancelled for stream in node.runner.streams)


async def test_what_is_not_there_any_more_is_a_404() -> None:
    node = make_node()
    call, _ = await begin(node, "mine")
    delete = "DELETE", "/v1/requests/mine"
    assert (await node.caller.request(*delete)).status == 200
    await call.end()
    reply = await node.caller.request(*delete)
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert "`mine`" in reply.error["message"]
    assert reply.headers["x-should-retry"] == "false"


async def test_requests_are_only_listed_and_deleted() -> None:
    node = make_node()
    for method, path in (("POST", "/v1/requests"), ("GET", "/v1/requests/mine")):
        assert (await node.caller.request(method, path)).status == 405


# --- what the cancelled client is told


@pytest.mark.parametrize("stream", [True, False])
async def test_the_cancelled_client_is_told_and_told_not_to_retry(stream: bool) -> None:
    node = make_node()
    call, _ = await begin(node, "mine", stream=stream)
    await node.caller.request("DELETE", "/v1/requests/mine")
    reply = await call.end()
    assert (reply.status, reply.error["code"]) == (410, "request_cancelled")
    assert reply.error["message"] == "The request was cancelled by DELETE."
    assert reply.error["type"] == "cancelled_error"
    assert reply.headers["x-should-retry"] == "false"
    [record] = node.records
    assert (record.outcome, record.status) == (Outcome.CLIENT_CLOSED, 410)
    assert record.code == "request_cancelled"


async def test_a_stream_that_has_begun_ends_with_an_error_event() -> None:
    node = make_node()
    call, stream = await begin(node, "mine", stream=True)
    stream.push(read(stream.request), delta(stream.request, "a"))
    await call.until(lambda reply: b'"a"' in reply.content)
    await node.caller.request("DELETE", "/v1/requests/mine")
    reply = await call.end()
    assert reply.is_complete
    assert reply.chunks[-1]["error"]["code"] == "request_cancelled"
    assert "[DONE]" not in reply.events


async def test_a_stream_that_waits_in_line_ends_with_an_error_event() -> None:
    node = make_node(heartbeat_s=SOON_S)
    call, stream = await begin(node, "mine", stream=True)
    stream.place = Waiting(position=2, eta_s=None, why="its turn")
    await call.until(lambda reply: "queued position=2" in reply.remarks)
    await node.caller.request("DELETE", "/v1/requests/mine")
    assert [chunk["error"]["code"] for chunk in (await call.end()).chunks] == ["request_cancelled"]


async def test_a_client_that_left_by_itself_is_not_counted_as_cancelled() -> None:
    node = make_node()
    call, _ = await begin(node, "mine")
    call.leave()
    await call.end()
    [record] = node.records
    assert (record.status, record.code) == (499, "client_closed")
