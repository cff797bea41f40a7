"""Nodes of ours behind a gateway: whose answers are passed on as they are."""

import json
from contextlib import AsyncExitStack

import pytest

from kvota.core.clock import ManualClock
from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream.kinds import BackendKind
from tests.support.fake_backend import FakeBackend, Received, Wire, events, says, whole_answer
from tests.support.gateway_world import GatewayWorld, gateway_world, model_of
from tests.support.http_client import CHAT

TEXT = "w0 w1 w2 w3 w4 w5 w6 w7"
HEARTBEAT = b": heartbeat\n\n"
FAILURES = 'kvota_gateway_attempts_total{backend="a",ending="error"'


def kvota_entry(name: str, backend: FakeBackend) -> BackendEntry:
    return BackendEntry(name=name, url=backend.url, kind=BackendKind.KVOTA)


def error_event(code: str, kind: str = "server_error") -> bytes:
    said = {"message": f"{code} it is.", "type": kind, "param": None, "code": code}
    return b"data: " + json.dumps({"error": said}, separators=(",", ":")).encode() + b"\n\n"


@pytest.fixture
async def chained(closing: AsyncExitStack, a: FakeBackend, b: FakeBackend) -> GatewayWorld:
    """`chat` on the node a, and `small` on the node b where that fails."""
    models = [model_of("chat", "a", fallback="small"), model_of("small", "b")]
    entries = kvota_entry("a", a), kvota_entry("b", b)
    made = gateway_world(*entries, models=models, clock=ManualClock(1000.0))
    return await closing.enter_async_context(made)


@pytest.mark.parametrize("opening", [b"", HEARTBEAT])
async def test_a_node_that_fails_in_its_stream_before_content_is_followed(
    chained: GatewayWorld, a: FakeBackend, opening: bytes
) -> None:
    a.script = says(opening + error_event("internal_error"))
    reply = await chained.chat(stream=True)
    assert reply.text() == TEXT
    assert "internal_error" not in reply.content.decode()
    assert await chained.metrics(FAILURES) == 1


async def test_a_node_that_keeps_failing_in_its_streams_is_left_alone(
    chained: GatewayWorld, a: FakeBackend
) -> None:
    """Whether or not content came before."""
    content = [*events(num_tokens=3)][:3]
    for before in 10 * [[], content]:
        a.script = says(*before, error_event("internal_error"))
        await chained.chat(stream=True)
    assert len(a.generations) < 20


async def test_a_failure_after_content_is_told_in_the_nodes_own_words(
    chained: GatewayWorld, a: FakeBackend
) -> None:
    content = [*events(num_tokens=3)][:3]
    a.script = says(*content, error_event("internal_error"))
    reply = await chained.chat(stream=True)
    assert reply.content == b"".join([*content, error_event("internal_error")])
    assert await chained.metrics(FAILURES) == 1
    assert '"code": "internal_error"' in chained.log


@pytest.mark.parametrize(
    ("code", "status"),
    [("request_cancelled", 410), ("request_timeout", 504)],
)
async def test_what_its_request_has_ended_by_is_no_failure_of_the_node(
    chained: GatewayWorld, a: FakeBackend, b: FakeBackend, code: str, status: int
) -> None:
    a.script = says(error_event(code))
    for _ in range(10):
        reply = await chained.chat(stream=True)
        assert (reply.status, reply.error["code"]) == (status, code)
    assert (len(a.generations), len(b.generations)) == (10, 0)


async def test_a_node_that_refuses_in_its_stream_is_left_alone_by_no_other(
    chained: GatewayWorld, a: FakeBackend
) -> None:
    a.scripts.append(says(error_event("queue_timeout")))
    assert (await chained.chat(stream=True)).headers["x-kvota-backend"] == "b"
    again = await chained.chat(stream=True)
    assert (again.text(), again.headers["x-kvota-backend"]) == (TEXT, "a")


async def test_of_two_nodes_that_refuse_in_their_streams_the_last_is_heard(
    chained: GatewayWorld, a: FakeBackend, b: FakeBackend
) -> None:
    a.script = b.script = says(error_event("queue_timeout"))
    reply = await chained.chat(stream=True)
    assert (reply.status, reply.error["code"]) == (503, "queue_timeout")
    assert int(reply.headers["retry-after"]) >= 1


async def test_what_is_wrong_with_the_request_is_heard_from_the_first(
    chained: GatewayWorld, a: FakeBackend, b: FakeBackend
) -> None:
    a.script = says(error_event("invalid_request", "invalid_request_error"))
    reply = await chained.chat(stream=True)
    assert (reply.status, reply.error["code"], b.generations) == (400, "invalid_request", [])


@pytest.mark.parametrize("is_first_away", [True, False])
async def test_a_request_is_ended_though_another_node_is_away(
    chained: GatewayWorld, a: FakeBackend, b: FakeBackend, is_first_away: bool
) -> None:
    away, own = (a, b) if is_first_away else (b, a)

    async def ended(asked: Received, wire: Wire) -> None:
        assert asked.method == "DELETE"
        await wire.json({"id": "mine", "object": "request.deleted", "num_cancelled": 1})

    own.overrides["/v1/requests/mine"] = ended
    await away.stop()
    reply = await chained.http.delete("/v1/requests/mine")
    assert (reply.status_code, reply.json()["num_cancelled"]) == (200, 1)
    unknown = await chained.http.delete("/v1/requests/another")
    assert unknown.status_code == 502, "the node that is away may have it"
    await away.listen(away.port)
    assert (await chained.http.delete("/v1/requests/another")).status_code == 404


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_without_words_is_passed_on_as_it_is(
    chained: GatewayWorld, b: FakeBackend, status: int
) -> None:
    async def says_nothing(asked: Received, wire: Wire) -> None:
        await wire.head(status, content_type="text/plain", length=0)

    b.script = says_nothing
    reply = await chained.chat(model="small")
    assert (reply.status, reply.content) == (status, b"")
    assert reply.headers["content-length"] == "0"
    assert (await chained.chat()).status == 200


@pytest.mark.parametrize("kind", [BackendKind.KVOTA, BackendKind.VLLM])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/tokenizer_info"])
async def test_headers_that_are_no_utf_8_are_as_good_as_any(
    closing: AsyncExitStack, a: FakeBackend, kind: BackendKind, path: str
) -> None:
    odd = b"application/json; x=caf\xe9\xff"

    async def answers(asked: Received, wire: Wire) -> None:
        body = json.dumps(whole_answer(CHAT, 2) | {"data": [{"index": 0, "embedding": [1.0]}]})
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-type: " + odd)
        await wire.raw(b"\r\nx-kvota-usage: \xff\r\ncontent-length: %d\r\n\r\n" % len(body))
        await wire.raw(body.encode())

    a.script = answers
    a.overrides = {"/v1/embeddings": answers, "/tokenizer_info": answers}
    entry = BackendEntry(name="a", url=a.url, kind=kind)
    made = gateway_world(entry, models=[model_of("chat", "a")], clock=ManualClock(1000.0))
    world = await closing.enter_async_context(made)
    if path == "/tokenizer_info":
        reply = await world.get(path)
        assert reply.status == (200 if kind is BackendKind.KVOTA else 404)
        return
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    assert (await world.post(path, body)).status == 200


@pytest.mark.parametrize("kind", [BackendKind.KVOTA, BackendKind.VLLM])
async def test_a_content_type_that_nobody_knows_is_no_mistake_of_ours(
    closing: AsyncExitStack, a: FakeBackend, kind: BackendKind
) -> None:
    async def answers(asked: Received, wire: Wire) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/\xff\r\ncontent-length: 2\r\n\r\n{}")

    a.script = answers
    entry = BackendEntry(name="a", url=a.url, kind=kind)
    made = gateway_world(entry, models=[model_of("chat", "a")], clock=ManualClock(1000.0))
    world = await closing.enter_async_context(made)
    reply = await world.chat()
    assert reply.status == (200 if kind is BackendKind.KVOTA else 502)
