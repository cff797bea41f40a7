"""The workbench bounds how much work waits and how long anybody waits for it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from kvota.core.errors import InvalidRequest, Refusal, Refused
from kvota.node.settings import HttpSettings
from kvota.node.workbench import BODY_BYTES_MIN, Workbench

SOON_S = 0.02


@pytest.fixture
async def gate() -> AsyncIterator[threading.Event]:
    """Jobs that wait for it end at the latest with the test."""
    event = threading.Event()
    yield event
    event.set()


async def run(
    bench: Workbench, job: Callable[[], object], limit_s: float = 30.0, num_bytes: int = 0
) -> object:
    seat = bench.seat(num_bytes)
    return await seat.run(job, limit_s=limit_s, what="rendering", param="messages")


async def test_results_and_exceptions_come_back_from_another_thread() -> None:
    bench = Workbench(1, 4 * BODY_BYTES_MIN)
    assert await run(bench, threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await run(bench, lambda: 1 // 0)
    bench.close()


async def test_a_job_over_its_limit_is_the_requests_fault(gate: threading.Event) -> None:
    bench = Workbench(1, 4 * BODY_BYTES_MIN)
    with pytest.raises(InvalidRequest, match="rendering took longer") as caught:
        await run(bench, gate.wait, limit_s=SOON_S)
    assert caught.value.param == "messages"


async def test_a_job_that_never_began_is_not_the_requests_fault(gate: threading.Event) -> None:
    bench = Workbench(1, 4 * BODY_BYTES_MIN)
    first = asyncio.create_task(run(bench, gate.wait))
    await asyncio.sleep(0)
    with pytest.raises(Refused) as caught:
        await run(bench, gate.wait, limit_s=SOON_S)
    assert caught.value.reason is Refusal.QUEUE_FULL
    gate.set()
    await first


async def test_a_burst_of_small_requests_waits_and_large_ones_are_few(
    gate: threading.Event,
) -> None:
    bench = Workbench(1, HttpSettings().waiting_body_bytes_max)
    small = [asyncio.create_task(run(bench, gate.wait)) for _ in range(1_000)]
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="1000 prompts are being prepared"):
        await run(bench, gate.wait, num_bytes=50 * 2**20)
    gate.set()
    await asyncio.gather(*small)
    assert await run(bench, lambda: "done", num_bytes=2**30) == "done", "one alone never waits"
    bench.close()


async def test_one_job_too_many_is_refused_and_ended_ones_make_room(gate: threading.Event) -> None:
    bench = Workbench(1, 2 * BODY_BYTES_MIN)
    waiting = [asyncio.create_task(run(bench, gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Refused):
        await run(bench, gate.wait)
    gate.set()
    await asyncio.gather(*waiting)
    assert await run(bench, lambda: "done") == "done"
