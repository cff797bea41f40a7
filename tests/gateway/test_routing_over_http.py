"""Models, fallback, replicas and rollouts, as clients and operators meet them."""

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from kvota.core.clock import ManualClock, SystemClock
from kvota.core.errors import ConfigError, Refusal, Refused
from kvota.gateway.policy.breaker import State
from kvota.gateway.policy.retries import RetrySettings
from kvota.gateway.settings import (
    READ_ONCE,
    BackendEntry,
    GatewaySettings,
    ModelEntry,
    VersionEntry,
)
from kvota.gateway.upstream.kinds import BackendKind
from tests.support.fake_backend import (
    DONE,
    MODEL,
    FakeBackend,
    Received,
    Script,
    Wire,
    begins,
    chunk,
    event,
    events,
    fails,
    hangs_up,
    never_ends,
    piece,
    says,
    streams,
    usage_of,
)
from tests.support.gateway_world import (
    PATIENCE_S,
    GatewayWorld,
    gateway_world,
    model_of,
    vllm_entry,
)
from tests.support.http_client import CHAT, Reply

TEXT = "w0 w1 w2 w3 w4 w5 w6 w7"


async def world_of(
    closing: AsyncExitStack, *entries: BackendEntry, models: list[ModelEntry], **settings: Any
) -> GatewayWorld:
    """Unless it has a clock, time stands still: a backend that is left alone for seconds stays so
    on any machine.
    """
    given = {"clock": ManualClock(1000.0), **settings}
    made = gateway_world(*entries, models=models, **given)
    return await closing.enter_async_context(made)


CHAIN = [model_of("chat", "a", fallback="small"), model_of("small", "b")]


@pytest.fixture
async def chained(closing: AsyncExitStack, a: FakeBackend, b: FakeBackend) -> GatewayWorld:
    """`chat` on a, and `small` on b where that fails."""
    return await world_of(closing, vllm_entry("a", a), vllm_entry("b", b), models=CHAIN)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_foreign_backend_answers_in_the_names_of_the_client(
    chained: GatewayWorld, a: FakeBackend, stream: bool
) -> None:
    reply = await chained.chat(stream=stream)
    assert reply.status == 200
    assert reply.text() == TEXT
    assert reply.headers["x-kvota-backend"] == "a"
    assert reply.headers["x-kvota-model"] == "chat"
    assert int(reply.headers["x-kvota-queue-ms"]) >= 0
    bodies = reply.chunks if stream else [reply.json]
    assert {one["model"] for one in bodies} == {"chat"}
    asked = a.generations[0].json
    assert asked["model"] == MODEL
    assert asked["stream"] is True
    assert not any("usage" in chunk for chunk in reply.chunks) if stream else reply.usage
    completed = 'kvota_gateway_requests_total{model="chat",outcome="completed"}'
    assert await chained.metrics(completed) == 1
    assert await chained.metrics('kvota_gateway_attempts_total{backend="a",ending="ok"}') == 1


async def test_a_backend_sees_nothing_that_is_between_client_and_gateway(
    chained: GatewayWorld, a: FakeBackend, b: FakeBackend
) -> None:
    """F07, F10: also on the way to the fallback"""
    a.script = fails(500)
    key = await chained.key()
    headers = {
        "cookie": "c=1", "x_api_key": "k", "proxy_authorization": "p", "x_request_id": "mine",
        "traceparent": "00-1-2-03", "x_kvota_tenant": "admin", "x_kvota_weight": "99",
        "accept_encoding": "br",
    }  # fmt: skip
    reply = await chained.chat(key=key, headers=headers, use_prefix_cache=False, user="u")
    assert reply.status == 200
    for backend in (a, b):
        seen = backend.generations[0]
        names = set(seen.headers)
        assert names.isdisjoint({"cookie", "x-api-key", "proxy-authorization", "authorization"})
        assert not {name for name in names if name.startswith("x-kvota")}
        assert seen.headers["x-request-id"] == "mine"
        assert seen.headers["traceparent"] == "00-1-2-03"
        assert "use_prefix_cache" not in seen.json
        assert seen.json["user"] == "u"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [fails(500), hangs_up, begins(1, lambda wire: wire.drop())])
async def test_who_fails_before_content_is_followed_by_the_fallback(
    chained: GatewayWorld, a: FakeBackend, stream: bool, script: object
) -> None:
    """F02"""
    a.script = script  # type: ignore[assignment]
    reply = await chained.chat(stream=stream)
    assert reply.status == 200
    assert reply.text() == TEXT
    assert reply.headers["x-kvota-backend"] == "b"
    assert reply.headers["x-kvota-fallback"].startswith("chat -> small: ")
    if stream:
        roles = [1 for part in reply.of_choice(0) if part["delta"].get("role")]
        assert len(roles) == 1
        assert len({(chunk["id"], chunk["model"]) for chunk in reply.chunks}) == 1


@pytest.mark.parametrize(
    ("script", "why"), [(fails(503), "refused: queue_full"), (fails(500), "failed")]
)
async def test_the_fallback_says_whether_the_first_choice_was_full_or_broken(
    chained: GatewayWorld, a: FakeBackend, script: object, why: str
) -> None:
    a.script = script  # type: ignore[assignment]
    reply = await chained.chat()
    assert reply.headers["x-kvota-fallback"] == f"chat -> small: its backends {why}"


async def test_when_both_fail_the_client_gets_an_http_error(
    chained: GatewayWorld, a: FakeBackend, b: FakeBackend
) -> None:
    """F02, F08"""
    a.script = b.script = begins(1, lambda wire: wire.drop())
    reply = await chained.chat(stream=True)
    assert (reply.status, reply.error["code"]) == (502, "backend_error")
    assert reply.error["message"].endswith("Tried: a, b.")
    assert len(a.generations) == len(b.generations) == 1


async def test_who_fails_after_content_is_not_followed(
    chained: GatewayWorld, a: FakeBackend, b: FakeBackend
) -> None:
    """F01"""
    a.script = begins(4, lambda wire: wire.drop())
    reply = await chained.chat(stream=True)
    assert reply.status == 200
    assert reply.deltas()[:4] == ["", "w0", " w1", " w2"]
    assert msgspec.json.decode(reply.events[-1])["error"]["code"] == "backend_error"
    assert "[DONE]" not in reply.events
    assert not b.generations


async def test_who_ends_empty_and_then_fails_is_not_followed_either(
    chained: GatewayWorld, a: FakeBackend, b: FakeBackend
) -> None:
    """F01: an ending is content, too."""

    async def script(asked: Received, wire: Wire) -> None:
        await wire.head()
        await wire.send(event(chunk(asked.path, [piece(asked.path, "", finish="stop")])))
        await asyncio.sleep(0.01)
        wire.drop()

    a.script = script
    reply = await chained.chat(stream=True)
    ends = [one["finish_reason"] for said in reply.chunks for one in said.get("choices", ())]
    assert ends.count("stop") == 1
    assert reply.chunks[-1]["error"]["code"] == "backend_error"
    assert not b.generations


async def test_who_fails_in_an_answer_that_nobody_has_seen_is_followed(
    chained: GatewayWorld, a: FakeBackend, b: FakeBackend
) -> None:
    a.script = begins(4, lambda wire: wire.drop())
    b.script = streams(num_tokens=3)
    reply = await chained.chat()
    assert (reply.status, len(b.generations)) == (200, 1)
    assert reply.json["choices"][0]["message"]["content"] == "w0 w1 w2"
    assert reply.json["usage"]["completion_tokens"] == 3


async def test_a_key_may_forbid_the_fallback(chained: GatewayWorld, a: FakeBackend) -> None:
    a.script = fails(500)
    strict = await chained.key(may_fall_back=False)
    assert (await chained.chat(key=strict)).status == 502
    narrow = await chained.key(models=frozenset({"chat"}))
    assert (await chained.chat(key=narrow)).status == 502


async def test_what_is_wrong_with_the_request_goes_back_unchanged(
    chained: GatewayWorld, a: FakeBackend, b: FakeBackend
) -> None:
    """F06"""
    a.script = fails(400)
    for _ in range(8):
        reply = await chained.chat()
        assert (reply.status, reply.error["message"]) == (400, "told to say 400")
        assert reply.error["code"] == "y"
    assert not b.generations
    a.script = None
    assert (await chained.chat()).headers["x-kvota-backend"] == "a", "it has not been blamed"


async def test_a_backend_that_keeps_failing_is_left_alone(
    chained: GatewayWorld, a: FakeBackend
) -> None:
    """F06"""
    a.script = fails(500)
    for _ in range(5):
        assert (await chained.chat()).headers["x-kvota-backend"] == "b"
    num_asked = len(a.generations)
    assert (await chained.chat()).headers["x-kvota-backend"] == "b"
    assert len(a.generations) == num_asked
    state = 'kvota_gateway_breaker_state{backend="a",state="open"}'
    assert await chained.metrics(state) == 1


async def test_a_wrong_key_of_ours_is_no_401_of_the_client(
    chained: GatewayWorld, a: FakeBackend
) -> None:
    """F06"""
    a.script = fails(401)
    assert (await chained.chat()).status == 200
    ended = 'kvota_gateway_attempts_total{backend="a",ending="misconfigured"}'
    assert await chained.metrics(ended) == 1


async def test_a_node_that_refuses_one_request_is_left_alone_by_no_other(
    closing: AsyncExitStack, a: FakeBackend
) -> None:
    """Also where a filter reads its answers, so that they are not passed on as they are."""
    entry = BackendEntry(name="a", url=a.url, kind=BackendKind.KVOTA)
    models, lists = [model_of("chat", "a")], ("credentials",)
    world = await world_of(closing, entry, models=models, block_lists=lists)
    full = {"error": {"message": "no", "type": "t", "param": None, "code": "kv_budget_exhausted"}}
    a.scripts.append(fails(503, full, {"retry-after": "60"}))
    reply = await world.chat()
    assert (reply.status, reply.error["code"]) == (503, "kv_budget_exhausted")
    assert (await world.chat()).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_node_says_in_headers_is_passed_on_where_a_filter_reads_it(
    closing: AsyncExitStack, a: FakeBackend, stream: bool
) -> None:
    async def answers(asked: Received, wire: Wire) -> None:
        await wire.head(headers={"x-kvota-queue-ms": "1200", "x-kvota-cached-tokens": "3"})
        for one in events(asked.path):
            await wire.send(one)
        await wire.end()

    entry = BackendEntry(name="a", url=a.url, kind=BackendKind.KVOTA)
    models, lists = [model_of("chat", "a")], ("credentials",)
    world = await world_of(closing, entry, models=models, block_lists=lists)
    a.script = answers
    reply = await world.chat(stream=stream)
    assert reply.text() == TEXT
    assert reply.headers["x-kvota-queue-ms"] == "1200"
    assert reply.headers["x-kvota-cached-tokens"] == "3"
    assert '"queued_s": 1.2' in world.log


async def test_cached_tokens_that_a_foreign_engine_counts_are_told(
    chained: GatewayWorld, a: FakeBackend
) -> None:
    used = {**usage_of(5, 1), "prompt_tokens_details": {"cached_tokens": 4}}
    spoken = event(chunk(CHAT, [piece(CHAT, "w0", finish="stop")]))
    a.script = says(spoken, event(chunk(CHAT, [], usage=used)), DONE)
    assert (await chained.chat()).headers["x-kvota-cached-tokens"] == "4"


class _Up:
    """A supervisor whose process is up as far as it knows."""

    is_up = True

    def refusal(self) -> Refused:
        return Refused(Refusal.ENGINE_RESTARTING, "It comes back.", retry_after_s=9.0)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (fails(503, headers={"retry-after": "7"}), (503, "queue_full")),
        (says(event({"error": {"message": "m", "code": "queue_timeout"}})), (503, "queue_timeout")),
        (
            fails(504, {"error": {"message": "m", "code": "request_timeout"}}),
            (504, "request_timeout"),
        ),
        (hangs_up, (503, "engine_restarting")),
    ],
)
async def test_an_engine_of_ours_is_said_to_restart_only_where_it_is_gone(
    chained: GatewayWorld, b: FakeBackend, script: Script, told: tuple[int, str]
) -> None:
    chained.parts.registry["b"].supervised = _Up()
    b.script = script
    reply = await chained.chat(model="small")
    assert (reply.status, reply.error["code"]) == told


async def test_when_all_want_peace_the_client_hears_for_how_long(
    chained: GatewayWorld, a: FakeBackend, b: FakeBackend
) -> None:
    """F05"""
    a.script = fails(429, headers={"retry-after": "40"})
    b.script = fails(429, headers={"retry-after": "20"})
    assert (await chained.chat()).status == 503
    reply = await chained.chat()
    assert (reply.status, len(a.generations)) == (503, 1)
    assert reply.error["code"] == "queue_full", "nothing is restarting"
    assert 15 <= int(reply.headers["retry-after"]) <= 24


async def test_above_its_threshold_a_model_hands_on_instead_of_making_wait(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    models = [
        model_of("chat", "a", fallback="small", fallback_kv_usage=0.9),
        model_of("small", "b"),
    ]
    world = await world_of(closing, vllm_entry("a", a), vllm_entry("b", b), models=models)
    assert (await world.chat()).headers["x-kvota-backend"] == "a"
    a.gauges.kv_usage = 0.95
    await world.parts.discover()
    reply = await world.chat()
    assert reply.headers["x-kvota-backend"] == "b"
    assert reply.headers["x-kvota-fallback"] == "chat -> small: kv_usage at 90% or more"
    strict = await world.key(may_fall_back=False)
    assert (await world.chat(key=strict)).headers["x-kvota-backend"] == "a"


@pytest.mark.parametrize("num_replicas", [1, 4])
async def test_whom_a_desk_here_refuses_the_fallback_answers_and_no_retry_is_paid_for(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend, num_replicas: int
) -> None:
    names = [f"a{number}" for number in range(num_replicas)]
    models = [model_of("chat", *names, fallback="small"), model_of("small", "b")]
    full = [vllm_entry(name, a) for name in names]
    world = await world_of(closing, *full, vllm_entry("b", b), models=models)
    for name in names:
        world.parts.registry[name].drain()
    for _ in range(2 * int(RetrySettings().budget_burst)):
        reply = await world.chat()
        assert (reply.status, reply.headers["x-kvota-backend"]) == (200, "b")
        assert "refused" in reply.headers["x-kvota-fallback"]
    assert not a.generations
    assert await world.metrics("kvota_gateway_retry_budget") == RetrySettings().budget_burst


async def test_auto_means_the_model_for_the_task(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    models = [
        model_of("general", "a", tasks=("chat", "summary", "reasoning")),
        model_of("coder", "b", tasks=("code", "sql")),
    ]
    world = await world_of(closing, vllm_entry("a", a), vllm_entry("b", b), models=models)
    for text, task, backend in (
        ("Write a SQL query: select all customers from orders join invoices", "sql", "b"),
        ("写一个Python函数，实现快速排序，并写单元测试", "code", "b"),
        ("Good morning! How are you?", "chat", "a"),
    ):
        reply = await world.chat(text, model="auto")
        assert (reply.headers["x-kvota-task"], reply.headers["x-kvota-backend"]) == (task, backend)
        assert reply.headers["x-kvota-model"] == {"a": "general", "b": "coder"}[backend]
    assert "auto" in {one["id"] for one in (await world.get("/v1/models")).json["data"]}


async def test_auto_means_a_model_that_the_key_may_call(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    models = [
        model_of("large", "a", tasks=("chat", "code")),
        model_of("small", "b", tasks=("chat",)),
        model_of("other", "b"),
    ]
    world = await world_of(closing, vllm_entry("a", a), vllm_entry("b", b), models=models)
    small, other = [await world.key(models=frozenset({name})) for name in ("small", "other")]
    for text in ("Good morning! How are you?", "写一个Python函数，实现快速排序，并写单元测试"):
        reply = await world.chat(text, model="auto", key=small)
        assert reply.headers["x-kvota-model"] == "small"
    assert (await world.chat(model="auto", key=other)).status == 403


async def test_replicas_share_the_work_and_cover_for_each_other(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    world = await world_of(
        closing, vllm_entry("a", a), vllm_entry("b", b), models=[model_of("chat", "a", "b")]
    )
    a.delay_s = b.delay_s = 0.01
    replies = await asyncio.gather(*(world.chat(f"{i} hi") for i in range(40)))
    assert all(reply.status == 200 for reply in replies)
    assert min(len(a.generations), len(b.generations)) >= 8
    a.script = fails(500)
    for number in range(10):
        assert (await world.chat(f"{number} again")).status == 200


async def test_a_conversation_stays_where_it_is(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    world = await world_of(
        closing, vllm_entry("a", a), vllm_entry("b", b), models=[model_of("chat", "a", "b")]
    )
    homes = set()
    for _ in range(10):
        reply = await world.chat(headers={"x_kvota_conversation": "c1"})
        homes.add(reply.headers["x-kvota-backend"])
    assert len(homes) == 1


def two_versions(*, new_weight: float) -> ModelEntry:
    old = VersionEntry(name="v1", backends=("a",), served_as=MODEL, weight=1 - new_weight)
    new = VersionEntry(name="v2", backends=("b",), served_as=MODEL, weight=new_weight)
    return ModelEntry(name="chat", versions=(old, new))


async def shares(world: GatewayWorld, number: int = 60) -> dict[str, int]:
    count = {"a": 0, "b": 0}
    for _ in range(number):
        count[(await world.chat()).headers["x-kvota-backend"]] += 1
    return count


async def change(world: GatewayWorld, body: object) -> Reply:
    return await world.post("/admin/rollouts/chat", body)


async def test_weights_of_versions_change_live(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    entries = (vllm_entry("a", a), vllm_entry("b", b))
    world = await world_of(closing, *entries, models=[two_versions(new_weight=0.0)])
    assert (await shares(world))["b"] == 0
    assert (await change(world, {"weights": {"v1": 0.5, "v2": 0.5}})).status == 200
    assert 10 <= (await shares(world))["b"] <= 50
    shown = (await world.get("/admin/rollouts")).json["data"][0]
    assert [one["weight"] for one in shown["versions"]] == [0.5, 0.5]
    await world.parts.reload()
    assert (await shares(world))["b"] > 0, "a reload keeps what was changed by hand"
    await change(world, {"promote": "v2"})
    assert (await shares(world, 10)) == {"a": 0, "b": 10}
    await change(world, {"roll_back": "v1"})
    wrongs: list[Any] = [{}, {"weights": {"v9": 1}}, {"roll_back": "v2"}, {"weight": {}}]
    for wrong in wrongs:
        assert (await change(world, wrong)).status == 400
    assert (await world.post("/admin/rollouts/none", {"promote": "v1"})).status == 404


async def test_a_worse_version_is_rolled_back_by_itself(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    entries = (vllm_entry("a", a), vllm_entry("b", b))
    world = await world_of(
        closing, *entries, models=[two_versions(new_weight=0.5)], retry_budget=1.0
    )
    # One in three is cut after content: too few for the breaker, too many beside the old version.
    cut, good = begins(3, lambda wire: wire.drop()), streams()
    b.scripts.extend([cut, good, good] * 300)
    for _ in range(600):
        await world.chat(stream=True)
        if "rolled back" in world.log:
            break
    assert await world.metrics('kvota_gateway_rollbacks_total{model="chat",version="v2"}') == 1
    assert (await shares(world, 10))["b"] == 0
    shown = (await world.get("/admin/rollouts")).json["data"][0]["versions"][1]
    assert shown["rolled_back"]
    assert "rolled back" in world.log


async def test_a_version_that_fails_everything_is_rolled_back_though_its_breaker_spares_it(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    world = await world_of(
        closing, vllm_entry("a", a), vllm_entry("b", b), models=[two_versions(new_weight=0.5)]
    )
    b.script = fails(500)
    replies = [await world.chat() for _ in range(120)]
    assert {one.status for one in replies} == {200}
    assert {one.headers["x-kvota-model"] for one in replies} == {"chat@v1"}
    shown = (await world.get("/admin/rollouts")).json["data"][0]["versions"][1]
    assert shown["weight"] == 0
    assert "turned away by its breakers" in shown["rolled_back"]


@pytest.mark.parametrize("status", [401, 405])
async def test_a_version_that_is_set_up_wrongly_is_rolled_back_like_one_that_fails(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend, status: int
) -> None:
    world = await world_of(
        closing, vllm_entry("a", a), vllm_entry("b", b), models=[two_versions(new_weight=0.5)]
    )
    b.script = fails(status)
    replies = [await world.chat() for _ in range(120)]
    assert {one.status for one in replies} == {200}
    shown = (await world.get("/admin/rollouts")).json["data"][0]["versions"][1]
    assert shown["weight"] == 0
    assert "turned away by its breakers" in shown["rolled_back"]


async def test_a_version_that_does_not_embed_is_rolled_back(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    world = await world_of(
        closing, vllm_entry("a", a), vllm_entry("b", b), models=[two_versions(new_weight=0.5)]
    )
    b.overrides["/v1/embeddings"] = fails(404, {"detail": "Not Found"})
    for _ in range(120):
        reply = await world.post("/v1/embeddings", {"model": "chat", "input": "hi"})
        assert reply.status in (200, 404)
    shown = (await world.get("/admin/rollouts")).json["data"][0]["versions"][1]
    assert shown["weight"] == 0


async def test_an_unknown_name_keeps_nobody_from_a_backends_other_models(
    closing: AsyncExitStack, a: FakeBackend
) -> None:
    models = [model_of("good", "a"), model_of("wrong", "a")]
    world = await world_of(closing, vllm_entry("a", a), models=models)

    async def ask(model: str) -> int:
        return (await world.post(CHAT, {"model": model, "messages": []})).status

    a.scripts.extend([streams(), fails(404)] * 5)
    assert [await ask(one) for one in ["good", "wrong"] * 5] == [200, 502] * 5
    a.script = fails(404)
    world.parts.registry["a"].answered_s = -math.inf
    assert [await ask("wrong") for _ in range(2)] == [502, 503], "it may know nothing at all"


@pytest.mark.parametrize(
    "script", [fails(400), fails(422), fails(503, headers={"retry-after": "1"})]
)
async def test_a_version_is_kept_that_only_refuses(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend, script: object
) -> None:
    """Wrong requests are their clients' fault, and a full house is nobody's."""
    world = await world_of(
        closing, vllm_entry("a", a), vllm_entry("b", b), models=[two_versions(new_weight=0.5)]
    )
    b.script = script  # type: ignore[assignment]
    for _ in range(120):
        await world.chat()
    shown = (await world.get("/admin/rollouts")).json["data"][0]["versions"][1]
    assert (shown["weight"], shown["rolled_back"]) == (0.5, None)


async def test_a_version_misses_its_calls_only_where_failures_shut_out_all_its_backends(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    world = await world_of(
        closing, vllm_entry("a", a), vllm_entry("b", b), models=[model_of("chat", "a", "b")]
    )
    route = world.parts.live.now.table.find("chat")
    assert route is not None
    [version] = route.versions.values()
    now = world.clock.now()
    for backend in version.backends:
        assert version.num_trips(now) == 0
        for _ in range(5):
            permit = backend.breaker.may_pass(now)
            assert permit is not None
            backend.breaker.report(permit, False, now)
    assert version.num_trips(now) == 1
    version.backends[0].is_draining = True
    assert version.num_trips(now) == 0, "that one is away for another reason"


async def test_a_new_version_is_kept_where_the_old_one_fails_alike(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    world = await world_of(
        closing, vllm_entry("a", a), vllm_entry("b", b), models=[two_versions(new_weight=0.5)]
    )
    a.script = b.script = fails(500)
    for _ in range(120):
        await world.chat()
    shown = (await world.get("/admin/rollouts")).json["data"][0]["versions"][1]
    assert (shown["weight"], shown["rolled_back"]) == (0.5, None)


async def test_a_desk_here_says_of_its_requests_what_a_nodes_desk_does(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    entries = (vllm_entry("a", a), vllm_entry("b", b))
    chained = await world_of(closing, *entries, models=CHAIN, clock=SystemClock())
    replies = [await chained.chat(stream=stream) for stream in (True, False, True)]
    usage = replies[1].json["usage"]
    of_a = '{backend="a"}'
    for name in ("request_queue", "time_to_first_token", "request"):
        assert await chained.metrics(f"kvota_{name}_seconds_count{of_a}") == 3, name
    assert await chained.metrics(f"kvota_output_tokens_total{of_a}") == 3 * 8
    prompt = await chained.metrics(f"kvota_prompt_tokens_total{of_a}")
    assert prompt == 3 * usage["prompt_tokens"]
    for name in ("request_queue", "time_to_first_token", "time_per_output_token", "request"):
        total_s = await chained.metrics(f"kvota_{name}_seconds_sum{of_a}")
        assert 0 <= total_s <= PATIENCE_S, name
    assert await chained.metrics(f"kvota_forecast_error_tokens_count{of_a}") == 3
    assert await chained.metrics(f"kvota_retry_after_error_seconds_count{of_a}") == 0
    cached = sum((usage.get("prompt_tokens_details") or {}).values())
    assert await chained.metrics(f"kvota_prefix_hit_tokens_total{of_a}") == 3 * cached
    assert await chained.metrics('kvota_kv_blocks{backend="a",state="used"}') == 0
    assert await chained.metrics("vllm:cache_config_info{") == 2
    a.script = fails(500)
    await chained.chat()
    assert await chained.metrics(f"kvota_request_queue_seconds_count{of_a}") == 4
    assert await chained.metrics(f"kvota_time_to_first_token_seconds_count{of_a}") == 3


async def test_what_a_backend_still_holds_after_an_abort_is_shown_and_lent_to_nobody(
    closing: AsyncExitStack, a: FakeBackend
) -> None:
    world = await world_of(closing, vllm_entry("a", a), models=[model_of("chat", "a")])
    desk = world.parts.registry["a"].desk
    assert desk is not None
    capacity = a.gauges.num_blocks * a.gauges.block_size

    async def shown(kv_usage: float, *, outside: float, difference: float) -> None:
        """Until the page says so: blocks beyond our leases, and tokens more than those."""
        a.gauges.kv_usage = kv_usage
        names = ('kvota_kv_blocks{backend="a",state="outside"}', "kvota_kv_ledger_difference")
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if [await world.metrics(one) for one in names] == [outside, difference]:
                    return
                await asyncio.sleep(0.02)

    a.script = begins(3, lambda wire: wire.stall())
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with world.http.stream("POST", CHAT, json=body) as response:
        pieces = (line async for line in response.aiter_lines() if line.startswith("data: "))
        for _ in range(3):
            await anext(pieces)
        assert desk.snapshot().held_tokens > 0
        await shown(0.0, outside=0, difference=-desk.snapshot().held_tokens)
    await shown(0.5, outside=a.gauges.num_blocks / 2, difference=capacity / 2)
    assert desk.snapshot().capacity_tokens == capacity / 2
    await shown(0.0, outside=0, difference=0)
    assert desk.snapshot().capacity_tokens == capacity


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_work_at_the_backend(
    chained: GatewayWorld, a: FakeBackend, stream: bool
) -> None:
    """C05"""
    a.script = never_ends
    desk = chained.parts.registry["a"].desk
    assert desk is not None
    asking = asyncio.create_task(chained.chat(stream=stream))
    async with asyncio.timeout(PATIENCE_S):
        while not desk.snapshot().held_tokens:  # noqa: ASYNC110 - it comes over a socket
            await asyncio.sleep(0.01)
        prompt = desk.snapshot().held_tokens
        while desk.snapshot().held_tokens < prompt + 40:  # noqa: ASYNC110 - so do the tokens
            await asyncio.sleep(0.01)
        asking.cancel()
        await a.generations[0].is_gone.wait()
        await chained.parts.live.wait_idle()
    desk.check()
    assert desk.snapshot().held_tokens == 0
    assert await chained.metrics('kvota_gateway_requests_total{model="chat",outcome="cli') == 1
    [line] = [line for line in chained.log.splitlines() if '"client_closed"' in line]
    assert json.loads(line)["output_tokens"] >= 5, "what came until then is counted, once"
    a.script = None
    assert (await chained.chat()).headers["x-kvota-backend"] == "a", (
        "it was not the backend's fault"
    )


async def test_without_models_in_the_file_those_of_the_backends_are_served(
    closing: AsyncExitStack, a: FakeBackend
) -> None:
    world = await world_of(closing, vllm_entry("a", a), models=[])
    assert [one["id"] for one in (await world.get("/v1/models")).json["data"]] == [MODEL]
    assert (await world.chat(model=MODEL)).text() == TEXT


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_the_models_of_a_backend_that_is_away_are_not_unknown(
    closing: AsyncExitStack, a: FakeBackend, path: str
) -> None:
    a.gauges.is_healthy = False
    world = await world_of(closing, vllm_entry("a", a), models=[])
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "input": "hi"}

    async def becomes(status: int) -> Reply:
        async with asyncio.timeout(PATIENCE_S):
            while (reply := await world.post(path, body)).status != status:
                assert reply.status in (200, 503), reply.content
                await asyncio.sleep(0.01)
        return reply

    reply = await world.post(path, body)  # nobody could be asked what there is
    assert (reply.status, reply.error["code"]) == (503, "engine_restarting")
    assert int(reply.headers["retry-after"]) >= 1
    a.gauges.is_healthy = True
    await becomes(200)
    a.gauges.is_healthy = False
    assert (await becomes(503)).error["code"] == "engine_restarting"
    assert (await world.chat(model="another")).status == 404, "that one it never had"


async def test_a_reload_asks_backends_anew_for_their_models(
    closing: AsyncExitStack, a: FakeBackend
) -> None:
    world = await world_of(closing, vllm_entry("a", a), models=[])

    async def other(asked: Received, wire: Wire) -> None:
        await wire.json({"object": "list", "data": [{"id": "other"}]})

    a.overrides["/v1/models"] = other
    await world.parts.reload()

    async def served() -> list[str]:
        return [one["id"] for one in (await world.get("/v1/models")).json["data"]]

    async with asyncio.timeout(PATIENCE_S):
        while await served() != ["other"]:  # noqa: ASYNC110 - a look may have been under way
            await asyncio.sleep(0.01)


async def test_a_reload_takes_backends_in_and_out_without_dropping_anything(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    world = await world_of(closing, vllm_entry("a", a), models=[model_of("chat", "a")])
    a.delay_s = 0.05
    running = asyncio.create_task(world.chat(stream=True))
    await until(lambda: bool(a.generations))
    world.fleet = msgspec.structs.replace(
        world.fleet, backends=(vllm_entry("b", b),), models=(model_of("chat", "b"),)
    )
    await world.parts.reload()
    assert (await world.chat()).headers["x-kvota-backend"] == "b"
    reply = await running
    assert reply.text() == TEXT
    assert reply.events[-1] == "[DONE]"
    world.broken = "kvota.toml: unknown section [nonsense]."
    refused = await world.post("/admin/reload", {})
    assert (refused.status, refused.error["message"]) == (400, world.broken)
    assert (await world.chat()).status == 200
    assert "reload refused" in world.log


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not met():  # noqa: ASYNC110 - it comes over a socket
            await asyncio.sleep(0.01)


async def test_a_reload_of_limits_forgets_nobody_who_is_at_work_or_waits(
    closing: AsyncExitStack, a: FakeBackend
) -> None:
    """A desk that began anew let as many more run as it may, beside those who still did."""
    entry = vllm_entry("a", a, max_running_requests=2)
    world = await world_of(closing, entry, models=[model_of("chat", "a")])
    backend = world.parts.registry["a"]
    desk = backend.desk
    assert desk is not None
    a.script = never_ends
    running = [asyncio.create_task(world.chat(stream=True)) for _ in range(2)]
    await until(lambda: len(a.generations) == 2)
    a.script = None
    waiting = asyncio.create_task(world.chat())
    await until(lambda: desk.snapshot().num_waiting_choices == 1)

    async def with_limits(**fields: Any) -> None:
        changed = msgspec.structs.replace(entry, **fields)
        world.fleet = msgspec.structs.replace(world.fleet, backends=(changed,))
        await world.parts.reload()

    await with_limits(max_running_requests=1, kv_tokens=5_000)
    assert world.parts.registry["a"] is backend
    assert desk.snapshot().num_choices == 2, "they go on"
    running.pop().cancel()
    await until(lambda: desk.snapshot().num_choices == 1)
    assert not waiting.done(), "one runs, and no more may"
    with pytest.raises(ConfigError, match="max_running_requests"):
        await with_limits(max_running_requests=0)
    await with_limits(max_running_requests=2)
    assert (await waiting).text() == TEXT
    for one in running:
        one.cancel()


async def test_long_streams_of_a_backend_that_is_well_again_keep_nobody_from_it(
    closing: AsyncExitStack, a: FakeBackend
) -> None:
    """Each was a probe to its end, and only so many probes go out at once."""
    world = await world_of(closing, vllm_entry("a", a), models=[model_of("chat", "a")])
    breaker, now = world.parts.registry["a"].breaker, world.clock.now()
    breaker.hold(now + 1.0, now)
    assert breaker.state(now + 1.0) is State.HALF_OPEN
    a.script = never_ends
    running = [asyncio.create_task(world.chat(stream=True)) for _ in range(3)]
    await until(lambda: breaker.state(now + 1.0) is State.CLOSED)
    running += [asyncio.create_task(world.chat(stream=True)) for _ in range(3)]
    await until(lambda: len(a.generations) == 6)
    for one in running:
        one.cancel()


async def test_a_backend_at_another_address_is_another_backend(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    world = await world_of(closing, vllm_entry("a", a), models=[model_of("chat", "a")])
    before = world.parts.registry["a"]
    world.fleet = msgspec.structs.replace(world.fleet, backends=(vllm_entry("a", b),))
    await world.parts.reload()
    assert world.parts.registry["a"] is not before
    assert (await world.chat()).status == 200
    assert b.generations


async def test_a_reload_takes_in_how_patient_the_gateway_is(
    closing: AsyncExitStack, a: FakeBackend, b: FakeBackend
) -> None:
    entries = [vllm_entry("a", a), vllm_entry("b", b)]
    world = await world_of(closing, *entries, models=[model_of("chat", "a", "b")])
    key = await world.key(models=frozenset({"another"}))
    assert (await world.chat(key=key)).status == 403
    world.settings = msgspec.structs.replace(
        world.settings, attempts_max=1, hide_models=True, abuse_failures_max=5
    )
    await world.parts.reload()
    assert (await world.chat(key=key)).status == 404
    a.script = b.script = fails(500)
    assert (await world.chat(key=await world.key())).status == 502
    assert len(a.generations) + len(b.generations) == 1
    seen = [await world.chat(key=key) for _ in range(5)]
    assert seen[-1].error["code"] == "abuse_blocked"
    world.settings = msgspec.structs.replace(world.settings, attempts_max=0)
    with pytest.raises(ConfigError, match="attempts_max"):
        await world.parts.reload()


async def test_a_bug_in_reading_settings_ends_no_gateway(
    chained: GatewayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: object) -> None:
        raise ValueError("nobody thought of that")

    monkeypatch.setattr("kvota.gateway.control.check_gateway", breaks)
    await chained.parts.reload_or_log()
    assert (await chained.chat()).status == 200
    assert "nobody thought of that" in chained.log
    assert await chained.metrics('kvota_gateway_reloads_total{ending="refused"}') == 1


async def test_a_reload_names_what_only_a_restart_takes_in(chained: GatewayWorld) -> None:
    assert set(READ_ONCE) <= set(GatewaySettings.__struct_fields__)
    assert "which have changed" not in await chained.parts.reload()
    chained.settings = msgspec.structs.replace(chained.settings, journal="/tmp/j", messages_max=3)
    assert "which have changed: journal." in await chained.parts.reload()
    assert '"needs_restart": ["journal"]' in chained.log


async def test_embeddings_and_tokenizers_are_passed_on(
    chained: GatewayWorld, a: FakeBackend
) -> None:
    reply = await chained.post("/v1/embeddings", {"model": "chat", "input": "hi there"})
    assert reply.status == 200
    assert reply.json["data"][0]["embedding"] == [8.0, 0.5]
    assert a.received[-1].json["model"] == MODEL or a.received[-2].json["model"] == MODEL
    assert (await chained.post("/tokenize", {"model": "chat", "prompt": "a b c"})).json[
        "count"
    ] == 3
    assert (await chained.post("/tokenize", {"model": "none", "prompt": "a"})).status == 404
