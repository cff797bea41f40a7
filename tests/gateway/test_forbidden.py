"""A backend that forbids something: one request, or all that we ask it."""

import math
from contextlib import AsyncExitStack

import pytest

from kvota.core.clock import ManualClock
from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream.kinds import BackendKind
from tests.support.fake_backend import FakeBackend, fails, streams
from tests.support.gateway_world import GatewayWorld, gateway_world, model_of

KINDS = pytest.mark.parametrize("kind", [BackendKind.VLLM, BackendKind.KVOTA])


async def world_of(
    closing: AsyncExitStack, backend: FakeBackend, kind: BackendKind
) -> GatewayWorld:
    """Time stands still: what is left alone for seconds stays so."""
    entry, models = BackendEntry(name="a", url=backend.url, kind=kind), [model_of("chat", "a")]
    made = gateway_world(entry, models=models, clock=ManualClock(1000.0))
    return await closing.enter_async_context(made)


@KINDS
@pytest.mark.parametrize("status", [402, 403])
async def test_one_request_that_a_good_backend_forbids_keeps_nobody_from_it(
    closing: AsyncExitStack, backend: FakeBackend, kind: BackendKind, status: int
) -> None:
    world = await world_of(closing, backend, kind)
    backend.scripts.extend([streams(), fails(status)] * 3)
    assert [(await world.chat(stream=True)).status for _ in range(6)] == [200, 502] * 3
    backend.script = fails(status)
    world.parts.registry["a"].answered_s = -math.inf
    assert [(await world.chat()).error["code"] for _ in range(2)] == [
        "backend_error", "engine_restarting",
    ], "it may forbid everything"  # fmt: skip


@KINDS
@pytest.mark.parametrize("status", [401, 407])
async def test_a_key_of_ours_that_is_refused_is_so_for_everybody(
    closing: AsyncExitStack, backend: FakeBackend, kind: BackendKind, status: int
) -> None:
    world = await world_of(closing, backend, kind)
    backend.scripts.extend([streams(), fails(status)])
    assert [(await world.chat(stream=True)).status for _ in range(3)] == [200, 502, 503]
