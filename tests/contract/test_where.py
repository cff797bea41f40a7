"""Where is my request, and away with it: a whole node on a real port."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvota.core.clock import ManualClock
from tests.support.http_client import COMPLETIONS, Reply
from tests.support.live_node import LiveNode, live_node, until

LONG = {"max_tokens": 900, "ignore_eos": True}
STEP_S = 0.02  # so that a long one lasts until it is cancelled, also beside a busy test


def listed(node: LiveNode, path: str = "/v1/requests") -> dict[str, Any]:
    """The live requests by the names that their clients gave them."""
    return {shown["client_id"]: shown for shown in node.get(path).json["data"]}


def phase_of(node: LiveNode, name: str) -> str | None:
    """None when the node does not know the request."""
    phase: str | None = listed(node).get(name, {}).get("phase")
    return phase


def asked(node: LiveNode, pool: ThreadPoolExecutor, name: str, **fields: Any) -> Future[Reply]:
    body = {"model": node.model, "prompt": "a secret question", **LONG, **fields}
    return pool.submit(node.post, COMPLETIONS, body, x_request_id=name)


def test_a_request_is_seen_in_line_then_at_work_then_no_more() -> None:
    with live_node(max_running_requests=1) as node, ThreadPoolExecutor() as pool:
        node.stage.step_s = STEP_S
        first = asked(node, pool, "first")
        until(lambda: phase_of(node, "first") == "decode", "the first to decode")
        second = asked(node, pool, "second")
        until(lambda: phase_of(node, "second") == "queued", "the second to wait")
        shown = listed(node, "/admin/requests")
        assert shown["second"]["position"] == 1
        assert shown["second"]["why"]
        assert shown["second"]["kv_blocks"] == 0
        assert shown["first"]["kv_blocks"] > 0
        assert shown["first"]["computed_tokens"] >= shown["first"]["prompt_tokens"]
        assert b"secret" not in node.get("/admin/requests").content
        assert node.http.delete("/v1/requests/second").status_code == 200
        reply = second.result()
        assert (reply.status, reply.error["code"]) == (410, "request_cancelled")
        assert reply.headers["x-should-retry"] == "false"
        assert node.http.delete("/v1/requests/first").json()["num_cancelled"] == 1
        assert first.result().status == 410
        node.wait_idle()
        assert listed(node) == {}
        assert node.http.delete("/v1/requests/first").status_code == 404


def test_a_stream_in_line_is_told_its_place() -> None:
    with (
        live_node(max_running_requests=1, heartbeat_s=0.05) as node,
        ThreadPoolExecutor() as pool,
    ):
        node.stage.step_s = STEP_S
        first = asked(node, pool, "first")
        until(lambda: phase_of(node, "first") == "decode", "the first to decode")
        with node.stream(COMPLETIONS, {"prompt": "b", "max_tokens": 2}) as stream:
            assert stream.next_line().startswith(": queued position=1")
            assert node.http.delete("/v1/requests/first").status_code == 200
            assert stream.rest()[-1] == "[DONE]"
        assert first.result().status == 410


def test_a_cancelled_stream_ends_with_an_error_event_and_frees_its_blocks() -> None:
    with live_node() as node:
        node.stage.step_s = STEP_S
        with node.stream(COMPLETIONS, {"prompt": "b", **LONG}, x_request_id="mine") as stream:
            stream.next_text()
            assert node.http.delete("/admin/requests/mine").status_code == 200
            assert '"request_cancelled"' in stream.rest()[-1]
        node.wait_idle()
        assert node.metric("kvota_kv_blocks_held_after_abort") == 0


def test_a_node_that_is_stuck_says_once_where_and_once_that_it_moves_again() -> None:
    clock = ManualClock(50.0)
    with live_node(clock=clock, stuck_after_s=5.0) as node, ThreadPoolExecutor() as pool:
        with node.stage.held() as gate:
            asking = asked(node, pool, "mine", max_tokens=3)
            gate.wait_for_step()
            clock.advance(6.0)
            assert node.get("/ready").status == 503
            assert node.get("/ready").error["code"] == "engine_restarting"
            until(lambda: "engine stuck" in node.log, "the log to hear of it")
        assert asking.result().status == 200
        until(lambda: node.get("/ready").status == 200, "it to be ready again")
        until(lambda: "engine moves" in node.log, "the log to hear of it")
    lines = [json.loads(line) for line in node.log.splitlines()]
    [stuck] = [line for line in lines if line["event"] == "engine stuck"]
    assert (stuck["running"], stuck["waiting"]) == (1, 0)
    assert stuck["seconds_without_step"] >= 5
    assert [line["event"] for line in lines].count("engine moves") == 1
