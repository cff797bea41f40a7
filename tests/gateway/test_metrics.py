"""What a gateway counts of a request that has ended: where it spent its time."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvota.gateway.calls import Call
from kvota.gateway.metrics import GatewayMetrics, Gauges


def call(**known: Any) -> Call:
    return Call(
        **{
            "id": "1",
            "client_id": "mine",
            "endpoint": "chat.completions",
            "arrived_s": 10.0,
            "address": None,
            "ended_s": 14.0,
            **known,
        }
    )


def samples(*calls: Call) -> dict[str, float]:
    metrics = GatewayMetrics(Gauges)
    for one in calls:
        metrics.observe(one)
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        "|".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


def test_an_answered_request_tells_what_door_and_line_took() -> None:
    found = samples(call(sent_s=10.25, queued_s=1.5, first_token_s=12.0))
    assert found["kvota_gateway_door_seconds_sum"] == pytest.approx(0.25)
    assert found["kvota_gateway_queue_seconds_sum"] == pytest.approx(1.5)
    assert found["kvota_gateway_time_to_first_token_seconds_sum"] == pytest.approx(2.0)


def test_a_request_without_an_answer_is_in_none_of_the_times() -> None:
    found = samples(call(), call(sent_s=10.1, queued_s=0.5))
    assert found["kvota_gateway_door_seconds_count"] == 0
    assert found["kvota_gateway_queue_seconds_count"] == 0
