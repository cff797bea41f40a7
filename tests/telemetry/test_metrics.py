from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvota.core.errors import Outcome
from kvota.telemetry.metrics import DeskGauges, EngineGauges, Metrics


@dataclass(frozen=True, kw_only=True)
class Finished:
    model: str = "tiny"
    outcome: Outcome = Outcome.COMPLETED
    code: str | None = None
    read_tokens: int = 10
    cached_tokens: int = 4
    output_tokens: int = 3
    kv_block_s: float = 0.0
    queued_s: float | None = 0.1
    first_token_s: float | None = 0.3
    decode_s: float | None = 0.06
    time_per_output_token_s: float | None = 0.02
    total_s: float = 0.4


GAUGES = EngineGauges(
    num_blocks=10,
    num_blocks_free=3,
    num_blocks_cached=2,
    num_blocks_used=5,
    kv_touched_bytes=7_340_032,
    block_size=32,
    num_running=4,
    num_waiting=1,
)


DESK = DeskGauges(
    running={"short": 4, "long": 1},
    waiting={("short", "interactive"): 6, ("long", "batch"): 0},
    num_waiting=6,
    num_blocks_held_after_end=0,
    limits={"max_running_requests": 8, "queue_timeout_s": 30.0},
)


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample of the page as `name{label="value",…}` → value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def page(*requests: Finished) -> dict[str, float]:
    metrics = Metrics(model="tiny", gauges=lambda: GAUGES, desk=lambda: DESK)
    for request in requests:
        metrics.observe_request(request)
    return samples(metrics)


def test_gauges_are_what_the_engine_says_at_the_scrape() -> None:
    found = page()
    assert found["kvota_kv_cache_usage_ratio"] == 0.5
    assert found['kvota_kv_blocks{state="free"}'] == 3
    assert found['kvota_kv_blocks{state="cached"}'] == 2
    assert found['kvota_kv_blocks{state="used"}'] == 5
    assert found["kvota_kv_touched_bytes"] == 7_340_032
    assert found["kvota_kv_blocks_held_after_abort"] == 0
    assert found['kvota_requests_running{lane="short"}'] == 4
    assert found['kvota_requests_running{lane="long"}'] == 1
    assert found['kvota_requests_waiting{band="interactive",lane="short"}'] == 6


def test_other_schedulers_find_the_names_they_know() -> None:
    found = page()
    assert found['vllm:num_requests_running{model_name="tiny"}'] == 4
    assert found['vllm:num_requests_waiting{model_name="tiny"}'] == 7
    assert found['vllm:kv_cache_usage_perc{model_name="tiny"}'] == 0.5
    assert found['vllm:cache_config_info{block_size="32",num_gpu_blocks="10"}'] == 1


def test_requests_are_counted_by_outcome_and_refusals_by_reason() -> None:
    refused = Finished(
        outcome=Outcome.REFUSED,
        code="queue_full",
        queued_s=None,
        first_token_s=None,
        decode_s=None,
        time_per_output_token_s=None,
        read_tokens=0,
        cached_tokens=0,
        output_tokens=0,
    )
    found = page(Finished(), Finished(), refused)
    assert found['kvota_requests_total{model="tiny",outcome="completed"}'] == 2
    assert found['kvota_requests_total{model="tiny",outcome="refused"}'] == 1
    assert found['kvota_rejected_total{reason="queue_full"}'] == 1
    assert found["kvota_prompt_tokens_total"] == 20
    assert found["kvota_prefix_hit_tokens_total"] == 8
    assert found["kvota_output_tokens_total"] == 6


def test_only_requests_with_a_first_token_have_a_time_to_it() -> None:
    cancelled = Finished(
        outcome=Outcome.CLIENT_CLOSED,
        code="client_closed",
        first_token_s=None,
        decode_s=None,
        time_per_output_token_s=None,
    )
    slow = Finished(first_token_s=15.0, total_s=16.0)
    found = page(Finished(), cancelled, slow)
    name = "kvota_time_to_first_token_seconds"
    assert found[f"{name}_count"] == 2
    assert found[f"{name}_sum"] == 15.3
    assert found[f'{name}_bucket{{le="0.1"}}'] == 0
    assert found[f'{name}_bucket{{le="20.0"}}'] == 2
    assert found["kvota_request_queue_seconds_count"] == 3


def test_steps_are_observed_with_the_engines_own_share_apart() -> None:
    metrics = Metrics(model="tiny", gauges=EngineGauges, desk=lambda: DESK)
    metrics.observe_step(
        executor_s=0.2,
        overhead_s=0.001,
        num_sequences=8,
        num_prefilled=64,
        num_sampled=7,
        num_speculated=5,
        num_speculated_right=3,
        num_preemptions=1,
    )
    found = samples(metrics)
    assert found["kvota_step_seconds_sum"] == 0.2
    assert found["kvota_scheduler_seconds_sum"] == 0.001
    assert found["kvota_step_batch_size_sum"] == 8
    assert found["kvota_prefill_tokens_total"] == 64
    assert found["kvota_generated_tokens_total"] == 7
    assert found["kvota_speculated_tokens_total"] == 5
    assert found["kvota_speculated_tokens_accepted_total"] == 3
    assert found["kvota_preemptions_total"] == 1


def test_predictions_are_judged_by_how_far_off_they_were() -> None:
    metrics = Metrics(model="tiny", gauges=lambda: GAUGES, desk=lambda: DESK)
    metrics.forecast_judged(100.0, 130)
    metrics.wait_judged(5.0, 3.0)
    metrics.retry_judged(2.0, 10.0)
    found = samples(metrics)
    assert found["kvota_forecast_error_tokens_sum"] == 30
    assert found["kvota_eta_error_seconds_sum"] == 2
    assert found["kvota_retry_after_error_seconds_sum"] == 8


def test_the_memory_of_all_requests_adds_up() -> None:
    found = page(Finished(kv_block_s=2.5), Finished(outcome=Outcome.CLIENT_CLOSED, kv_block_s=0.5))
    assert found["kvota_kv_block_seconds_total"] == 3.0


def test_pauses_are_counted_and_repeated_ones_apart() -> None:
    metrics = Metrics(model="tiny", gauges=lambda: GAUGES, desk=lambda: DESK)
    for is_repeated in (False, False, True):
        metrics.lease_paused(is_repeated=is_repeated)
    found = samples(metrics)
    assert found["kvota_pauses_total"] == 3
    assert found["kvota_repeated_pauses_total"] == 1


def test_no_series_says_when_another_began() -> None:
    """Prometheus does not use them, and each counter and histogram would cost one more."""
    metrics = Metrics(model="tiny", gauges=lambda: GAUGES, desk=lambda: DESK)
    metrics.observe_request(Finished())
    assert b"_created" not in metrics.render()


def test_a_whole_request_is_its_first_token_its_decoding_and_its_writing() -> None:
    found = page(Finished(first_token_s=0.3, decode_s=0.06, total_s=0.4))
    assert found["kvota_decode_seconds_sum"] == pytest.approx(0.06)
    assert found["kvota_stream_seconds_sum"] == pytest.approx(0.04)
    parts = ("time_to_first_token", "decode", "stream")
    whole = sum(found[f"kvota_{part}_seconds_sum"] for part in parts)
    assert whole == pytest.approx(found["kvota_request_seconds_sum"])


def test_a_request_without_a_token_neither_decodes_nor_streams() -> None:
    found = page(Finished(queued_s=None, first_token_s=None, decode_s=None))
    assert found["kvota_decode_seconds_count"] == found["kvota_stream_seconds_count"] == 0


def test_the_limits_of_the_desk_are_on_the_page() -> None:
    found = page()
    assert found['kvota_desk_limit{setting="max_running_requests"}'] == 8
    assert found['kvota_desk_limit{setting="queue_timeout_s"}'] == 30
