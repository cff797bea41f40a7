"""What an operator is told of a live node: every metric of its promise, and a line per request."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvota.core.clock import ManualClock
from tests.support.http_client import COMPLETIONS
from tests.support.live_node import MODEL, LiveNode, live_node, until

COUNTERS = {
    "kvota_requests_total", "kvota_rejected_total", "kvota_prompt_tokens_total",
    "kvota_output_tokens_total", "kvota_prefix_hit_tokens_total", "kvota_preemptions_total",
    "kvota_pauses_total", "kvota_repeated_pauses_total", "kvota_kv_block_seconds_total",
}  # fmt: skip
GAUGES = {
    "kvota_kv_cache_usage_ratio", "kvota_kv_blocks", "kvota_kv_blocks_held_after_abort",
    "kvota_requests_running", "kvota_requests_waiting", "vllm:num_requests_waiting",
    "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
    "kvota_desk_limit",
}  # fmt: skip
HISTOGRAMS = {
    "kvota_request_queue_seconds", "kvota_time_to_first_token_seconds",
    "kvota_time_per_output_token_seconds", "kvota_request_seconds", "kvota_step_seconds",
    "kvota_step_batch_size", "kvota_scheduler_seconds", "kvota_forecast_error_tokens",
    "kvota_retry_after_error_seconds", "kvota_eta_error_seconds", "kvota_decode_seconds",
    "kvota_stream_seconds",
}  # fmt: skip
LABELS = {
    "kvota_kv_blocks": {"state=free", "state=cached", "state=used"},
    "kvota_requests_running": {"lane=short", "lane=long"},
    "kvota_requests_waiting": {
        f"band={band},lane={lane}"
        for band in ("interactive", "batch")
        for lane in ("short", "long")
    },
}
LINE_FIELDS = {
    "event", "level", "timestamp", "request_id", "endpoint", "model", "tenant", "lane", "band",
    "outcome", "status", "streamed", "num_choices", "prompt_tokens", "read_tokens", "cached_tokens",
    "output_tokens", "num_preemptions", "kv_block_s", "door_s", "queued_s",
    "first_token_s", "decode_s", "time_per_output_token_s", "total_s",
}  # fmt: skip
SECRET = "wxyzq"


def lines(node: LiveNode) -> list[dict[str, Any]]:
    """The log's lines about requests, oldest first."""
    return [line for line in map(json.loads, node.log.splitlines()) if line["event"] == "request"]


def fill_line(node: LiveNode, pool: ThreadPoolExecutor) -> list[Any]:
    """One request runs, one waits, and the line is full."""
    first = pool.submit(node.complete, "a", max_tokens=2)
    until(lambda: node.num_open == 1, "the first to be let in")
    second = pool.submit(node.complete, "b", max_tokens=2)
    until(lambda: node.num_open == 2, "the second to wait")
    return [first, second]


def test_every_metric_of_the_promise_is_there_and_none_names_who_asked() -> None:
    with live_node(max_running_requests=1, max_waiting_queue=1) as node:
        with ThreadPoolExecutor() as pool, node.stage.held() as gate:
            let_in = fill_line(node, pool)
            refused = node.post(
                COMPLETIONS, {"model": MODEL, "prompt": SECRET}, x_request_id=f"id-{SECRET}"
            )
            assert (refused.status, refused.error["code"]) == (503, "queue_full")
            gate.open()
            assert [one.result().status for one in let_in] == [200, 200]
        node.wait_idle()
        until(lambda: len(lines(node)) == 3, "the records")
        found = node.metrics()
    names = {name.partition("{")[0] for name in found}
    assert names >= COUNTERS | GAUGES
    assert {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")} <= names
    for name, labels in LABELS.items():
        assert {f"{name}{{{label}}}" for label in labels} <= set(found)
    assert found["kvota_rejected_total{reason=queue_full}"] == 1
    assert found[f"kvota_requests_total{{model={MODEL},outcome=completed}}"] == 2
    assert not any(SECRET in name for name in found)


def test_a_place_promised_to_a_refused_client_is_judged_when_it_has_become_free() -> None:
    """kvota_retry_after_error_seconds: told at the refusal, against when the place was free"""
    clock = ManualClock(50.0)
    name = "kvota_retry_after_error_seconds"
    with live_node(clock=clock, max_running_requests=1, max_waiting_queue=1) as node:
        with ThreadPoolExecutor() as pool, node.stage.held() as gate:
            let_in = fill_line(node, pool)
            refused = node.complete("c")
            told_s = int(refused.headers["retry-after"])
            assert 1 <= told_s <= 120
            assert node.metric(f"{name}_count") == 0
            clock.advance(11.0)
            gate.open()
            assert [one.result().status for one in let_in] == [200, 200]
        node.wait_idle()
        assert node.metric(f"{name}_count") == 1
        jitter = 0.2
        unspread_s = 11.0 - node.metric(f"{name}_sum")
        assert told_s - 1 <= unspread_s * (1 + jitter)
        assert told_s >= unspread_s * (1 - jitter)


@pytest.mark.parametrize("band", ["interactive", "batch"])
def test_a_finished_request_is_one_line_with_all_that_it_took(band: str) -> None:
    clock = ManualClock(50.0)
    with live_node(clock=clock) as node:
        body = {"model": MODEL, "prompt": SECRET, "max_tokens": 3}
        with ThreadPoolExecutor() as pool, node.stage.held() as gate:
            asked = pool.submit(
                node.post, COMPLETIONS, body, x_request_id="mine", x_kvota_priority=band
            )
            for _ in range(3):
                gate.wait_for_step()
                clock.advance(0.5)
                gate.allow(1)
            reply = asked.result()
        assert reply.status == 200
        assert reply.headers["x-kvota-request-id"] == "mine"
        assert reply.headers["x-kvota-queue-ms"] == "0"
        assert reply.headers["x-kvota-cached-tokens"] == "0"
        until(lambda: len(lines(node)) == 1, "the record")
        [line] = lines(node)
        assert node.metric("kvota_kv_block_seconds_total") == pytest.approx(1.5)
        assert SECRET not in node.log
    assert set(line) == LINE_FIELDS
    assert (line["request_id"], line["model"], line["tenant"]) == ("mine", MODEL, "anonymous")
    assert (line["lane"], line["band"], line["outcome"]) == ("short", band, "completed")
    assert (line["prompt_tokens"], line["output_tokens"]) == (len(SECRET), 3)
    assert (line["door_s"], line["queued_s"], line["first_token_s"]) == (0.0, 0.0, 0.5)
    assert line["decode_s"] == 1.0
    assert line["time_per_output_token_s"] == 0.5
    assert line["kv_block_s"] == pytest.approx(1.5), "one block for three steps"


def test_requests_that_got_nowhere_have_their_line_too() -> None:
    with live_node() as node:
        body = {"model": MODEL, "prompt": "x"}
        for header in ("x_kvota_priority", "x_kvota_deadline_s"):
            reply = node.post(COMPLETIONS, body, **{header: "soon"})
            assert (reply.status, reply.error["param"]) == (400, header.replace("_", "-"))
        assert node.post(COMPLETIONS, {**body, "max_tokens": -1}).status == 400
        until(lambda: len(lines(node)) == 3, "the records")
        found = [(line["outcome"], line["band"], line["kv_block_s"]) for line in lines(node)]
    assert found == [
        ("invalid", "unknown", 0.0), ("invalid", "unknown", 0.0), ("invalid", "interactive", 0.0),
    ]  # fmt: skip
