"""Embeddings and the tokenizer through a gateway: what holds for generation holds for them."""

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvota.gateway.caller import KeyLimits
from kvota.gateway.settings import BackendEntry, ModelEntry
from kvota.gateway.upstream.kinds import BackendKind
from kvota.telemetry.journal import read_journal
from tests.support.fake_backend import (
    MODEL,
    FakeBackend,
    Received,
    Script,
    Wire,
    fails,
    hangs_up,
    never_answers,
)
from tests.support.gateway_world import (
    PATIENCE_S,
    GatewayWorld,
    gateway_world,
    model_of,
    vllm_entry,
)
from tests.support.http_client import Reply

EMBED = "/v1/embeddings"
THREE = "three little words"  # 3 tokens, as the backend counts


@pytest.fixture
async def world(closing: AsyncExitStack, a: FakeBackend) -> GatewayWorld:
    models = [model_of("texts", "a"), model_of("secret", "a")]
    return await world_of(closing, vllm_entry("a", a), models=models)


@pytest.fixture
async def twins(closing: AsyncExitStack, a: FakeBackend, b: FakeBackend) -> GatewayWorld:
    """`texts` on two backends alike."""
    models = [model_of("texts", "a", "b")]
    return await world_of(closing, vllm_entry("a", a), vllm_entry("b", b), models=models)


async def world_of(
    closing: AsyncExitStack, *entries: BackendEntry, models: list[ModelEntry], **settings: Any
) -> GatewayWorld:
    return await closing.enter_async_context(gateway_world(*entries, models=models, **settings))


async def embed(
    world: GatewayWorld, given: Any = THREE, *, key: str | None = None, model: str = "texts",
    headers: dict[str, str] | None = None, **fields: Any,
) -> Reply:  # fmt: skip
    body = {"model": model, "input": given, **fields}
    return await world.post(EMBED, body, key, **(headers or {}))


def asked(backend: FakeBackend, path: str = EMBED) -> list[Received]:
    return [one for one in backend.received if one.path == path]


def remaining(reply: Reply, of: str = "tokens") -> int:
    return int(reply.headers[f"x-ratelimit-remaining-{of}"])


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not met():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def answers(content: Any) -> Script:
    async def script(asked: Received, wire: Wire) -> None:
        await wire.json(content)

    return script


# --- the way there and back


async def test_vectors_come_back_under_the_names_that_the_client_knows(
    world: GatewayWorld, a: FakeBackend
) -> None:
    reply = await embed(world, [THREE, "hi"], headers={"x_request_id": "mine"}, user="u")
    assert reply.status == 200
    assert [row["embedding"][0] for row in reply.json["data"]] == [18.0, 2.0]
    assert reply.json["model"] == "texts"
    assert reply.json["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert reply.headers["x-kvota-request-id"] == "mine"
    assert (reply.headers["x-kvota-backend"], reply.headers["x-kvota-model"]) == ("a", "texts")
    assert int(reply.headers["x-kvota-queue-ms"]) >= 0
    [seen] = asked(a)
    assert seen.json == {"model": MODEL, "input": [THREE, "hi"], "user": "u"}
    assert seen.headers["x-request-id"] == "mine"
    assert not {name for name in seen.headers if name.startswith("x-kvota")}


async def test_a_failing_backend_is_followed_by_another(
    twins: GatewayWorld, a: FakeBackend, b: FakeBackend
) -> None:
    """F02"""
    for script in (fails(500), hangs_up, fails(429, headers={"retry-after": "1"})):
        a.overrides[EMBED] = script
        reply = await embed(twins)
        assert (reply.status, reply.headers["x-kvota-backend"]) == (200, "b")
    assert await twins.metrics('kvota_gateway_attempts_total{backend="b",ending="ok"}') == 3


@pytest.mark.parametrize(
    "content",
    [
        {"data": "none"},
        [],
        {"object": "list", "data": [{"index": 0, "embedding": [1.0]}] * 2, "model": MODEL},
        {"object": "list", "data": [], "model": MODEL},
    ],
)
async def test_no_vector_goes_out_that_may_belong_to_another_text(
    twins: GatewayWorld, a: FakeBackend, b: FakeBackend, content: Any
) -> None:
    a.overrides[EMBED] = b.overrides[EMBED] = answers(content)
    reply = await embed(twins)
    assert (reply.status, reply.error["code"]) == (502, "backend_error")
    assert len(asked(a)) == len(asked(b)) == 1
    del b.overrides[EMBED]
    assert (await embed(twins)).headers["x-kvota-backend"] == "b"


async def test_a_backend_that_keeps_failing_is_left_out(
    world: GatewayWorld, a: FakeBackend
) -> None:
    a.overrides[EMBED] = fails(500)
    statuses = []
    async with asyncio.timeout(PATIENCE_S):
        while 503 not in statuses:
            statuses.append((await embed(world)).status)
    num_asked = len(asked(a))
    refused = await embed(world)
    assert (refused.status, refused.error["code"]) == (503, "engine_restarting")
    assert set(statuses[:-1]) == {502}
    assert len(asked(a)) == num_asked


async def test_another_model_answers_only_where_the_settings_and_the_key_let_it(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    models = [model_of("texts", "a", fallback="copy"), model_of("copy", "b")]
    world = await world_of(closing, vllm_entry("a", a), vllm_entry("b", b), models=models)
    key, strict = await world.key(), await world.key(may_fall_back=False)
    a.overrides[EMBED] = fails(500)
    reply = await embed(world, key=key)
    assert (reply.status, reply.headers["x-kvota-backend"]) == (200, "b")
    assert reply.headers["x-kvota-fallback"].startswith("texts -> copy: ")
    assert reply.json["model"] == "copy"
    assert (await embed(world, key=strict)).status == 502
    a.overrides["/tokenize"] = fails(500)
    assert (await world.post("/tokenize", {"model": "texts", "prompt": "a"}, key)).status == 502


async def test_a_model_that_does_not_embed_goes_on_to_chat(
    twins: GatewayWorld, a: FakeBackend, b: FakeBackend
) -> None:
    """a wrong path is no reason to leave a backend alone"""
    a.overrides[EMBED] = b.overrides[EMBED] = fails(404, {"detail": "Not Found"})
    for _ in range(3):
        reply = await embed(twins)
        assert (reply.status, reply.error["code"]) == (404, "not_found")
        assert reply.headers["x-should-retry"] == "false"
    assert len(asked(a)) + len(asked(b)) == 3, "nobody else is asked"
    assert (await twins.chat(model="texts")).status == 200


async def test_a_backends_own_no_is_passed_on(world: GatewayWorld, a: FakeBackend) -> None:
    a.overrides[EMBED] = fails(400)
    reply = await embed(world)
    assert (reply.status, reply.error["message"]) == (400, "told to say 400")


async def test_who_leaves_is_no_longer_worked_for(world: GatewayWorld, a: FakeBackend) -> None:
    key = await world.key(limits=KeyLimits(tokens_per_minute=100, concurrent_requests=1))
    before = remaining(await embed(world, key=key))
    a.overrides[EMBED] = never_answers
    leaving = asyncio.create_task(embed(world, key=key))
    await until(lambda: len(asked(a)) == 2)
    leaving.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await asked(a)[1].is_gone.wait()
    await until(lambda: world.parts.live.num_open == 0)
    assert '"outcome": "client_closed"' in world.log
    del a.overrides[EMBED]
    after = await embed(world, key=key)
    assert after.status == 200, "its place is free again"
    assert remaining(after) < before - 3, "what a backend had begun is not given back"


async def test_an_answer_that_comes_too_late_is_a_timeout(
    world: GatewayWorld, a: FakeBackend
) -> None:
    a.overrides[EMBED] = never_answers
    reply = await embed(world, headers={"x_kvota_deadline_s": "0.2"})
    assert (reply.status, reply.error["code"]) == (504, "request_timeout")


async def test_a_foreign_backend_gets_no_more_at_once_than_it_was_given_places(
    closing: AsyncExitStack, a: FakeBackend
) -> None:
    entry = vllm_entry("a", a, max_running_requests=1, max_waiting_queue=1)
    world = await world_of(closing, entry, models=[model_of("texts", "a")])
    let_go = asyncio.Event()

    async def holds(asked: Received, wire: Wire) -> None:
        await let_go.wait()
        row = {"object": "embedding", "index": 0, "embedding": [1.0]}
        await wire.json({"object": "list", "data": [row], "model": MODEL})

    a.overrides[EMBED] = holds
    desk = world.parts.registry["a"].embedding_desk
    assert desk is not None
    taken = asyncio.create_task(embed(world))
    await until(lambda: len(asked(a)) == 1)
    waits = asyncio.create_task(embed(world))
    await until(lambda: desk.snapshot().num_waiting_choices == 1)
    refused = await embed(world)
    assert (refused.status, refused.error["code"]) == (503, "queue_full")
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    assert refused.headers["x-should-retry"] == "true"
    assert (await world.chat(model="texts")).status == 200, "chats have a line of their own"
    assert len(asked(a)) == 1
    let_go.set()
    assert [(await one).status for one in (taken, waits)] == [200, 200]
    desk.check()


async def test_the_largest_request_finds_room_between_others(
    world: GatewayWorld, a: FakeBackend
) -> None:
    words = ["word " * 1000] * 400  # far more tokens than may be under way
    assert (await embed(world, words, headers={"x_request_id": "huge"})).status == 400
    assert (await embed(world, words[:150])).status == 200


async def test_nobody_new_is_let_in_while_it_ends(world: GatewayWorld) -> None:
    world.parts.begin_drain()
    reply = await embed(world)
    assert (reply.status, reply.error["code"]) == (503, "draining")


# --- the door


async def test_the_door_is_the_same(world: GatewayWorld) -> None:
    """E05"""
    key = await world.key(models=frozenset({"texts"}))
    expired = await world.key(expires_unix=1.0)
    for given, model, status, code in (
        (None, "texts", 401, "missing_api_key"),
        ("kv-000000000000-" + 64 * "0", "texts", 401, "invalid_api_key"),
        (expired, "texts", 401, "expired_api_key"),
        (key, "secret", 403, "model_not_allowed"),
        (key, "nothing", 404, "model_not_found"),
        (key, "auto", 404, "model_not_found"),
        (key, "texts", 200, None),
    ):
        reply = await embed(world, key=given, model=model)
        assert reply.status == status
        assert "x-kvota-request-id" in reply.headers
        assert code is None or reply.error["code"] == code


async def test_tokens_are_reserved_and_then_corrected(world: GatewayWorld, a: FakeBackend) -> None:
    """F03"""
    key = await world.key(limits=KeyLimits(tokens_per_minute=100))
    left = [remaining(await embed(world, key=key)) for _ in range(3)]
    assert left[0] - left[1] == left[1] - left[2] == 3
    full = await embed(world, 40 * "word ", key=key)
    assert full.status == 200
    again = await embed(world, 60 * "word ", key=key)
    assert (again.status, again.error["code"]) == (429, "rate_limit_tokens")
    assert int(again.headers["retry-after"]) >= 1
    assert again.headers["x-should-retry"] == "true"
    assert remaining(again) == 100 - 9 - 40
    never = await embed(world, 400 * "word ", key=key)
    assert (never.status, never.error["param"]) == (400, "input")
    assert len(asked(a)) == 4


async def test_requests_are_counted_and_what_failed_here_is_not(
    world: GatewayWorld, a: FakeBackend
) -> None:
    """F04"""
    key = await world.key(limits=KeyLimits(requests_per_minute=2))
    a.overrides[EMBED] = fails(500)
    assert (await embed(world, key=key)).status == 502
    del a.overrides[EMBED]
    assert (await embed(world, key=key)).status == 200
    assert (await world.post("/tokenize", {"model": "texts", "prompt": "a"}, key)).status == 200
    for path, field in ((EMBED, "input"), ("/tokenize", "prompt")):
        reply = await world.post(path, {"model": "texts", field: "a"}, key)
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_requests")


async def test_limits_may_be_those_of_one_model(world: GatewayWorld) -> None:
    key = await world.key(model_limits={"texts": KeyLimits(requests_per_minute=1)})
    assert [(await embed(world, key=key)).status for _ in range(2)] == [200, 429]
    assert (await embed(world, key=key, model="secret")).status == 200


async def test_who_keeps_failing_is_shut_out(closing: AsyncExitStack, a: FakeBackend) -> None:
    models = [model_of("texts", "a")]
    world = await world_of(closing, vllm_entry("a", a), models=models, abuse_failures_max=5)
    key = await world.key()
    for _ in range(6):
        await embed(world, [[]], key=key)
    blocked = await embed(world, key=key)
    assert (blocked.status, blocked.error["code"]) == (429, "abuse_blocked")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a"}, "model"),
        ({"model": "texts"}, "input"),
        ({"model": "texts", "input": []}, "input"),
        ({"model": "texts", "input": [1, "a"]}, "input"),
        ({"model": "texts", "input": {"a": 1}}, "input"),
        ({"model": "texts", "input": ["a"] * 5}, "input"),
        ({"model": "texts", "input": [[1]] * 5}, "input"),
        ({"model": "texts", "input": ["a" * 60, "b" * 41]}, "input"),
        ({"model": "texts", "input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"model": "texts", "input": "a", "dimensions": 0}, "dimensions"),
    ],
)
async def test_what_is_wrong_or_too_much_is_said_with_its_field(
    closing: AsyncExitStack, a: FakeBackend, body: Any, param: str
) -> None:
    world = await world_of(
        closing, vllm_entry("a", a), models=[model_of("texts", "a")],
        inputs_max=4, prompt_characters_max=100,
    )  # fmt: skip
    reply = await world.post(EMBED, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["code"] == "invalid_request"
    assert not asked(a)
    assert (await embed(world, list(range(50)))).status == 200, "token ids are one input"


async def test_bodies_of_another_kind_are_told_so(world: GatewayWorld) -> None:
    reply = await world.http.post(EMBED, content=b"a=1", headers={"content-type": "text/plain"})
    assert reply.status_code == 415
    assert (await world.http.post(EMBED, content=b"{")).status_code == 400
    assert (await world.http.get(EMBED)).status_code == 405


async def test_the_filter_reads_every_text(
    closing: AsyncExitStack, a: FakeBackend, tmp_path: Path
) -> None:
    lists = tmp_path / "words.toml"
    lists.write_text('[[rule]]\nname = "falcon"\nliterals = ["Project Falcon"]\n')
    models = [model_of("texts", "a")]
    world = await world_of(closing, vllm_entry("a", a), models=models, block_lists=(str(lists),))
    denied = await embed(world, ["fine", "of project falcon"])
    assert (denied.status, denied.error["code"]) == (400, "content_filtered")
    assert denied.error["param"] == "input"
    assert (await embed(world, [1, 2])).error["param"] == "input", "nobody can read ids"
    prompt = {"model": "texts", "prompt": "project falcon"}
    assert (await world.post("/tokenize", prompt)).error["code"] == "content_filtered"
    assert not asked(a) + asked(a, "/tokenize")
    assert '"why": "falcon"' in world.log
    assert (await embed(world, ["fine", "and well"])).status == 200


# --- what is left of it


async def test_usage_is_the_backends_own_count(world: GatewayWorld, a: FakeBackend) -> None:
    """F09"""
    admin = await world.key(is_admin=True)
    key = await world.key(tenant="team-a", limits=KeyLimits(requests_per_minute=3))
    await embed(world, key=key)
    await embed(world, ["hi", "there you"], key=key)
    a.overrides[EMBED] = fails(400)
    await embed(world, key=key)
    del a.overrides[EMBED]
    assert (await embed(world, key=key)).status == 200
    assert (await embed(world, key=key)).status == 429
    [row] = (await world.get("/admin/usage?tenant=team-a", admin)).json["data"]
    assert (row["requests"], row["refusals"]) == (5, 1)
    assert (row["prompt_tokens"], row["output_tokens"]) == (9, 0)
    assert row["kv_block_seconds"] == 0


async def test_a_backend_that_counts_nothing_is_counted_for(
    world: GatewayWorld, a: FakeBackend
) -> None:
    row = {"object": "embedding", "index": 0, "embedding": [1.0]}
    said: list[dict[str, Any]] = [
        {}, {"usage": None}, {"usage": {"prompt_tokens": "x"}}, {"usage": {}},
    ]  # fmt: skip
    for usage in said:
        a.overrides[EMBED] = answers({"object": "list", "data": [row], "model": MODEL, **usage})
        assert (await embed(world, 40 * "word ")).status == 200
    rows = (await world.get("/admin/usage")).json["data"]
    assert 4 * 30 <= rows[0]["prompt_tokens"] <= 4 * 90


async def test_each_request_leaves_one_line_and_no_word_of_its_texts(
    closing: AsyncExitStack, a: FakeBackend, tmp_path: Path
) -> None:
    """F07"""
    journal = tmp_path / "journal.jsonl"
    models = [model_of("texts", "a")]
    world = await world_of(closing, vllm_entry("a", a), models=models, journal=str(journal))
    assert (await embed(world, ["a private thing", "hi"])).status == 200
    assert (await embed(world, "a private thing", model="nothing")).status == 404
    prompt = {"model": "texts", "prompt": "a private thing"}
    assert (await world.post("/tokenize", prompt)).json["count"] == 3
    await until(lambda: world.log.count('"event": "request"') == 3)
    events = [json.loads(line) for line in world.log.splitlines()]
    first, second, third = [one for one in events if one["event"] == "request"]
    assert (first["endpoint"], first["outcome"], first["inputs"]) == ("embeddings", "completed", 2)
    assert (first["prompt_tokens"], first["backend"], first["status"]) == (4, "a", 200)
    assert "first_token_s" not in first
    assert (second["outcome"], second["code"]) == ("invalid", "model_not_found")
    assert (third["endpoint"], third["outcome"]) == ("tokenize", "completed")
    kept = list(read_journal(journal.read_text().splitlines()))
    assert [(one.endpoint, one.outcome) for one in kept] == [
        ("embeddings", "completed"),
        ("embeddings", "invalid"),
    ]
    assert (kept[0].prompt_tokens, kept[0].output_tokens) == (4, 0)
    assert kept[0].first_token_s is None
    for text in (world.log, journal.read_text(), (await world.get("/metrics")).content.decode()):
        assert "private" not in text


async def test_metrics_count_it_and_keep_it_out_of_the_time_to_the_first_token(
    world: GatewayWorld,
) -> None:
    await embed(world)
    await world.post("/tokenize", {"model": "texts", "prompt": "a"})
    ended = 'kvota_gateway_requests_total{model="texts",outcome="completed"}'
    assert await world.metrics(ended) == 2
    assert await world.metrics('kvota_gateway_prompt_tokens_total{model="texts"}') == 3
    assert await world.metrics("kvota_gateway_request_seconds_count") == 1
    assert await world.metrics("kvota_gateway_time_to_first_token_seconds_count") == 0


async def test_the_tokenizer_knows_the_door_and_says_who_answered(world: GatewayWorld) -> None:
    key = await world.key(models=frozenset({"texts"}))
    prompt = {"model": "texts", "prompt": "a b c"}
    assert (await world.post("/tokenize", prompt)).error["code"] == "missing_api_key"
    secret = await world.post("/tokenize", {"model": "secret", "prompt": "a"}, key)
    assert (secret.status, secret.error["code"]) == (403, "model_not_allowed")
    reply = await world.post("/tokenize", prompt, key)
    assert (reply.status, reply.json["count"]) == (200, 3)
    assert (reply.headers["x-kvota-backend"], reply.headers["x-kvota-model"]) == ("a", "texts")
    assert "x-kvota-request-id" in reply.headers
    away = await world.post("/detokenize", {"model": "texts", "tokens": [1]}, key)
    assert (away.status, away.error["code"]) == (404, "not_found")
    unnamed = await world.post("/tokenize", {"prompt": "a"}, key)
    assert (unnamed.status, unnamed.error["param"]) == (400, "model")


@pytest.mark.parametrize("kind", [BackendKind.OPENAI, BackendKind.LLAMACPP, BackendKind.TGI])
async def test_every_kind_of_backend_may_embed(
    closing: AsyncExitStack, a: FakeBackend, kind: BackendKind
) -> None:
    entry = BackendEntry(name="a", url=a.url, kind=kind)
    world = await world_of(closing, entry, models=[model_of("texts", "a")])
    assert (await embed(world)).json["usage"]["prompt_tokens"] == 3


async def test_after_a_storm_every_request_has_ended_once_and_nothing_is_held(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend, tmp_path: Path
) -> None:
    chance, journal = Random(20261129), tmp_path / "journal.jsonl"
    patience = {"first_byte_timeout_s": 0.3, "max_running_requests": 3, "max_waiting_queue": 4}
    entries = [vllm_entry("a", a, **patience), vllm_entry("b", b, **patience)]
    models = [model_of("texts", "a", "b")]
    # How many of these are refused depends on the machine, so no watch may block the key for it.
    world = await world_of(
        closing, *entries, models=models, journal=str(journal), abuse_watch=False
    )
    key = await world.key(limits=KeyLimits(concurrent_requests=8))
    a.overrides[EMBED] = b.overrides[EMBED] = breaks_now_and_then(chance)

    async def client(number: int) -> list[int]:
        statuses = []
        for turn in range(10):
            patience_s = chance.choice([0.05, 5.0, 5.0])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    headers = {"x_request_id": f"{number}-{turn}"}
                    reply = await embed(world, ["a b"] * 3, key=key, headers=headers)
                    statuses.append(reply.status)
        return statuses

    seen = Counter(itertools.chain(*await asyncio.gather(*map(client, range(16)))))
    assert {200, 429} <= seen.keys() <= {200, 429, 502, 503}, seen
    await until(lambda: world.parts.live.num_open == 0)
    for backend in world.parts.registry.all():
        assert backend.embedding_desk is not None
        backend.embedding_desk.check()
        assert backend.embedding_desk.snapshot().held_tokens == backend.num_open == 0
    ended = Counter(one.id for one in read_journal(journal.read_text().splitlines()))
    assert set(ended.values()) == {1}
    assert sum(seen.values()) <= len(ended) <= 160
    del a.overrides[EMBED], b.overrides[EMBED]
    places = [embed(world, key=key) for _ in range(8)]
    assert all(reply.status != 429 for reply in await asyncio.gather(*places))


def breaks_now_and_then(chance: Random) -> Script:
    """A good answer, mostly; or none, half of one, another's, or an error."""
    row = {"object": "embedding", "index": 0, "embedding": [1.0]}
    good, short = ({"object": "list", "data": [row] * n, "model": MODEL} for n in (3, 2))
    scripts = [answers(good)] * 12
    scripts += [answers(short), hangs_up, never_answers, fails(500), fails(429)]

    async def script(asked: Received, wire: Wire) -> None:
        await wire.pause(chance.uniform(0.0, 0.03))
        await chance.choice(scripts)(asked, wire)

    return script
