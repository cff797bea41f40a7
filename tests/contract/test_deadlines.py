"""Time limits and clients that leave: work ends, blocks come back, somebody is told."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from kvota.core.clock import ManualClock
from tests.support.http_client import CHAT, COMPLETIONS
from tests.support.live_node import MODEL, LiveNode, live_node, until
from tests.support.raw_http import RawPost
from tests.support.stage import Gate, Stage, says
from tests.support.tiny_tokenizer import byte_ids

GENERATED = "kvota_generated_tokens_total"


def ended(node: LiveNode, outcome: str) -> float:
    return node.metrics().get(f"kvota_requests_total{{model=tiny,outcome={outcome}}}", 0.0)


def has_computed(node: LiveNode, beginning: list[int]) -> bool:
    """Whether a prompt that begins so has reached the model."""
    chunks = [chunk for plan in node.stage.plans for chunk in plan.chunks]
    return any(list(chunk.token_ids[: len(beginning)]) == beginning for chunk in chunks)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 0])
@pytest.mark.parametrize("stream", [True, False])
def test_work_stops_when_the_client_leaves(
    node: LiveNode, stream: bool, num_tokens: int, reset: bool
) -> None:
    """C01, C02: after some tokens or while the prompt is read; closed or reset"""
    gone, completed = ended(node, "client_closed"), ended(node, "completed")
    generated = node.metric(GENERATED)
    body = {"model": MODEL, "prompt": [70] * 200, "max_tokens": 800, "stream": stream}
    body |= {"use_prefix_cache": False}
    with node.stage.held() as gate:
        num_prefill = 4  # 200 tokens in steps of 64
        gate.allow(num_prefill + num_tokens - 1 if num_tokens else 2)
        post = RawPost(node.port, COMPLETIONS, body)
        gate.wait_for_step()
        if stream and num_tokens:
            post.read_until(b"data: ")
        assert node.num_blocks_used > 0
        post.leave(node, reset=reset)
    node.wait_idle()
    until(lambda: ended(node, "client_closed") == gone + 1, "the record of it")
    assert ended(node, "completed") == completed
    assert node.metric(GENERATED) <= generated + num_tokens + 1
    assert "Traceback" not in node.log


@pytest.mark.parametrize("fields", [{"prompt": "x", "n": 3}, {"prompt": ["x", "y", "z"]}])
def test_every_choice_of_a_body_stops_when_the_client_leaves(
    node: LiveNode, fields: dict[str, Any]
) -> None:
    """C02"""
    generated = node.metric(GENERATED)
    with node.stage.held() as gate:
        gate.allow(3)
        post = RawPost(node.port, COMPLETIONS, {"model": MODEL, **fields, "max_tokens": 800})
        gate.wait_for_step()
        until(lambda: node.num_open == 3, "all to be accepted")
        post.leave(node)
    node.wait_idle()
    assert node.metric(GENERATED) <= generated + 3 * 4


def test_requests_cut_while_waiting_leave_their_places_and_never_run() -> None:
    """C03"""
    with live_node(max_running_requests=1, max_waiting_queue=3) as node:
        with ThreadPoolExecutor() as pool, node.stage.held() as gate:
            busy = pool.submit(node.complete, "busy", max_tokens=20)
            gate.wait_for_step()
            body = {"model": MODEL, "prompt": [80] * 50}
            cut = [RawPost(node.port, COMPLETIONS, body) for _ in range(3)]
            until(lambda: node.num_open == 4, "the line to be full")
            assert node.complete("one more").status == 503
            for post in reversed(cut):
                post.leave(node)
            gate.allow(2)  # the step under way, and the turn that reads the letters
            until(lambda: node.num_open == 1, "the places to be free")
            new = [pool.submit(node.complete, "new", max_tokens=2) for _ in range(3)]
            until(lambda: node.num_open == 4, "the new ones to be accepted")
            gate.open()
            assert [reply.result().status for reply in (busy, *new)] == [200] * 4
        node.wait_idle()
        assert not has_computed(node, [80, 80]), "a cut one was computed"
        assert ended(node, "client_closed") == 3


def test_who_waits_too_long_in_line_is_told_and_never_run() -> None:
    """C04"""
    clock = ManualClock(50.0)
    with live_node(clock=clock, max_running_requests=1, queue_timeout_s=0.5) as node:
        with ThreadPoolExecutor() as pool, node.stage.held() as gate:
            busy = pool.submit(node.complete, "busy", max_tokens=20)
            gate.wait_for_step()
            late = pool.submit(node.complete, [80] * 50, stream=True)
            until(lambda: node.num_open == 2, "it to wait")
            clock.advance(0.6)
            gate.allow(2)
            reply = late.result()
            assert reply.status == 503
            assert reply.error["code"] == "queue_timeout"
            assert int(reply.headers["retry-after"]) >= 1
            gate.open()
            assert busy.result().status == 200
        node.wait_idle()
        assert not has_computed(node, [80, 80])
        assert node.metrics()["kvota_rejected_total{reason=queue_timeout}"] == 1
        assert ended(node, "queue_timeout") == 1


def test_the_clients_own_deadline_counts() -> None:
    """C07, with the header x-kvota-deadline-s"""
    clock = ManualClock(50.0)
    with live_node(clock=clock) as node:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 50}
        with ThreadPoolExecutor() as pool, node.stage.held() as gate:
            late = pool.submit(node.post, COMPLETIONS, body, x_kvota_deadline_s="2")
            gate.wait_for_step()
            clock.advance(2.1)
            gate.allow(2)
            assert late.result().error["code"] == "request_timeout"
        node.wait_idle()


@pytest.fixture
def stuck() -> Iterator[tuple[LiveNode, ManualClock, Gate]]:
    """The model stalls within a step until the test is over; then another request is served."""
    clock = ManualClock(50.0)
    with live_node(clock=clock, request_timeout_s=5.0, heartbeat_s=60) as node:
        with node.stage.held() as gate:
            yield node, clock, gate
        node.wait_idle()
        until(lambda: ended(node, "request_timeout") == 1, "the record of it")
        assert node.chat("x", max_tokens=3).status == 200


def test_a_stream_of_a_stuck_model_ends_at_its_deadline(
    stuck: tuple[LiveNode, ManualClock, Gate],
) -> None:
    """C07: the answer does not wait for the step"""
    node, clock, gate = stuck
    gate.allow(3)
    with node.stream(CHAT, node.chat_body("x", max_tokens=50)) as stream:
        text = ""
        while len(text) < 3:
            text += stream.next_text()
        clock.advance(5.1)
        [last] = stream.rest()
    assert len(text) == 3
    assert json.loads(last)["error"]["code"] == "request_timeout"


def test_a_stream_that_has_not_begun_at_its_deadline_is_a_504(
    stuck: tuple[LiveNode, ManualClock, Gate],
) -> None:
    """C07"""
    node, clock, gate = stuck
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(node.chat, "x", max_tokens=50, stream=True)
        gate.wait_for_step()
        clock.advance(5.1)
        reply = asked.result()
    assert (reply.status, reply.error["code"]) == (504, "request_timeout")


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_a_body_of_a_stuck_model_is_a_504_at_its_deadline(prompt: Any) -> None:
    """C07"""
    with live_node(request_timeout_s=0.3) as node:
        num_tasks = node.num_tasks()
        with node.stage.held() as gate:
            gate.allow(3)
            reply = node.complete(prompt, max_tokens=50)
            assert (reply.status, reply.error["code"]) == (504, "request_timeout")
            assert reply.error["type"] == "timeout_error"
            until(lambda: node.num_tasks() <= num_tasks + 1, "its tasks to be gone")
        node.wait_idle()
        assert node.complete("x", max_tokens=3).status == 200


def test_a_stuck_model_is_not_ready_and_an_idle_one_is() -> None:
    """E02, without the gateway"""
    clock = ManualClock(50.0)
    with live_node(clock=clock, stuck_after_s=5) as node:
        clock.advance(100)
        assert node.get("/ready").status == 200
        with ThreadPoolExecutor() as pool, node.stage.held() as gate:
            running = pool.submit(node.complete, "x", max_tokens=3)
            gate.wait_for_step()
            clock.advance(4)
            assert node.get("/ready").status == 200
            clock.advance(2)
            assert node.get("/ready").status == 503
            assert node.get("/health").status == 200
            gate.open()
            assert running.result().status == 200
        assert node.get("/ready").status == 200


def test_a_client_that_retries_after_its_timeout_runs_one_copy_at_a_time() -> None:
    """C06"""
    with live_node() as node:
        node.stage.step_s = 0.01
        client = openai.OpenAI(
            base_url=f"{node.url}/v1", api_key="none", timeout=1.0, max_retries=1
        )
        with client, pytest.raises(openai.APITimeoutError):
            client.completions.create(model=MODEL, prompt="x", max_tokens=400)
        node.wait_idle()
        assert max(len(plan.chunks) for plan in node.stage.plans) == 1
        until(lambda: ended(node, "client_closed") == 2, "the records of both")
        assert node.metric(GENERATED) < 1.5 * 400


def test_refused_failed_and_cut_requests_leave_no_block_behind() -> None:
    """D04"""
    stop, poison = "!", byte_ids("~")
    with live_node(Stage(num_blocks=64), max_num_batched_tokens=64) as node:
        node.stage.poison = frozenset(poison)
        for turn in range(25):
            assert node.complete([70] * 2000).status == 400
            with node.stream(COMPLETIONS, {"prompt": [70 + turn] * 100, "max_tokens": 500}):
                pass  # the connection closes as the block ends
            node.stage.play = says("ab!c")
            assert node.complete("s", stop=stop).finish() == "stop"
            node.stage.play = says("ab~c")
            assert node.complete("f", max_tokens=9).status == 502
            node.stage.play = says("ok")
            assert node.complete("n").status == 200
        node.wait_idle()
        assert node.metrics()["kvota_kv_blocks{state=used}"] == 0
        assert node.metrics()["kvota_kv_blocks_held_after_abort"] == 0
        node.stage.reset()
        whole = node.complete([70] * 1000, max_tokens=24)  # every block that there is
        assert (whole.status, whole.usage["total_tokens"]) == (200, 1024)
