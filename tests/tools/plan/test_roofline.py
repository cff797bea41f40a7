"""The roofline against published arithmetic, published measurements, and its own bounds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvota.kv.layout import CacheType
from kvota.tools.plan.catalogue import known_device, known_model
from kvota.tools.plan.hardware import IDEAL, Efficiency
from kvota.tools.plan.matrices import matrices_of
from kvota.tools.plan.methods import CPU_METHODS, GPU_METHODS
from kvota.tools.plan.roofline import Bound, Roofline, Step
from tests.support.plan_machine import CPU


def roofline(
    model: str,
    device: str,
    method: str = "bf16",
    *,
    tensor_parallel: int = 1,
    efficiency: Efficiency = IDEAL,
    cache_type: CacheType = CacheType.F16,
) -> Roofline:
    shape = known_model(model)
    return Roofline(
        shape=shape,
        matrices=matrices_of(shape),
        method=GPU_METHODS[method],
        hardware=replace(known_device(device), efficiency=efficiency),
        tensor_parallel=tensor_parallel,
        cache_type=cache_type,
    )


# Baseten, "A guide to LLM inference and performance" (2023), Llama 2 7B in fp16 on an A10:
# 350 tokens · 14 GFLOP / 125 TFLOP/s = 39 ms of prefill, 14 GB / 600 GB/s = 23 ms a token. It
# counts 7 billion parameters; 6.48 billion are multiplied with every token of a prompt.
def test_the_hand_calculation_for_an_a10() -> None:
    a10 = roofline("llama-2-7b", "a10", "fp16")
    prefill = a10.time(Step(prompt_tokens=350, num_prompts_ended=1))
    decode = a10.time(Step(num_decoding=1))
    assert prefill.total_s * 1000 == pytest.approx(39 * 6.48 / 7, rel=0.01)
    assert prefill.bound is Bound.COMPUTE
    assert decode.total_s * 1000 == pytest.approx(23, rel=0.06)
    assert decode.bound is Bound.MEMORY


# J. Musgrave, "vLLM throughput-latency sweep on NVIDIA A100" (2026): Llama 3.1 8B in bf16, vLLM
# 0.23, A100 40 GB, 1024 + 128 tokens, one request at a time: about 75 tokens a second.
def test_one_request_on_an_a100_is_as_fast_as_was_measured() -> None:
    a100 = roofline("llama-3.1-8b", "a100-40", efficiency=Efficiency())
    decode = a100.time(Step(num_decoding=1, decode_context=1024 + 64))
    assert 1 / decode.total_s == pytest.approx(75, rel=0.05)


# InferenceBench (Yobitel), "Recipe: concurrency sweep": the same model in 16 bits, vLLM 0.21, H100
# 80 GB HBM3, short chats: medians of 6.48 ms a token alone and 6.59 ms with four at once.
@pytest.mark.parametrize(("at_once", "measured_ms"), [(1, 6.48), (4, 6.59)])
def test_a_token_on_an_h100_takes_as_long_as_was_measured(at_once: int, measured_ms: float) -> None:
    h100 = roofline("llama-3.1-8b", "h100-sxm", efficiency=Efficiency())
    decode = h100.time(Step(num_decoding=at_once, decode_context=200))
    assert decode.total_s * 1000 == pytest.approx(measured_ms, rel=0.05)


# SplitwiseSim's measurements (MIT, P. Patel), Llama 2 70B, batch 1, medians in ms: prompts of
# 512 and 2048 tokens, and one token after a prompt of 512.
SPLITWISE = {
    ("a100-80", 2): (197, 688, 54.9),
    ("a100-80", 4): (127, 403, 45.0),
    ("a100-80", 8): (94, 274, 44.9),
    ("h100-sxm", 2): (84, 310, 37.0),
    ("h100-sxm", 4): (60, 201, 29.7),
    ("h100-sxm", 8): (53, 137, 29.8),
}


@pytest.mark.parametrize(("device", "devices"), SPLITWISE)
def test_nothing_measured_is_faster_than_the_hard_bound(device: str, devices: int) -> None:
    bound = roofline("llama-2-70b", device, "fp16", tensor_parallel=devices)
    short, long, token = SPLITWISE[device, devices]
    for tokens, measured_ms in ((512, short), (2048, long)):
        step = Step(prompt_tokens=tokens, prompt_context=tokens / 2, num_prompts_ended=1)
        assert bound.time(step).total_s * 1000 < measured_ms
    assert bound.time(Step(num_decoding=1, decode_context=576)).total_s * 1000 < token


def test_long_prompts_take_about_as_long_as_was_measured() -> None:
    """Two A100: where the engine of 2023 was not yet the bottleneck."""
    assumed = roofline("llama-2-70b", "a100-80", "fp16", tensor_parallel=2, efficiency=Efficiency())
    for tokens, measured_ms in ((512, 197), (1024, 377), (2048, 688), (4096, 1485), (8192, 2990)):
        step = Step(prompt_tokens=tokens, prompt_context=tokens / 2, num_prompts_ended=1)
        assert assumed.time(step).total_s * 1000 == pytest.approx(measured_ms, rel=0.15)


def test_few_decodes_wait_for_memory_and_many_for_compute() -> None:
    h100 = roofline("llama-3.1-8b", "h100-sxm")
    assert h100.time(Step(num_decoding=1)).bound is Bound.MEMORY
    assert h100.time(Step(num_decoding=2000)).bound is Bound.COMPUTE


def test_a_small_model_on_many_slowly_linked_devices_waits_for_the_link() -> None:
    split = roofline("llama-3.2-1b", "rtx-4090", tensor_parallel=8, efficiency=Efficiency())
    assert split.time(Step(prompt_tokens=4096)).bound is Bound.NETWORK


def test_a_step_of_a_tiny_model_waits_for_its_overhead() -> None:
    tiny = roofline("smollm2-135m", "h100-sxm", efficiency=Efficiency())
    assert tiny.time(Step(num_decoding=1)).bound is Bound.OVERHEAD


def test_an_expert_is_read_only_when_a_token_takes_it() -> None:
    """Mixtral: one token reads 2 experts of 8, many read all: 12.9 B and 46.7 B parameters."""
    mixtral = roofline("mixtral-8x7b", "h200")
    one = mixtral.time(Step(num_decoding=1)).memory_s * 4.8e12 / 2
    many = mixtral.time(Step(prompt_tokens=1000)).memory_s * 4.8e12 / 2
    assert one == pytest.approx(12.88e9, rel=0.02)
    assert many == pytest.approx(46.7e9, rel=0.02)


def test_quantized_weights_are_read_faster() -> None:
    times = [
        roofline("llama-3.1-8b", "h100-sxm", method).time(Step(num_decoding=1)).memory_s
        for method in ("bf16", "fp8", "awq")
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[1] == pytest.approx(15.01 / 8.04, rel=0.01)


def test_a_narrow_cache_is_read_in_half_the_time() -> None:
    wide = roofline("llama-3.1-8b", "h100-sxm")
    narrow = roofline("llama-3.1-8b", "h100-sxm", cache_type=CacheType.F8)
    many = Step(num_decoding=100, decode_context=8000)
    weights_s = wide.time(Step(num_decoding=1e-9)).memory_s
    saved = (narrow.time(many).memory_s - weights_s) / (wide.time(many).memory_s - weights_s)
    assert saved == pytest.approx(0.5, abs=0.01)


@settings(deadline=None)
@given(
    decoding=st.floats(0, 500),
    prompt=st.floats(1, 8000),
    context=st.floats(0, 30_000),
    devices=st.sampled_from([1, 2, 4, 8]),
    model=st.sampled_from(["llama-3.1-8b", "mixtral-8x7b", "deepseek-v2", "gemma-2-9b"]),
)
def test_more_work_never_takes_less_time(
    decoding: float, prompt: float, context: float, devices: int, model: str
) -> None:
    line = roofline(model, "h200", tensor_parallel=devices, efficiency=Efficiency())
    step = Step(
        prompt_tokens=prompt,
        prompt_context=context,
        num_decoding=decoding,
        decode_context=context,
    )
    least = line.time(step).total_s
    for name in ("prompt_tokens", "prompt_context", "num_decoding", "decode_context"):
        more = replace(step, **{name: getattr(step, name) + 50})
        assert line.time(more).total_s >= least


# `kvota.tools.plan.here` names this measurement: SmolLM2-135M in int8 on two threads of an EPYC.
@pytest.mark.parametrize(
    ("step", "measured_ms"),
    [
        (Step(num_decoding=1, decode_context=108), 8.5),
        (Step(num_decoding=4, decode_context=108), 10.2),
        (Step(num_decoding=16, decode_context=108), 17.9),
        (Step(num_decoding=64, decode_context=108), 43.7),
        (Step(prompt_tokens=512, prompt_context=256, num_prompts_ended=1), 198.0),
    ],
)
def test_our_own_engine_is_as_fast_as_was_measured(step: Step, measured_ms: float) -> None:
    shape = known_model("smollm2-135m")
    own = Roofline(
        shape=shape, matrices=matrices_of(shape), method=CPU_METHODS["int8"], hardware=CPU
    )
    assert own.time(step).total_s * 1000 == pytest.approx(measured_ms, rel=0.15)
