"""The content filter, as clients meet it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvota.gateway.caller import KeyLimits
from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream.kinds import BackendKind
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_world import GatewayWorld, gateway_world, model_of, vllm_entry
from tests.support.http_client import CHAT


@pytest.fixture
def block_list(tmp_path: Path) -> str:
    path = tmp_path / "words.toml"
    path.write_text('[[rule]]\nname = "falcon"\nliterals = ["Project Falcon"]\n')
    return str(path)


@pytest.fixture
async def world(backend: FakeBackend, block_list: str) -> AsyncIterator[GatewayWorld]:
    models = [model_of("chat", "a")]
    async with gateway_world(
        vllm_entry("a", backend), models=models, block_lists=(block_list,), abuse_watch=False
    ) as made:
        yield made


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_whoever_is_over_a_limit_makes_nobody_search(world: GatewayWorld, path: str) -> None:
    key = await world.key(limits=KeyLimits(requests_per_minute=2, concurrent_requests=1))
    found = "project falcon"
    body = {"model": "chat", "messages": [{"role": "user", "content": found}], "input": found}
    codes = [(await world.post(path, body, key)).error["code"] for _ in range(3)]
    assert codes == ["content_filtered", "content_filtered", "rate_limit_requests"]


async def test_what_the_filter_refuses_takes_no_tokens(world: GatewayWorld) -> None:
    key = await world.key(limits=KeyLimits(tokens_per_minute=1000))
    for _ in range(5):
        denied = await world.chat("project falcon", key=key, max_tokens=800)
        assert denied.error["code"] == "content_filtered"
    assert (await world.chat(key=key, max_tokens=800)).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_where_a_filter_reads_a_nodes_answers_they_may_be_as_long_as_ever(
    backend: FakeBackend, block_list: str, stream: bool
) -> None:
    entry = BackendEntry(name="a", url=backend.url, kind=BackendKind.KVOTA)
    backend.num_tokens = 40
    async with gateway_world(
        entry, models=[model_of("chat", "a")], block_lists=(block_list,), output_tokens_assumed=8
    ) as world:
        assert (await world.chat(stream=stream)).text().endswith("w39")
        assert "max_tokens" not in backend.generations[0].json
        assert (await world.chat(stream=stream, max_tokens=5)).text().endswith("w4")
