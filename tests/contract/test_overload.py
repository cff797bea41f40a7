"""More work than fits: who is let in, who is told to come back, and that all the others go on."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kvota.core.clock import ManualClock
from kvota.core.plan import StepPlan
from tests.support.http_client import CHAT, COMPLETIONS, Reply, joined_text
from tests.support.live_node import LiveNode, live_node, staged_model, until
from tests.support.raw_http import RawPost
from tests.support.stage import Stage


@pytest.fixture
def narrow_node() -> Iterator[LiveNode]:
    """One choice runs, two may wait, for as long as a test holds the first one up."""
    with live_node(
        max_running_requests=1, max_waiting_queue=2, queue_timeout_s=900.0, request_timeout_s=900.0
    ) as node:
        yield node
        node.wait_idle()


def refused(reply: Reply) -> dict[str, Any]:
    assert reply.status == 503, reply.content
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.headers["x-should-retry"] == "true"
    assert reply.error["code"] == "queue_full"
    assert reply.error["type"] == "overloaded_error"
    return reply.error


def test_the_line_is_bounded_and_whoever_was_let_in_is_served(narrow_node: LiveNode) -> None:
    """B01, B03: ten at once, room for three"""
    node = narrow_node
    with ThreadPoolExecutor(10) as pool, node.stage.held() as gate:
        sent = [pool.submit(node.chat, str(i), max_tokens=3, stream=i % 2 == 0) for i in range(10)]
        until(lambda: sum(f.done() for f in sent) == 7, "seven refusals while nothing moves")
        gate.open()
        replies = [future.result() for future in sent]
    turned_away = [reply for reply in replies if reply.status != 200]
    assert len(turned_away) == 7
    for reply in turned_away:
        refused(reply)
    assert all(reply.finish() == "length" for reply in replies if reply.status == 200)
    assert node.metrics()["kvota_rejected_total{reason=queue_full}"] == 7
    assert "Traceback" not in node.log


def test_each_choice_takes_a_place(narrow_node: LiveNode) -> None:
    """B01: three prompts are three places; four are more than there are, and none of them runs"""
    node = narrow_node
    assert node.complete(["a", "b", "c"], max_tokens=2).status == 200
    refused(node.complete(["a", "b", "c", "d"], max_tokens=2))
    until(lambda: node.num_open == 0, "the places to come back")
    assert node.complete(["a", "b", "c"], max_tokens=2).status == 200


def test_n_is_bounded_by_what_can_run_at_once() -> None:
    """B01, B03: n=3 takes three places, and more than can ever run is the client's mistake"""
    with live_node(max_running_requests=3, max_waiting_queue=1) as node:
        with ThreadPoolExecutor() as pool, node.stage.held() as gate:
            first = pool.submit(node.complete, "x", n=3, max_tokens=2)
            gate.wait_for_step()
            refused(node.complete("y", n=2))
            last = pool.submit(node.complete, "z", max_tokens=2)
            until(lambda: node.num_open == 4, "the last place to be taken")
            refused(node.complete("w"))
            assert node.complete("v", n=4).status == 400
            gate.open()
            assert first.result().status == last.result().status == 200
        node.wait_idle()


def test_a_thousand_refusals_leave_nothing_behind(narrow_node: LiveNode) -> None:
    """B01: memory is watched by tests/contract/test_process.py"""
    node = narrow_node
    with ThreadPoolExecutor(3) as pool, node.stage.held() as gate:
        let_in = [pool.submit(node.chat, "x", max_tokens=2) for _ in range(3)]
        until(lambda: node.num_open == 3, "the node to be full")
        num_tasks = node.num_tasks()
        series = len(node.metrics())
        for _ in range(1000):
            assert node.chat("no", stream=True).status == 503
        assert node.num_tasks() <= num_tasks + 2
        assert len(node.metrics()) <= series + 6
        gate.open()
        assert [future.result().status for future in let_in] == [200] * 3


# --- B02: a long prompt beside others


def test_tokens_flow_and_short_requests_begin_while_a_long_prompt_is_read() -> None:
    """B02: the long prompt is twenty steps long"""
    chunk = 64
    served = staged_model(max_model_len=4096)
    with live_node(Stage(512), served=served, max_num_batched_tokens=chunk) as node:
        with ThreadPoolExecutor() as pool, node.stage.held() as gate:
            gate.allow(3)
            stream = {"prompt": [70] * 10, "max_tokens": 300}
            with node.stream(COMPLETIONS, stream) as running:
                long = pool.submit(node.complete, [80] * 20 * chunk, max_tokens=3)
                until(lambda: node.num_open == 2, "the long prompt to arrive")
                gate.allow(3)
                gate.wait_for_step()
                short = pool.submit(node.complete, [90] * 10, max_tokens=10)
                until(lambda: node.num_open == 3, "the short one to arrive")
                gate.open()
                assert running.rest()[-1] == "[DONE]"
            assert short.result().finish() == long.result().finish() == "length"
        steps = _steps_of(node.stage.plans)
        reading = steps["long"]
        assert len(reading) >= 20
        prefill = range(reading[0], reading[20])
        assert set(prefill) <= set(steps["stream"]), "the stream paused for the long prompt"
        assert steps["short"][0] <= reading[6], "the short request waited for the long prompt"
        assert steps["short"][-1] < reading[-1]
        node.wait_idle()


def _steps_of(plans: list[StepPlan]) -> dict[str, list[int]]:
    """Numbers of the steps in which each of the three had a chunk, told by their prompts."""
    names, steps = {70: "stream", 80: "long", 90: "short"}, dict[str, list[int]]()
    known: dict[int, str] = {}
    for number, plan in enumerate(plans):
        for part in plan.chunks:
            name = known.setdefault(part.sequence_id, names.get(part.token_ids[0], "?"))
            steps.setdefault(name, []).append(number)
    return steps


# --- A19: ids


def test_two_requests_with_one_client_id_do_not_know_each_other(node: LiveNode) -> None:
    """A19"""
    bodies = [node.chat_body(text, max_tokens=10, seed=4) for text in ("first", "second")]
    alone = [node.post(CHAT, body).text() for body in bodies]
    with ThreadPoolExecutor() as pool, node.stage.held() as gate:
        sent: list[Future[Reply]] = [
            pool.submit(node.post, CHAT, {**body, "stream": True}, x_request_id="same")
            for body in bodies
        ]
        until(lambda: node.num_open == 2, "both to run")
        gate.open()
        replies = [future.result() for future in sent]
    assert [reply.text() for reply in replies] == alone
    assert {reply.headers["x-kvota-request-id"] for reply in replies} == {"same"}
    assert len({reply.chunks[0]["id"] for reply in replies}) == 2


def test_a_giant_client_id_is_cut_or_refused(node: LiveNode) -> None:
    """A19"""
    long = node.post(CHAT, node.chat_body(max_tokens=2, stream=True), x_request_id="i" * 5000)
    assert long.status == 200
    assert len(long.headers["x-kvota-request-id"]) == 128
    assert max(map(len, long.events)) < 500
    assert node.post(CHAT, node.chat_body(), x_request_id="i" * 100_000).status == 431


# --- G02, G03: metrics under load


def test_what_clients_choose_makes_no_series(node: LiveNode) -> None:
    """G02"""
    node.post(CHAT, node.chat_body(max_tokens=1) | {"model": "unknown-0"})
    before, page = len(node.metrics()), len(node.get("/metrics").content)
    for i in range(500):
        body = node.chat_body("x", max_tokens=1, user=f"user-{i}") | {"model": f"secret-model-{i}"}
        path = CHAT if i % 2 else f"/v1/path-{i}"
        key = f"Bearer secret-key-{i}"
        assert node.post(path, body, x_request_id=f"id-{i}", authorization=key).status == 404
    assert len(node.metrics()) <= before + 5
    content = node.get("/metrics").content
    assert len(content) <= page + 500
    assert b"secret" not in content
    assert "secret-key" not in node.log


def test_times_to_the_first_token_are_true_and_complete() -> None:
    """G03, on a clock that only the test moves"""
    clock = ManualClock(50.0)
    with (
        live_node(clock=clock, max_running_requests=1, max_waiting_queue=5) as node,
        ThreadPoolExecutor(8) as pool,
    ):
        for i in range(40):
            with node.stage.held() as gate:
                sent = pool.submit(node.chat, max_tokens=2, stream=i % 2 == 0)
                gate.wait_for_step()
                clock.advance(0.3)
            assert sent.result().status == 200
        with node.stage.held() as gate:
            slow = pool.submit(node.chat, max_tokens=2)
            gate.wait_for_step()
            cut = [RawPost(node.port, CHAT, node.chat_body()) for _ in range(5)]
            until(lambda: node.num_open == 6, "the line to be full")
            for _ in range(5):
                refused(node.chat())
            for post in cut:
                post.leave(node)
            clock.advance(15)
        assert slow.result().status == 200
        node.wait_idle()
        name = "kvota_time_to_first_token_seconds"
        until(lambda: node.metric(f"{name}_count") == 41, "the last record")
        found = node.metrics()
        assert found[f"{name}_bucket{{le=0.1}}"] == 0
        assert found[f"{name}_bucket{{le=20.0}}"] == found[f"{name}_count"]
        assert found[f"{name}_sum"] == pytest.approx(40 * 0.3 + 15)
        assert found["kvota_request_seconds_sum"] >= found[f"{name}_sum"] - 1e-9
        assert found["kvota_request_queue_seconds_sum"] == 0, "who leaves the line leaves at once"
        assert found["kvota_rejected_total{reason=queue_full}"] == 5


def test_a_stream_beside_many_others_says_what_it_says_alone(node: LiveNode) -> None:
    """A19, D05: fifty requests on eight places"""
    bodies = [{"prompt": f"request {i}", "max_tokens": 12, "seed": i} for i in range(50)]
    alone = [node.complete(**body).text() for body in bodies]

    def streamed(body: dict[str, Any]) -> str:
        with node.stream(COMPLETIONS, body) as reply:
            return joined_text(reply.rest())

    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(streamed, bodies)) == alone
