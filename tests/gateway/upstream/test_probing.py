"""What each kind of backend says of itself, in the form in which it says it."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from kvota.core.clock import ManualClock, SystemClock
from kvota.gateway.upstream.connection import Upstream, UpstreamSettings
from kvota.gateway.upstream.correction import KvReading
from kvota.gateway.upstream.kinds import TRAITS, BackendKind
from kvota.gateway.upstream.probing import FACTS_HOLD_S, BackendState, Prober
from tests.support import fake_backend as fake
from tests.support.fake_backend import FakeBackend

CLOCK = SystemClock()


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend() as backend:
        yield backend


@pytest.fixture
async def upstream(backend: FakeBackend) -> AsyncIterator[Upstream]:
    upstream = Upstream(UpstreamSettings(name="b", url=backend.url), CLOCK)
    yield upstream
    await upstream.close()


def page(text: str) -> fake.Script:
    async def script(asked: fake.Received, wire: fake.Wire) -> None:
        await wire.text(text)

    return script


def answer(content: Any) -> fake.Script:
    async def script(asked: fake.Received, wire: fake.Wire) -> None:
        await wire.json(content)

    return script


async def probed(
    backend: FakeBackend, upstream: Upstream, kind: BackendKind, pages: Mapping[str, fake.Script]
) -> BackendState:
    backend.overrides.update(pages)
    state = await Prober(upstream, kind, CLOCK).probe()
    assert state.is_healthy, state.why
    return state


async def test_vllm(backend: FakeBackend, upstream: Upstream) -> None:
    backend.gauges = fake.Gauges(num_blocks=1000, block_size=16, kv_usage=0.25, running=3,
                                 waiting=2, max_model_len=4096)  # fmt: skip
    state = await probed(backend, upstream, BackendKind.VLLM, {})
    assert (state.capacity_tokens, state.block_size, state.used_tokens) == (16_000, 16, 4_000)
    assert (state.running, state.waiting, state.max_model_len) == (3, 2, 4096)
    assert state.models == (fake.MODEL,)
    assert state.kv_usage == 0.25
    assert state.reading == KvReading(capacity_tokens=16_000, used_tokens=4_000)
    assert state.latency_s is not None
    assert state.latency_s >= 0


async def test_vllm_with_two_engines_and_its_older_name(
    backend: FakeBackend, upstream: Upstream
) -> None:
    text = """\
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100"} 1.0
vllm:gpu_cache_usage_perc{engine="0"} 0.5
vllm:gpu_cache_usage_perc{engine="1"} 0.0
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
"""
    state = await probed(backend, upstream, BackendKind.VLLM, {"/metrics": page(text)})
    assert (state.capacity_tokens, state.used_tokens, state.running) == (3200, 800, 3)
    assert state.waiting is None


@pytest.mark.parametrize("blocks", ["None", "0", ""])
async def test_vllm_that_does_not_know_its_blocks_yet(
    backend: FakeBackend, upstream: Upstream, blocks: str
) -> None:
    text = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n'
    text += "vllm:kv_cache_usage_perc 0.5\n"
    state = await probed(backend, upstream, BackendKind.VLLM, {"/metrics": page(text)})
    assert (state.capacity_tokens, state.used_tokens) == (None, None)


async def test_our_own_node(backend: FakeBackend, upstream: Upstream) -> None:
    text = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="10"} 1.0\n'
    text += 'vllm:kv_cache_usage_perc{model_name="m"} 0.5\n'
    pages = {"/ready": answer({"status": "ready"}), "/metrics": page(text)}
    state = await probed(backend, upstream, BackendKind.KVOTA, pages)
    assert (state.capacity_tokens, state.used_tokens) == (320, 160)


async def test_sglang(backend: FakeBackend, upstream: Upstream) -> None:
    text = """\
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 10000.0
sglang:max_total_num_tokens{model_name="m",tp_rank="1"} 10000.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
sglang:num_running_reqs{model_name="m",tp_rank="0"} 8.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 4.0
"""
    state = await probed(backend, upstream, BackendKind.SGLANG, {"/metrics": page(text)})
    assert (state.capacity_tokens, state.used_tokens) == (10_000, 2_800)
    assert (state.running, state.waiting) == (8, 4)


async def test_sglang_with_data_parallel_ranks_and_several_kinds_of_layers(
    backend: FakeBackend, upstream: Upstream
) -> None:
    ranks = [f'{{model_name="m",dp_rank="{dp}",tp_rank="{tp}"}}' for dp in (0, 1) for tp in (0, 1)]
    text = "".join(
        f"sglang:{name}{rank} {value}\n"
        for rank in ranks
        for name, value in {
            "max_total_num_tokens": 10_000, "page_size": 64, "kv_used_tokens": 1280,
            "token_usage": 0.9, "full_token_usage": 0.128, "num_running_reqs": 8,
            "num_queue_reqs": 4,
        }.items()
    )  # fmt: skip
    for page_of in (text, text.replace("kv_used_tokens", "something_else")):
        state = await probed(backend, upstream, BackendKind.SGLANG, {"/metrics": page(page_of)})
        assert (state.capacity_tokens, state.used_tokens, state.block_size) == (20_000, 2560, 64)
        assert (state.running, state.waiting) == (16, 8)


async def test_ollama_says_how_long_the_context_of_what_it_has_loaded_is(
    backend: FakeBackend, upstream: Upstream
) -> None:
    models = [{"name": "a", "context_length": 8192}, {"name": "b", "context_length": 4096}]
    pages = {"/api/version": answer({"version": "0.33"}), "/api/ps": answer({"models": models})}
    state = await probed(backend, upstream, BackendKind.OLLAMA, pages)
    assert state.max_model_len == 4096


async def test_llamacpp(backend: FakeBackend, upstream: Upstream) -> None:
    props = {"default_generation_settings": {"n_ctx": 4096}, "total_slots": 4}
    text = "llamacpp:requests_processing 3\nllamacpp:requests_deferred 7\n"
    pages = {"/props": answer(props), "/metrics": page(text)}
    state = await probed(backend, upstream, BackendKind.LLAMACPP, pages)
    assert (state.capacity_tokens, state.num_slots, state.max_model_len) == (16_384, 4, 4096)
    assert (state.running, state.waiting) == (3, 7)


async def test_tgi(backend: FakeBackend, upstream: Upstream) -> None:
    info = {"max_batch_total_tokens": 50_000, "max_total_tokens": 8192}
    text = "tgi_batch_current_max_tokens 1000\ntgi_batch_current_size 2\ntgi_queue_size 1\n"
    pages = {"/info": answer(info), "/metrics": page(text)}
    state = await probed(backend, upstream, BackendKind.TGI, pages)
    assert (state.capacity_tokens, state.used_tokens, state.max_model_len) == (50_000, 1000, 8192)
    assert (state.running, state.waiting) == (2, 1)


async def test_tgi_as_it_is_since_3_3_7(backend: FakeBackend, upstream: Upstream) -> None:
    text = "tgi_batch_max_total_tokens 60000\ntgi_batch_current_max_tokens 1000\n"
    pages = {"/info": answer({"max_total_tokens": 8192}), "/metrics": page(text)}
    state = await probed(backend, upstream, BackendKind.TGI, pages)
    assert (state.capacity_tokens, state.used_tokens, state.max_model_len) == (60_000, 1000, 8192)


@pytest.mark.parametrize("kind", [BackendKind.OLLAMA, BackendKind.OPENAI])
async def test_who_says_nothing_is_healthy_all_the_same(
    backend: FakeBackend, upstream: Upstream, kind: BackendKind
) -> None:
    state = await probed(backend, upstream, kind, {"/api/version": answer({"version": "1"})})
    assert state.capacity_tokens is None
    assert state.kv_usage is None


@pytest.mark.parametrize("kind", list(BackendKind))
async def test_pages_full_of_nonsense_are_no_news(
    backend: FakeBackend, upstream: Upstream, kind: BackendKind
) -> None:
    nonsense = {
        path: answer([1, {"data": 5}])
        for path in (
            "/props",
            "/info",
            "/v1/models",
            "/metrics",
            "/api/ps",
            TRAITS[kind].health_path,
        )
    }
    state = await probed(backend, upstream, kind, nonsense)
    assert state.capacity_tokens is None
    assert state.models is None


@pytest.mark.parametrize("script", [fake.fails(503), fake.hangs_up, fake.never_answers])
async def test_a_sick_backend_is_told_with_the_reason(
    backend: FakeBackend, upstream: Upstream, script: fake.Script
) -> None:
    backend.overrides["/health"] = script
    prober = Prober(upstream, BackendKind.VLLM, CLOCK, timeout_s=0.3)
    state = await prober.probe()
    assert not state.is_healthy
    assert "backend b" in state.why


async def test_a_backend_that_is_gone_is_told(upstream: Upstream, backend: FakeBackend) -> None:
    await backend.stop()
    state = await Prober(upstream, BackendKind.VLLM, CLOCK).probe()
    assert not state.is_healthy
    assert "cannot be reached" in state.why
    await backend.listen()


def models_page(*ids: str) -> fake.Script:
    return answer({"object": "list", "data": [{"id": one, "max_model_len": 4096} for one in ids]})


async def test_while_it_is_away_a_backends_models_are_still_its_models(
    backend: FakeBackend, upstream: Upstream
) -> None:
    prober = Prober(upstream, BackendKind.VLLM, CLOCK)
    assert (await prober.probe()).models == (fake.MODEL,)
    backend.gauges.is_healthy = False
    away = await prober.probe()
    assert (away.is_healthy, away.models, away.max_model_len) == (False, (fake.MODEL,), 8192)
    backend.gauges.is_healthy = True
    backend.overrides["/v1/models"] = fake.fails(500)
    assert (await prober.probe()).models == (fake.MODEL,)
    backend.overrides["/v1/models"] = models_page("another")
    prober.forget()
    assert (await prober.probe()).models == ("another",)
    backend.overrides["/v1/models"] = models_page()
    prober.forget()
    assert (await prober.probe()).models == ()


async def test_models_that_come_and_go_are_noticed(
    backend: FakeBackend, upstream: Upstream
) -> None:
    clock = ManualClock(0.0)
    prober = Prober(upstream, BackendKind.OLLAMA, clock)
    backend.overrides["/api/version"] = answer({})
    backend.overrides["/v1/models"] = fake.fails(500)
    assert (await prober.probe()).models is None
    backend.overrides["/v1/models"] = models_page("a")
    assert (await prober.probe()).models == ("a",), "asked again at once, for it had not said"
    backend.overrides["/v1/models"] = models_page("a", "b")
    assert (await prober.probe()).models == ("a",)
    clock.advance(FACTS_HOLD_S)
    assert (await prober.probe()).models == ("a", "b")


async def test_what_may_change_in_a_restart_is_asked_again_after_it(
    backend: FakeBackend, upstream: Upstream
) -> None:
    prober = Prober(upstream, BackendKind.VLLM, CLOCK)
    assert (await prober.probe()).max_model_len == 8192
    await prober.probe()
    assert [one.path for one in backend.received].count("/v1/models") == 1
    backend.gauges = fake.Gauges(is_healthy=False, max_model_len=1024)
    await prober.probe()
    backend.gauges.is_healthy = True
    assert (await prober.probe()).max_model_len == 1024
