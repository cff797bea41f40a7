"""How servers call what they count. Ours first: a page of kvota has some of vLLM's names as well.

Other servers' names: docs.vllm.ai "Production Metrics"; docs.sglang.ai "Production Metrics".
"""

from typing import Final

FIRST_TOKEN: Final = (
    "kvota_time_to_first_token_seconds",
    "kvota_gateway_time_to_first_token_seconds",
    "vllm:time_to_first_token_seconds",
    "sglang:time_to_first_token_seconds",
)
QUEUE: Final = (
    "kvota_request_queue_seconds",
    "kvota_gateway_queue_seconds",
    "vllm:request_queue_time_seconds",
)
WHOLE: Final = (
    "kvota_request_seconds",
    "kvota_gateway_request_seconds",
    "vllm:e2e_request_latency_seconds",
    "sglang:e2e_request_latency_seconds",
)
DECODE: Final = ("kvota_decode_seconds", "vllm:request_decode_time_seconds")
PER_TOKEN: Final = (
    "kvota_time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
    "sglang:inter_token_latency_seconds",
)
STEP: Final = (
    "kvota_step_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "sglang:inter_token_latency_seconds",
)
BATCH: Final = "kvota_step_batch_size"
RUNNING: Final = (
    "kvota_requests_running",
    "kvota_gateway_backend_requests_running",
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
)
WAITING: Final = (
    "kvota_requests_waiting",
    "kvota_gateway_backend_requests_waiting",
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
)
KV_USAGE: Final = (
    "kvota_kv_cache_usage_ratio",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
)
PROMPT: Final = (
    "kvota_prompt_tokens_total",
    "kvota_gateway_prompt_tokens_total",
    "vllm:prompt_tokens_total",
    "sglang:prompt_tokens_total",
)
OUTPUT: Final = (
    "kvota_output_tokens_total",
    "kvota_gateway_output_tokens_total",
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
)
GENERATED: Final = (
    "kvota_generated_tokens_total",
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
)
PREFILLED: Final = ("kvota_prefill_tokens_total", "vllm:prompt_tokens_total")
HITS: Final = ("kvota_prefix_hit_tokens_total", "vllm:prefix_cache_hits_total")
LOOKED_UP: Final = ("kvota_prompt_tokens_total", "vllm:prefix_cache_queries_total")
PREEMPTIONS: Final = ("kvota_preemptions_total", "vllm:num_preemptions_total")
MEMORY: Final = ("process_resident_memory_bytes",)
ENDED: Final = (
    "kvota_gateway_requests_total",
    "kvota_requests_total",
    "vllm:request_success_total",
    "sglang:num_requests_total",
)
