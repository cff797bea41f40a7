"""Probes see progress, and the log hears of a standstill once."""

import asyncio
import io
import json

from kvota.node.ports import Phase, Waiting
from kvota.node.readiness import Stall, stall_log
from kvota.telemetry.log import new_log
from tests.support.http import MODEL, Node, make_node

BODY = {"model": MODEL, "prompt": "a"}


async def with_one_running_and_two_waiting() -> Node:
    node = make_node()
    for number in range(3):
        node.caller.begin("POST", "/v1/completions", BODY)
        streams = await node.runner.submitted(number + 1)
        if number:
            streams[number].place = Waiting(position=number, eta_s=None, why="KV memory")
    return node


async def probes(node: Node, num_probes: int) -> set[int]:
    """The statuses of so many probes, once what they set off has been told."""
    statuses = {(await node.get("/ready")).status for _ in range(num_probes)}
    await asyncio.sleep(0)
    return statuses


async def test_a_standstill_is_told_once_with_where_and_for_how_long() -> None:
    node = await with_one_running_and_two_waiting()
    node.runner.stuck, node.runner.last_step_s = True, 58.0
    assert await probes(node, 3) == {503}
    [stall] = node.stalls
    assert (stall.is_over, stall.lasted_s) == (False, 42.0)
    assert stall.phases == {Phase.PREFILL: 1, Phase.QUEUED: 2}
    assert (stall.num_running, stall.num_waiting) == (1, 2)


async def test_its_end_is_told_once_with_how_long_it_was() -> None:
    node = await with_one_running_and_two_waiting()
    node.runner.stuck, node.runner.last_step_s = True, 58.0
    await probes(node, 2)
    node.clock.advance(8.0)
    node.runner.stuck, node.runner.last_step_s = False, 108.0
    assert await probes(node, 3) == {200}
    assert [(stall.is_over, stall.lasted_s) for stall in node.stalls] == [(False, 42), (True, 50)]


async def test_a_second_standstill_is_told_again() -> None:
    node = make_node()
    for stuck in (True, False, True):
        node.runner.stuck = stuck
        await probes(node, 2)
    assert [stall.is_over for stall in node.stalls] == [False, True, False]


async def test_an_engine_that_moves_is_never_spoken_of() -> None:
    node = await with_one_running_and_two_waiting()
    assert await probes(node, 3) == {200}
    assert node.stalls == []


async def test_a_probe_is_answered_before_the_stuck_engine_says_where_its_requests_are() -> None:
    node = make_node()
    node.runner.stuck, node.runner.looks = True, asyncio.Event()
    assert await probes(node, 2) == {503}
    assert node.stalls == []
    node.runner.looks.set()
    await probes(node, 1)
    assert len(node.stalls) == 1


def test_the_log_says_where_the_engine_is_stuck() -> None:
    written = io.StringIO()
    report = stall_log(new_log(written))
    phases = {Phase.QUEUED: 2, Phase.PREFILL: 1, Phase.PAUSED: 1}
    report(Stall(is_over=False, lasted_s=31.25, phases=phases))
    report(Stall(is_over=True, lasted_s=40.0, phases={}))
    stuck, moves = [json.loads(line) for line in written.getvalue().splitlines()]
    assert (stuck["event"], stuck["level"]) == ("engine stuck", "error")
    assert (stuck["seconds_without_step"], stuck["running"], stuck["waiting"]) == (31.2, 1, 3)
    assert (stuck["queued"], stuck["prefill"], stuck["paused"]) == (2, 1, 1)
    assert (moves["event"], moves["level"]) == ("engine moves", "info")
