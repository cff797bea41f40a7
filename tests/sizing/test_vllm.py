"""vLLM's flags against what vLLM itself has printed, and against the bounds they must keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.errors import InsufficientMemory
from kvota.sizing.vllm import (
    BLOCK_SIZE,
    Flag,
    VllmBill,
    Wishes,
    arguments,
    kv_bytes,
    kv_tokens,
    vllm_flags,
)

GIB = 2**30


def gib(number: float) -> int:
    return round(number * GIB)


def per_token(layers: int, kv_heads: int, head_size: int) -> int:
    return 2 * layers * kv_heads * head_size * 2


# Start-up logs that users of vLLM have published. Sizes are printed with two digits.
QWEN_7B_AWQ = VllmBill(  # Qwen2.5-7B-Instruct-AWQ on a 16 GB card, utilization 0.9
    device_bytes=gib(15.99),
    weight_bytes=gib(5.29),
    activation_bytes=gib(1.04),
    outside_torch_bytes=gib(0.06),
    graph_bytes=gib(0.48),
    kv_bytes_per_token=per_token(28, 4, 128),
)
QWEN_235B_FP8 = VllmBill(  # Qwen3-235B-A22B-FP8 on 4 × L40S, utilization 0.9
    device_bytes=gib(44.42),
    weight_bytes=gib(27.72),
    activation_bytes=gib(1.4),
    outside_torch_bytes=gib(0.21),
    graph_bytes=gib(3.45),
    kv_bytes_per_token=per_token(94, 1, 128),
)


@pytest.mark.parametrize(("bill", "printed_gib"), [(QWEN_7B_AWQ, 8.0), (QWEN_235B_FP8, 10.65)])
def test_kv_memory_is_what_vllm_printed(bill: VllmBill, printed_gib: float) -> None:
    assert kv_bytes(bill, 0.9) / GIB == pytest.approx(printed_gib, abs=0.02)


def test_tokens_are_what_vllm_printed() -> None:
    # vllm-project/vllm#19996, Llama 3.1 8B with an EAGLE layer: "51.63 GiB", "410,128 tokens"
    assert kv_tokens(gib(51.63), per_token(33, 8, 128)) == 410_128
    # Qwen2.5-7B: "8.0 GiB", "149,712 tokens"
    assert kv_tokens(gib(8.0), QWEN_7B_AWQ.kv_bytes_per_token) == pytest.approx(149_712, rel=1e-3)


def by_name(flags: object) -> dict[str, Flag]:
    assert isinstance(flags, list)
    return {flag.name: flag for flag in flags}


def test_a_small_card() -> None:
    flags = by_name(vllm_flags(QWEN_7B_AWQ, Wishes(context_max=32_768)))
    # 1 − 0.48/15.99 − 0.02, rounded down; 0.94 × 15.99 − 6.39 = 8.64 GiB: 161,790 tokens
    assert flags["--gpu-memory-utilization"].value == "0.94"
    assert flags["--max-model-len"].value == "32768"
    assert flags["--max-num-seqs"].value == "78"
    assert flags["--kv-cache-dtype"].value == "auto"
    assert "8.64 GiB for KV" in flags["--gpu-memory-utilization"].reason
    assert all(flag.reason for flag in flags.values())


def test_cuda_graphs_and_others_lower_the_utilization() -> None:
    flags = by_name(vllm_flags(QWEN_235B_FP8, Wishes(context_max=32_768, tensor_parallel=4)))
    assert flags["--gpu-memory-utilization"].value == "0.90"  # as that operator had found, too
    assert flags["--tensor-parallel-size"].value == "4"


def test_fp8_is_taken_only_when_it_is_needed_and_there() -> None:
    long = Wishes(context_max=262_144, has_fp8=True)
    flags = by_name(vllm_flags(QWEN_7B_AWQ, long))
    assert flags["--kv-cache-dtype"].value == "fp8"
    assert flags["--max-model-len"].value == "262144"
    short = Wishes(context_max=32_768, has_fp8=True)
    assert by_name(vllm_flags(QWEN_7B_AWQ, short))["--kv-cache-dtype"].value == "auto"
    without = by_name(vllm_flags(QWEN_7B_AWQ, Wishes(context_max=262_144)))
    assert without["--kv-cache-dtype"].value == "auto"
    assert 100_000 < int(without["--max-model-len"].value) < 262_144
    assert "no more than" in without["--max-model-len"].reason


def test_what_does_not_fit_is_refused_with_advice() -> None:
    with pytest.raises(InsufficientMemory, match=r"does not fit.*Lower max_model_len"):
        vllm_flags(QWEN_7B_AWQ, Wishes(context_max=10**6, max_model_len=500_000))
    with pytest.raises(InsufficientMemory, match="no memory for KV"):
        vllm_flags(VllmBill(device_bytes=gib(8), weight_bytes=gib(15), activation_bytes=gib(1),
                            kv_bytes_per_token=131_072), Wishes(context_max=4096))  # fmt: skip
    with pytest.raises(InsufficientMemory, match="at most 4096"):
        vllm_flags(QWEN_7B_AWQ, Wishes(context_max=4096, max_model_len=8192))


def test_the_command_line() -> None:
    line = arguments(vllm_flags(QWEN_7B_AWQ, Wishes(context_max=8192, max_model_len=4096)))
    assert line[:4] == ["--gpu-memory-utilization", "0.94", "--max-model-len", "4096"]


@given(
    device=st.integers(4, 200), weights=st.floats(0.1, 150), others=st.floats(0, 20),
    graphs=st.floats(0, 5), per_token_kib=st.integers(8, 1024), context=st.integers(64, 10**6),
    typical=st.integers(1, 10**5), has_fp8=st.booleans(),
)  # fmt: skip
def test_whatever_the_bill_what_is_promised_fits(
    device: int, weights: float, others: float, graphs: float, per_token_kib: int,
    context: int, typical: int, has_fp8: bool,
) -> None:  # fmt: skip
    bill = VllmBill(
        device_bytes=device * GIB, weight_bytes=gib(weights), activation_bytes=GIB,
        graph_bytes=gib(graphs), others_bytes=gib(others), kv_bytes_per_token=1024 * per_token_kib,
    )  # fmt: skip
    wishes = Wishes(context_max=context, typical_tokens=typical, has_fp8=has_fp8)
    try:
        flags = by_name(vllm_flags(bill, wishes))
    except InsufficientMemory:
        return
    utilization = float(flags["--gpu-memory-utilization"].value)
    assert utilization * bill.device_bytes + bill.others_bytes + bill.graph_bytes <= (
        bill.device_bytes
    )
    factor = 2 if flags["--kv-cache-dtype"].value == "fp8" else 1
    tokens = kv_tokens(kv_bytes(bill, utilization), bill.kv_bytes_per_token // factor)
    length, num = int(flags["--max-model-len"].value), int(flags["--max-num-seqs"].value)
    assert tokens >= BLOCK_SIZE
    assert 1 <= length <= min(context, tokens)
    assert num == 1 or num * min(typical, length) <= tokens
