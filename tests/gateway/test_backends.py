"""A backend's probes, and what its breaker makes of them, under a clock that the test moves."""

import io
from random import Random

import pytest

from kvota.core.clock import ManualClock, SystemClock
from kvota.edge.settings import EdgeSettings
from kvota.gateway.backends import Backend, Registry, new_backend, upstream_settings
from kvota.gateway.policy.breaker import State
from kvota.gateway.settings import BackendEntry
from kvota.gateway.upstream.connection import Upstream
from kvota.gateway.upstream.kinds import BackendKind
from kvota.telemetry.log import new_log
from tests.support.fake_backend import FakeBackend, never_answers
from tests.support.gateway_world import gateway_world, vllm_entry


def backend_at(fake: FakeBackend, clock: ManualClock) -> Backend:
    entry = vllm_entry("a", fake)
    return new_backend(entry, Upstream(upstream_settings(entry, {}), clock), clock, Random(1))


def trip(backend: Backend, now: float) -> None:
    """As requests that find nobody do."""
    while (permit := backend.breaker.may_pass(now)) is not None:
        backend.breaker.report(permit, False, now)


async def test_the_breaker_lets_probes_out_as_soon_as_the_backend_is_well_again() -> None:
    clock = ManualClock(100.0)
    async with FakeBackend() as fake:
        backend = backend_at(fake, clock)
        await backend.look()
        for _ in range(6):  # fails whenever it is tried, so that it is left alone for long
            trip(backend, clock.now())
            clock.advance(backend.breaker.retry_after_s(clock.now()))
        trip(backend, clock.now())
        assert backend.breaker.retry_after_s(clock.now()) > 20
        fake.gauges.is_healthy = False
        await backend.look()
        clock.advance(2.0)
        assert backend.breaker.retry_after_s(clock.now()) > 20, "no better while it is away"
        fake.gauges.is_healthy = True
        await backend.look()
        assert backend.breaker.state(clock.now()) is State.HALF_OPEN
        assert backend.replica(clock.now()).can_pass
        await backend.close()


async def test_a_good_health_page_alone_does_not_shorten_the_open_time() -> None:
    clock = ManualClock(100.0)
    async with FakeBackend() as fake:
        backend = backend_at(fake, clock)
        await backend.look()
        trip(backend, clock.now())
        left_s = backend.breaker.retry_after_s(clock.now())
        for _ in range(3):
            await backend.look()
        assert backend.breaker.retry_after_s(clock.now()) == left_s
        await backend.close()


async def test_the_desk_of_a_foreign_backend_keeps_the_limits_of_every_request() -> None:
    edge = EdgeSettings(queue_timeout_s=120.0, request_timeout_s=600.0)
    async with (
        FakeBackend() as backend,
        gateway_world(vllm_entry("a", backend), edge=edge) as world,
    ):
        a = world.parts.registry["a"]
        for desk in (a.desk, a.embedding_desk):
            assert desk is not None
            limits = desk.settings
            assert (limits.queue_timeout_s, limits.request_timeout_s) == (120.0, 600.0)


async def test_a_probe_that_answers_as_long_as_a_request_may_is_not_taken_for_silent() -> None:
    edge = EdgeSettings(request_timeout_s=600.0)
    clock = ManualClock(0.0)
    async with FakeBackend() as one:
        registry = Registry(clock, Random(1), new_log(io.StringIO()), limits=edge)
        registry.adopt(registry.build([vllm_entry("a", one)], environment={}))
        breaker = registry["a"].breaker
        breaker.hold(1.0, 0.0)
        assert breaker.may_pass(2.0) is not None
        assert breaker.state(602.0) is State.HALF_OPEN
        assert breaker.state(613.0) is State.OPEN
        await registry.close()


async def test_who_takes_long_to_say_how_it_is_keeps_nobody_from_being_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvota.gateway.backends.LOOK_AT_ALL_S", 0.5)
    log = io.StringIO()
    registry = Registry(SystemClock(), Random(1), new_log(log))
    async with FakeBackend() as slow, FakeBackend() as other:
        slow.overrides["/health"] = never_answers
        patient = BackendEntry(name="slow", url=slow.url, kind=BackendKind.SGLANG)
        registry.adopt(registry.build([patient, vllm_entry("other", other)], environment={}))
        for _ in range(3):
            await registry.probe_all()
        asked = [one.path for one in slow.received]
        assert asked.count("/health") == 1
        assert [one.path for one in other.received].count("/health") == 3
        assert registry["slow"].state.is_healthy, "a long prompt may be at work"
        await registry.close()
