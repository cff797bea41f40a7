"""The same diagnosis of pages with vLLM's names, in the form that its documentation shows."""

from kvota.tools.doctor.diagnosis import Diagnosis, diagnose
from kvota.tools.doctor.page import Page
from kvota.tools.doctor.targets import Targets
from kvota.tools.doctor.window import Reading, Window

MODEL = 'model_name="qwen"'
NOTHING = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"


def histogram(name: str, count: int, each_s: float) -> str:
    """`count` observations of `each_s`, in buckets on both sides of it."""
    rows = [
        f'{name}_bucket{{le="{each_s * 0.9:g}",{MODEL}}} 0',
        f'{name}_bucket{{le="{each_s * 1.1:g}",{MODEL}}} {count}',
        f'{name}_bucket{{le="+Inf",{MODEL}}} {count}',
        f"{name}_count{{{MODEL}}} {count}",
        f"{name}_sum{{{MODEL}}} {count * each_s}",
    ]
    return "\n".join(rows) + "\n"


def vllm_page(
    *, ttft_s: float = 0.2, queue_s: float = 0.05, token_s: float = 0.03, prompt: int = 3000,
    output: int = 2000, looked_up: int = 3000, hits: int = 1000, preempted: int = 0,
    running: int = 4, waiting: int = 0, kv: float = 0.5,
) -> str:  # fmt: skip
    """After 20 requests."""
    counters = {
        "prompt_tokens_total": prompt,
        "generation_tokens_total": output,
        "prefix_cache_queries_total": looked_up,
        "prefix_cache_hits_total": hits,
        "num_preemptions_total": preempted,
        "request_success_total": 20,
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": kv,
    }
    lines = [f"vllm:{name}{{{MODEL}}} {value}" for name, value in counters.items()]
    decode_s = token_s * (output / 20 - 1)
    return "\n".join(lines) + "\n" + "".join(
        (
            histogram("vllm:time_to_first_token_seconds", 20, ttft_s),
            histogram("vllm:request_queue_time_seconds", 20, queue_s),
            histogram("vllm:request_prefill_time_seconds", 20, ttft_s - queue_s),
            histogram("vllm:request_decode_time_seconds", 20, decode_s),
            histogram("vllm:e2e_request_latency_seconds", 20, ttft_s + decode_s + 0.01),
            histogram("vllm:request_time_per_output_token_seconds", 20, token_s),
            histogram("vllm:inter_token_latency_seconds", output, token_s),
        )
    )  # fmt: skip


def diagnosed(*pages: str) -> Diagnosis:
    readings = [
        Reading(at_s=20.0 * at, page=Page.parse(text)) for at, text in enumerate((NOTHING, *pages))
    ]
    return diagnose(Window(readings), Targets())


def found(*pages: str) -> list[str]:
    return [one.name for one in diagnosed(*pages).findings]


def test_a_healthy_one_gets_no_word_and_shows_its_stations() -> None:
    healthy = diagnosed(vllm_page())
    assert healthy.findings == ()
    means = {one.name: one.mean_s for one in healthy.stations}
    assert means["line"] == 0.05
    assert means["prefill"] is not None
    assert abs(means["prefill"] - 0.15) < 1e-9
    assert means["door"] is None


def test_queueing() -> None:
    ill = diagnosed(vllm_page(ttft_s=5.0, queue_s=4.5, waiting=30, kv=0.98))
    assert [one.name for one in ill.findings] == ["TTFT is queueing, not prefill"]
    assert "gpu_memory_utilization" in ill.findings[0].change
    assert ill.findings[0].source == (
        "vllm:time_to_first_token_seconds, vllm:request_queue_time_seconds"
    )
    ill = diagnosed(vllm_page(ttft_s=5.0, queue_s=4.5, waiting=30, kv=0.3))
    assert "max_num_seqs" in ill.findings[0].change


def test_late_first_tokens_of_a_server_that_does_not_say_how_long_they_queue() -> None:
    late = histogram("sglang:time_to_first_token_seconds", 20, 5.0)
    assert found(late) == ["first tokens are late"]


def test_prefill() -> None:
    assert found(vllm_page(ttft_s=5.0, queue_s=0.1)) == ["TTFT is prefill, not queueing"]


def test_a_batch_too_large() -> None:
    ill = diagnosed(vllm_page(token_s=0.2, running=64))
    assert [one.name for one in ill.findings] == ["batch too large for the TPOT target"]
    assert ill.findings[0].change.startswith("max_num_seqs about ")


def test_long_prompts() -> None:
    ill = vllm_page(token_s=0.2, prompt=60_000, looked_up=60_000, hits=20_000, running=8)
    assert found(ill) == ["long prompts stall short ones"]


def test_preemptions() -> None:
    ill = diagnosed(vllm_page(preempted=12))
    assert [one.name for one in ill.findings] == ["preemption thrash"]
    assert "max_num_seqs" in ill.findings[0].change


def test_a_prefix_cache_that_is_off_or_useless() -> None:
    assert found(vllm_page(prompt=9000, looked_up=0, hits=0)) == ["prefix cache off"]
    assert found(vllm_page(prompt=9000, looked_up=9000, hits=0)) == ["prefix cache useless"]


def test_a_gateway_that_cannot_see_a_cache_is_not_said_to_have_none() -> None:
    row = '{backend="gpu-1"}'
    blocks = 'kvota_kv_blocks{backend="gpu-1",state="free"} 100\n'
    before, after = (f"{blocks}kvota_prompt_tokens_total{row} {number}\n" for number in (0, 9000))
    readings = [Reading(at_s=20.0 * at, page=Page.parse(p)) for at, p in enumerate((before, after))]
    names = [one.name for one in diagnose(Window(readings), Targets()).findings]
    assert not [name for name in names if "prefix cache" in name]


def test_memory_in_use_with_nobody_there() -> None:
    idle = [vllm_page(running=0, kv=kv) for kv in (0.2, 0.2, 0.3)]
    assert found(*idle) == ["KV only rises: leak"]
    emptied = [vllm_page(running=0, kv=kv) for kv in (0.2, 0.1, 0.0)]
    assert found(*emptied) == []


def test_an_engine_that_is_stuck() -> None:
    still = vllm_page()
    readings = [Reading(at_s=20.0 * at, page=Page.parse(still)) for at in range(3)]
    stuck = diagnose(Window(readings), Targets())
    assert [one.name for one in stuck.findings] == ["engine stuck"]


def test_a_page_without_any_name_that_is_known_gives_nothing_to_judge_by() -> None:
    readings = [Reading(at_s=20.0 * at, page=Page.parse("up 1\n")) for at in range(2)]
    assert diagnose(Window(readings), Targets()).findings == ()
