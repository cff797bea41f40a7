"""Keys, limits, filters and the abuse watch, as clients and operators meet them."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvota.core.request import Band
from kvota.gateway.caller import KeyLimits
from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream.kinds import BackendKind
from kvota.telemetry.journal import read_journal
from tests.support.fake_backend import (
    DONE,
    FakeBackend,
    Received,
    Wire,
    begins,
    chunk,
    event,
    events,
    fails,
    says,
    streams,
)
from tests.support.gateway_world import (
    PATIENCE_S,
    GatewayWorld,
    gateway_world,
    model_of,
    vllm_entry,
)
from tests.support.http_client import CHAT, Reply


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend() as fake:
        yield fake


@pytest.fixture
async def world(backend: FakeBackend) -> AsyncIterator[GatewayWorld]:
    entry = vllm_entry("a", backend)
    models = [model_of("chat", "a", aliases=("gpt-4o-mini",)), model_of("secret", "a")]
    async with gateway_world(entry, models=models) as made:
        yield made


async def test_without_any_key_the_door_is_open(world: GatewayWorld) -> None:
    assert (await world.chat()).status == 200
    assert (await world.get("/admin/usage")).status == 200


async def test_with_keys_whoever_has_none_is_told_so(world: GatewayWorld) -> None:
    """E05"""
    key = await world.key()
    for path in ("/v1/models", "/v1/requests", "/admin/usage", "/tokenizer_info"):
        reply = await world.get(path)
        assert (reply.status, reply.error["code"]) == (401, "missing_api_key"), path
        assert reply.headers["www-authenticate"] == "Bearer"
    reply = await world.chat()
    assert (reply.status, reply.error["code"]) == (401, "missing_api_key")
    assert reply.headers["x-should-retry"] == "false"
    assert (await world.chat(key="kv-000000000000-" + 64 * "0")).error["code"] == "invalid_api_key"
    expired = await world.key(expires_unix=1.0)
    assert (await world.chat(key=expired)).error["code"] == "expired_api_key"
    assert (await world.chat(key=key)).status == 200
    for path in ("/health", "/ready", "/metrics"):
        assert (await world.get(path)).status == 200, path


async def test_health_leaks_nothing(world: GatewayWorld) -> None:
    """E05"""
    assert (await world.get("/health")).content == b'{"status":"ok"}'


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not met():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def line_of(world: GatewayWorld, reply: Reply) -> dict[str, Any]:
    """The log's line of an answered request. It is written after the answer."""
    wanted = reply.headers["x-kvota-request-id"]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for line in map(json.loads, world.log.splitlines()):
                if line.get("request_id") == wanted:
                    found: dict[str, Any] = line
                    return found
            await asyncio.sleep(0.01)


async def test_a_key_sees_and_calls_only_its_models(world: GatewayWorld) -> None:
    key = await world.key(models=frozenset({"chat"}))
    names = {one["id"] for one in (await world.get("/v1/models", key)).json["data"]}
    assert names == {"chat", "gpt-4o-mini"}
    assert (await world.chat(model="gpt-4o-mini", key=key)).status == 200
    denied = await world.chat(model="secret", key=key)
    assert (denied.status, denied.error["code"]) == (403, "model_not_allowed")
    assert (await line_of(world, denied))["model"] == "secret"
    unknown = await world.chat(model="nothing", key=key)
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    assert (await line_of(world, unknown))["model"] == "unknown"


async def test_usage_that_cannot_be_read_is_the_databases_fault_and_no_bug(
    world: GatewayWorld,
) -> None:
    path = Path(world.settings.state_dir or "") / "kvota.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE usage")
        database.commit()
    reply = await world.get("/admin/usage")
    assert (reply.status, reply.error["code"]) == (502, "backend_error")
    assert "no such table" in reply.error["message"]
    assert reply.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("path", ["/v1/models", "/admin/usage", "/v1/requests"])
async def test_a_look_that_is_denied_has_an_id_in_answer_and_log(
    world: GatewayWorld, path: str
) -> None:
    await world.key()
    denied = await world.get(path)
    assert denied.status == 401
    assert (await line_of(world, denied))["path"] == path


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/v1/models", "/nowhere", "/v1/embeddings"]
)
async def test_every_page_has_an_id(world: GatewayWorld, path: str) -> None:
    replies = [await world.get(path) for _ in range(2)]
    assert len({one.headers["x-kvota-request-id"] for one in replies}) == 2
    given = await world.http.get(path, headers={"x-request-id": "mine"})
    for name in ("x-kvota-request-id", "x-request-id"):
        assert given.headers.get_list(name) == ["mine"]


async def test_a_key_may_be_made_for_an_alias(backend: FakeBackend) -> None:
    models = [model_of("chat", "a", aliases=("gpt-4o-mini",)), model_of("other", "a")]
    async with gateway_world(vllm_entry("a", backend), models=models) as world:
        key = await world.key(
            models=frozenset({"gpt-4o-mini"}),
            model_limits={"gpt-4o-mini": KeyLimits(requests_per_minute=2)},
        )
        seen = [card["id"] for card in (await world.get("/v1/models", key)).json["data"]]
        assert seen == ["chat", "gpt-4o-mini"]
        assert (await world.get("/v1/models/chat", key)).status == 200
        for name, status in (("gpt-4o-mini", 200), ("chat", 200), ("other", 403), ("chat", 429)):
            reply = await world.chat(key=key, model=name)
            assert reply.status == status, name


async def test_models_can_be_hidden_instead(backend: FakeBackend) -> None:
    models = [model_of("chat", "a"), model_of("secret", "a")]
    async with gateway_world(vllm_entry("a", backend), models=models, hide_models=True) as world:
        key = await world.key(models=frozenset({"chat"}))
        hidden, unknown = [await world.chat(model=m, key=key) for m in ("secret", "nothing")]
        assert hidden.status == unknown.status == 404
        assert hidden.error["message"].replace("secret", "nothing") == unknown.error["message"]


async def test_operators_pages_need_an_operators_key(world: GatewayWorld) -> None:
    plain, admin = await world.key(), await world.key(is_admin=True)
    for path in ("/admin/usage", "/admin/requests", "/admin/backends", "/admin/rollouts"):
        denied = await world.get(path, plain)
        assert (denied.status, denied.error["code"]) == (403, "not_allowed"), path
        assert (await world.get(path, admin)).status == 200, path
    assert (await world.post("/admin/reload", {}, plain)).status == 403
    assert (await world.post("/admin/reload", {}, admin)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_reserved_and_corrected_for_bodies_and_streams(
    world: GatewayWorld, stream: bool
) -> None:
    """F03: prompt and output count, 5 + 8 each, whether or not the client asked for usage"""
    key = await world.key(limits=KeyLimits(tokens_per_minute=200))
    left = []
    for _ in range(3):
        reply = await world.chat(key=key, stream=stream, max_tokens=8)
        assert reply.status == 200
        left.append(int(reply.headers["x-ratelimit-remaining-tokens"]))
    assert left[0] - left[1] == left[1] - left[2] == 13
    full = await world.chat(key=key, max_tokens=160)
    assert (full.status, full.error["code"]) == (429, "rate_limit_tokens")
    assert int(full.headers["retry-after"]) >= 1
    assert full.headers["x-should-retry"] == "true"


async def test_what_a_node_has_read_counts_though_its_answer_broke(backend: FakeBackend) -> None:
    """Only a whole answer says how long its prompt was; a key cannot read for nothing."""
    entry = BackendEntry(name="a", url=backend.url, kind=BackendKind.KVOTA)
    async with gateway_world(entry, models=[model_of("chat", "a")]) as world:
        key = await world.key(limits=KeyLimits(tokens_per_minute=5_000))
        backend.script = begins(3, lambda wire: wire.drop())
        broken = await world.chat("words " * 400, key=key, stream=True, max_tokens=8)
        assert "error" in broken.events[-1]
        backend.script = None
        after = await world.chat("hi", key=key, max_tokens=8)
        assert int(after.headers["x-ratelimit-remaining-tokens"]) < 5_000 - 400
        line = next(line for line in world.log.splitlines() if '"backend_error"' in line)
        assert json.loads(line)["prompt_tokens"] > 400


async def test_requests_and_places_are_limited(world: GatewayWorld, backend: FakeBackend) -> None:
    """F04: of those that come at the same instant exactly one is let in"""
    key = await world.key(limits=KeyLimits(concurrent_requests=1))
    may_answer = asyncio.Event()

    async def waits(asked: Received, wire: Wire) -> None:
        await may_answer.wait()
        await streams()(asked, wire)

    backend.scripts.append(waits)
    asking = [asyncio.create_task(world.chat(key=key)) for _ in range(10)]
    await until(lambda: sum(one.done() for one in asking) >= 9)
    may_answer.set()
    replies = await asyncio.gather(*asking)
    statuses = sorted(reply.status for reply in replies)
    assert statuses == [200] + 9 * [429]
    assert {r.error["code"] for r in replies if r.status == 429} == {"rate_limit_concurrency"}
    assert (await world.chat(key=key)).status == 200, "the place is free again"


async def test_what_the_service_refused_costs_the_key_nothing(
    world: GatewayWorld, backend: FakeBackend
) -> None:
    """F04: the reservation returns"""
    key = await world.key(limits=KeyLimits(requests_per_minute=1))
    backend.script = fails(500)
    assert (await world.chat(key=key)).status == 502
    backend.script = None
    assert (await world.chat(key=key)).status == 200
    assert (await world.chat(key=key)).error["code"] == "rate_limit_requests"


async def test_who_keeps_failing_is_shut_out(backend: FakeBackend) -> None:
    entry = vllm_entry("a", backend)
    async with gateway_world(entry, models=[model_of("chat", "a")], abuse_failures_max=5) as world:
        key, other = await world.key(), await world.key()
        for _ in range(6):
            await world.chat(model="nothing", key=key)
        blocked = await world.chat(key=key)
        assert (blocked.status, blocked.error["code"]) == (429, "abuse_blocked")
        assert 1 <= int(blocked.headers["retry-after"]) <= 60
        assert (await world.chat(key=other)).status == 200
        assert await world.metrics("kvota_gateway_abuse_blocks_total") == 1
        assert "abuse blocked" in world.log


async def test_blocked_words_are_kept_out_and_in(backend: FakeBackend, tmp_path: Path) -> None:
    lists = tmp_path / "words.toml"
    lists.write_text('[[rule]]\nname = "falcon"\nliterals = ["Project Falcon", "w3 w4"]\n')
    entry = vllm_entry("a", backend)
    async with gateway_world(
        entry, models=[model_of("chat", "a")], block_lists=(str(lists),)
    ) as world:
        denied = await world.chat("tell me of project falcon")
        assert (denied.status, denied.error["code"]) == (400, "content_filtered")
        assert not backend.generations
        whole = await world.chat()
        assert (whole.status, whole.error["code"]) == (400, "content_filtered")
        said = await streamed_in_two_parts(world, backend)
        assert any("w0" in line for line in said)
        assert not any("[DONE]" in line or "w3" in line for line in said)
        assert '"content_filtered"' in said[-1]
        # Of the request, the body and the stream; a line is written after its answer.
        await until(lambda: world.log.count('"why": "falcon"') == 3)


@pytest.mark.parametrize("stream", [True, False])
async def test_blocked_words_are_kept_in_where_a_tool_is_called(
    backend: FakeBackend, tmp_path: Path, stream: bool
) -> None:
    lists = tmp_path / "words.toml"
    lists.write_text('[[rule]]\nname = "falcon"\nliterals = ["Project Falcon"]\n')
    deltas = [{"index": 0, "function": {"arguments": text}} for text in ('{"a": "Proj', "ect Fal")]
    deltas.append({"index": 0, "function": {"arguments": 'con"}'}})
    parts = [{"index": 0, "delta": {"tool_calls": [one]}} for one in deltas]
    ending = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    backend.script = says(*(event(chunk(CHAT, [one])) for one in (*parts, ending)), DONE)
    entry, models = vllm_entry("a", backend), [model_of("chat", "a")]
    async with gateway_world(entry, models=models, block_lists=(str(lists),)) as world:
        reply = await world.chat(stream=stream)
        assert b"content_filtered" in reply.content
        assert b"Proj" not in reply.content


async def streamed_in_two_parts(world: GatewayWorld, backend: FakeBackend) -> list[str]:
    """The lines of a stream whose words from w2 on come when it has begun at the client."""
    has_begun = asyncio.Event()

    async def speaks(asked: Received, wire: Wire) -> None:
        role, *words, end = events(asked.path)
        await wire.head()
        await wire.send(role + words[0] + words[1])
        await has_begun.wait()
        await wire.send(b"".join(words[2:]) + end)
        await wire.end()

    backend.scripts.append(speaks)
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    said: list[str] = []
    async with world.http.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            said += [line] if line else []
            has_begun.set()
    return said


async def test_usage_is_kept_per_key_and_model(world: GatewayWorld) -> None:
    """F09: with the backend's own numbers"""
    admin = await world.key(is_admin=True)
    key = await world.key(tenant="team-a")
    await world.chat(key=key)
    await world.chat(key=key, stream=True)
    await world.chat(key=key, model="nothing")
    rows = (await world.get("/admin/usage?tenant=team-a", admin)).json["data"]
    by_model = {row["model"]: row for row in rows}
    chat = by_model["chat"]
    assert (chat["requests"], chat["prompt_tokens"], chat["output_tokens"]) == (2, 10, 16)
    assert by_model["unknown"]["requests"] == 1
    assert (await world.get("/admin/usage?since=yesterday", admin)).error["param"] == "since"


async def test_no_key_and_no_prompt_is_ever_logged_or_shown(world: GatewayWorld) -> None:
    """F07, G02"""
    key = await world.key()
    await world.chat("a most private thing", key=key)
    await world.chat("a most private thing", key=key, model="a most private thing")
    page = (await world.get("/metrics")).content.decode()
    secret = key.rpartition("-")[2]
    for text in (secret, "private"):
        assert text not in world.log
        assert text not in page
    lines = [line for line in world.log.splitlines() if '"event": "request"' in line]
    assert len(lines) == 2, "one line for each request"


async def test_names_that_clients_make_up_grow_no_series(world: GatewayWorld) -> None:
    """G02"""
    await world.chat(model="nothing")
    before = (await world.get("/metrics")).content.count(b"\n")
    for number in range(50):
        await world.post(
            CHAT,
            {"model": f"m{number}", "messages": [], "user": f"u{number}"},
            x_request_id=f"r{number}",
        )
    assert (await world.get("/metrics")).content.count(b"\n") - before <= 5


async def test_log_and_journal_say_in_which_lane_and_band_a_request_was(
    backend: FakeBackend, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.jsonl"
    entry = vllm_entry("a", backend)
    async with gateway_world(entry, models=[model_of("chat", "a")], journal=str(journal)) as world:
        held_to_batch = await world.key(band_max=Band.BATCH)
        key = await world.key()
        await world.chat(key=key)
        await world.chat(key=key, headers={"x_kvota_priority": "batch"})
        await world.chat(key=held_to_batch)
        await until(lambda: world.log.count('"event": "request"') == 3)
        logged = [json.loads(line) for line in world.log.splitlines() if '"request"' in line]
    bands = ["interactive", "batch", "batch"]
    assert [(one["lane"], one["band"]) for one in logged] == [("short", band) for band in bands]
    lines = read_journal(journal.read_text().splitlines())
    assert [line.band for line in lines] == bands


async def test_the_journal_has_lengths_and_no_words(backend: FakeBackend, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    entry = vllm_entry("a", backend)
    async with gateway_world(entry, models=[model_of("chat", "a")], journal=str(journal)) as world:
        shared = "a long and private beginning " * 50
        for question in ("one", "two"):
            assert (await world.chat(shared + question, max_tokens=8)).status == 200
        await world.chat(model="nothing")
    lines = list(read_journal(journal.read_text().splitlines()))
    assert [line.outcome for line in lines] == ["completed", "completed", "invalid"]
    assert [(line.prompt_tokens, line.output_tokens) for line in lines[:2]] == [(5, 8), (5, 8)]
    assert lines[0].prefix == lines[1].prefix != ()
    assert lines[0].first_token_s is not None
    assert "private" not in journal.read_text()
