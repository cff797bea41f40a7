"""Fitting, lengths, concurrency and pace of one configuration."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.core.errors import ConfigError, InsufficientMemory
from kvota.kv.layout import CacheType
from kvota.tools.plan.catalogue import known_device, known_model
from kvota.tools.plan.methods import GPU_METHODS
from kvota.tools.plan.pace import CONCURRENCY_MAX, Target
from kvota.tools.plan.planner import Choice, Plan, work_out
from kvota.tools.plan.roofline import Bound
from kvota.tools.plan.workload import Workload


def plan(
    model: str = "llama-3.1-8b",
    device: str = "h100-sxm",
    method: str = "bf16",
    *,
    tensor_parallel: int = 1,
    cache_type: CacheType = CacheType.F16,
    workload: Workload | None = None,
) -> Plan:
    choice = Choice(GPU_METHODS[method], tensor_parallel, cache_type)
    return work_out(known_model(model), known_device(device), workload or Workload(), choice)


def test_the_lines_of_the_bill_add_up() -> None:
    bill = plan().memory
    *parts, kv = [line.num_bytes for line in bill.lines]
    assert sum(parts) == pytest.approx(kv, abs=2)
    assert kv == bill.kv_bytes


def test_typical_requests_fill_kv_in_whole_blocks() -> None:
    one = plan(workload=Workload(prompt_tokens=1000, output_tokens=25))
    assert one.num_typical == one.memory.kv_bytes // (1040 * 131_072)


def test_a_plan_can_be_asked_for_other_lengths_and_numbers_afterwards() -> None:
    one = plan(method="fp8")
    assert one.num_held(one.workload.typical_tokens) == one.num_typical
    assert one.num_held(one.max_model_len) == one.num_longest
    assert one.pacing.at(1) == one.alone
    assert one.pacing.at(one.loaded.concurrency) == one.loaded
    assert one.pacing.step(7).total_s == one.pacing.at(7).tpot_s


def test_weights_kv_and_the_rest_are_all_of_a_device() -> None:
    memory = plan().memory
    weights = next(line for line in memory.lines if line.what == "weights")
    assert memory.weight_bytes == -weights.num_bytes
    assert 0 < memory.lines[0].num_bytes - memory.weight_bytes - memory.kv_bytes < 12e9


def test_windows_let_more_long_requests_fit() -> None:
    work = Workload(longest_tokens=100_000)
    gemma = plan("gemma-3-27b", "h200", workload=work)
    full = 100_000 * gemma.kv_bytes_per_token
    assert gemma.num_longest > 3 * (gemma.memory.kv_bytes // full)


def test_latent_kv_is_repeated_on_every_device() -> None:
    one, four = (
        plan("deepseek-v2-lite", "h100-sxm", tensor_parallel=devices) for devices in (1, 4)
    )
    assert one.kv_bytes_per_token == four.kv_bytes_per_token == 31_104


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
def test_i05_replicas_multiply_requests_and_never_make_one_fit(devices: int) -> None:
    few = plan(workload=Workload(users=1))
    many = plan(workload=Workload(users=devices * few.loaded.concurrency))
    assert many.replicas >= devices
    assert many.kv_bytes_per_token == few.kv_bytes_per_token == 131_072
    assert many.num_typical == few.num_typical


def test_max_model_len_is_what_was_asked_or_the_models_limit_or_what_fits() -> None:
    assert plan(workload=Workload(longest_tokens=9000)).max_model_len == 9000
    assert plan().max_model_len == 131_072
    tight = plan(device="l4")
    assert 1366 < tight.max_model_len < 131_072
    assert tight.num_longest == 1


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(InsufficientMemory, match="leaves no memory for KV"):
        plan("llama-3.3-70b")
    with pytest.raises(InsufficientMemory, match=r"one request of 131,072 tokens needs 17\.2 GB"):
        plan(device="l4", workload=Workload(longest_tokens=131_072))


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload(longest_tokens=10_000), "longest request has 10,000 tokens.*at most 8,192"),
        (Workload(prompt_tokens=9000), "typical request has 9,211 tokens.*at most 8,192"),
    ],
)
def test_what_the_model_cannot_read_is_refused(workload: Workload, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan("gemma-2-9b", workload=workload)


def test_heads_that_cannot_be_spread_are_refused() -> None:
    with pytest.raises(ConfigError, match="14 attention heads cannot be spread over 4"):
        plan("qwen2.5-0.5b", tensor_parallel=4)


def test_one_request_waits_for_memory_and_its_prompt_for_compute() -> None:
    alone = plan().alone
    assert (alone.prefill_bound, alone.decode_bound) == (Bound.COMPUTE, Bound.MEMORY)


def test_concurrency_stops_at_the_first_limit() -> None:
    assert plan().limited_by == "KV memory"
    assert plan(workload=Workload(tpot_s=0.02)).limited_by == "the target for TPOT"
    slow = plan(device="l4", method="fp8", workload=Workload(ttft_s=0.13, tpot_s=1))
    assert slow.limited_by == "the target for TTFT"
    short = Workload(prompt_tokens=10, output_tokens=10, tpot_s=1, users=1)
    assert plan(workload=short).limited_by == "the size of a step"


def test_a_target_that_one_request_misses_is_named_and_no_longer_limits() -> None:
    hopeless = plan(device="l4", workload=Workload(ttft_s=0.01))
    assert hopeless.misses == (Target.TTFT,)
    assert hopeless.loaded.concurrency > 1
    both = plan(device="l4", workload=Workload(ttft_s=0.01, tpot_s=0.001))
    assert both.loaded.concurrency == 1


@settings(deadline=None, max_examples=60)
@given(
    prompt=st.integers(1, 8000),
    output=st.integers(1, 2000),
    ttft_s=st.floats(0.05, 10),
    tpot_s=st.floats(0.01, 1),
    device=st.sampled_from(["l4", "a100-80", "h100-sxm", "b200"]),
    method=st.sampled_from(["fp16", "int8", "awq"]),
)
def test_what_is_promised_fits_and_keeps_the_targets(
    prompt: int, output: int, ttft_s: float, tpot_s: float, device: str, method: str
) -> None:
    work = Workload(prompt_tokens=prompt, output_tokens=output, ttft_s=ttft_s, tpot_s=tpot_s)
    try:
        one = plan(device=device, method=method, workload=work)
    except InsufficientMemory:
        return
    at_once = one.loaded.concurrency
    assert 1 <= at_once <= min(max(one.num_typical, 1), CONCURRENCY_MAX)
    assert at_once * prompt * one.kv_bytes_per_token <= one.memory.kv_bytes
    assert set(one.loaded.misses(work)) <= set(one.misses)
    assert one.misses or one.replicas * one.users_per_replica >= work.users
    assert one.max_num_batched_tokens >= 2 * at_once or at_once == 1


def test_a_shorter_tpot_makes_smaller_steps() -> None:
    assert plan(workload=Workload(tpot_s=0.5)).max_num_batched_tokens == 8192
    assert plan(workload=Workload(tpot_s=0.03)).max_num_batched_tokens == 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"users": 0}, "users must be at least 1, got 0"),
        ({"prompt_tokens": 0}, "prompt_tokens must be at least 1"),
        ({"ttft_s": 0.0}, "must be above 0 seconds"),
        ({"ttft_s": float("nan")}, "and finite"),
        ({"tpot_s": float("inf")}, "and finite"),
        ({"longest_tokens": 100}, "fewer than a typical one"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**changes)  # type: ignore[arg-type]
