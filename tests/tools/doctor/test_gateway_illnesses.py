"""Illnesses that only a gateway has, or only a gateway can put a name to."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import repeat

import httpx

from kvota.gateway.caller import KeyLimits
from kvota.tools.doctor.diagnosis import Diagnosis, diagnose
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.watch import Patient
from kvota.tools.doctor.window import Window
from tests.support.fake_backend import FakeBackend, Received, Wire
from tests.support.gateway_node import gateway_node
from tests.support.gateway_world import GatewayWorld, gateway_world, model_of, vllm_entry
from tests.support.light_serve import light_serve
from tests.support.live_node import until
from tests.tools.doctor.ward import ENDLESS_S, ward

PATIENT = Targets(ttft_s=ENDLESS_S, tpot_s=ENDLESS_S)
FEW = KeyLimits(requests_per_minute=5)


class Look:
    """Two looks at a gateway that runs on the test's own loop."""

    def __init__(self, world: GatewayWorld, key: str | None) -> None:
        self._patient = Patient(f"http://127.0.0.1:{world.port}", key)
        self.names: list[str] = []

    @asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        with self._patient:
            first = await asyncio.to_thread(self._patient.read, with_usage=True)
            yield
            last = await asyncio.to_thread(self._patient.read, with_usage=True)
        self.diagnosis: Diagnosis = diagnose(Window([first, last]), PATIENT)
        self.names = [one.name for one in self.diagnosis.findings]

    def change(self, name: str) -> str:
        return next(one.change for one in self.diagnosis.findings if one.name == name)


async def broken(asked: Received, wire: Wire) -> None:
    await wire.json({"error": {"message": "no", "type": "t", "param": None, "code": "x"}}, 500)


async def test_a_gateway_in_good_health_measures_the_door_too() -> None:
    def examine() -> list[str]:
        with gateway_node() as node, ward(node.url, ended=4) as examined:
            assert {node.chat(max_tokens=10, stream=True).status for _ in range(4)} == {200}
        assert examined.mean_s("door") is not None
        assert examined.mean_s("stream") is not None
        return examined.names

    assert await asyncio.to_thread(examine) == []


async def test_a_key_that_retries_without_waiting_is_named() -> None:
    async with (
        FakeBackend() as backend,
        gateway_world(vllm_entry("a", backend), models=[model_of("chat", "a")]) as world,
    ):
        boss = await world.key(is_admin=True)
        calm = await world.key(tenant="calm")
        wild = await world.key(tenant="wild", limits=FEW)
        look = Look(world, boss)
        async with look.around():
            assert (await world.chat(key=calm)).status == 200
            statuses = [(await world.chat(key=wild)).status for _ in range(40)]
            assert statuses.count(429) >= 20
    (storm,) = [name for name in look.names if name.startswith("retry storm from key ")]
    key_id = storm.removeprefix("retry storm from key ")
    assert key_id in wild
    assert f"kvota keys limits {key_id}" in look.change(storm)
    assert "refusing: rate_limit_requests" in look.names
    assert not look.diagnosis.is_partly_hidden
    finding = next(one for one in look.diagnosis.findings if one.name == storm)
    assert "tenant wild" in finding.said


async def test_without_an_operators_key_nobody_is_named() -> None:
    async with (
        FakeBackend() as backend,
        gateway_world(vllm_entry("a", backend), models=[model_of("chat", "a")]) as world,
    ):
        wild = await world.key(tenant="wild", limits=FEW)
        look = Look(world, wild)
        async with look.around():
            for _ in range(40):
                await world.chat(key=wild)
    assert "retry storm, or far too much load" in look.names
    assert "wild" not in str(look.diagnosis)
    assert look.diagnosis.is_partly_hidden


async def test_an_open_breaker_is_told_with_what_its_backend_answered() -> None:
    async with (
        FakeBackend() as backend,
        gateway_world(vllm_entry("gpu-1", backend), models=[model_of("chat", "gpu-1")]) as world,
    ):
        key = await world.key()
        look = Look(world, None)
        async with look.around():
            backend.script = broken
            for _ in range(20):
                await world.chat(key=key)
                if await world.metrics('kvota_gateway_breaker_state{backend="gpu-1",state="open"'):
                    break
    assert look.names[0] == "breaker open: gpu-1"
    assert "error" in look.diagnosis.findings[0].said


async def test_a_backend_that_is_gone_is_told() -> None:
    async with (
        FakeBackend() as backend,
        FakeBackend() as other,
        gateway_world(
            vllm_entry("gpu-1", backend),
            vllm_entry("gpu-2", other),
            models=[model_of("chat", "gpu-1", "gpu-2")],
        ) as world,
    ):
        look = Look(world, None)
        async with look.around(), asyncio.timeout(60):
            other.gauges.is_healthy = False
            for pause_s in repeat(0.02):
                if not await world.metrics('kvota_gateway_backend_healthy{backend="gpu-2"'):
                    break
                await asyncio.sleep(pause_s)
    assert look.names == ["backend down: gpu-2"]


def test_a_node_that_is_killed_and_comes_back_is_told() -> None:
    with light_serve() as server:
        pid = server.node_pid
        with ward(server.url) as examined:
            os.kill(pid, signal.SIGKILL)
            until(lambda: _starts(server.url) == 2, "the node to start again")
    found = examined.the("node restarting")
    assert "exited (1)" in found.said
    assert "memory" in found.change


def _starts(url: str) -> float:
    page = httpx.get(f"{url}/metrics", trust_env=False).text
    lines = [line for line in page.splitlines() if line.startswith("kvota_gateway_node_starts ")]
    return float(lines[0].split()[1])
