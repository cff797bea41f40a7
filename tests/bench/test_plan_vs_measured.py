"""Bills as servers tell them, and what becomes of them beside a plan. Servers are not started."""

from dataclasses import replace
from typing import Any

import pytest

from bench.plan_vs_measured import compare as compare_node
from bench.plan_vs_measured_bills import (
    NotSaid,
    Row,
    VllmCpuBill,
    node_bill,
    table,
    vllm_cpu_bill,
)
from bench.plan_vs_measured_vllm import base_bytes, held_bytes
from bench.plan_vs_measured_vllm import compare as compare_vllm
from kvota.sizing.memory import draw_bill
from kvota.tools.plan.catalogue import known_model
from kvota.tools.plan.matrices import matrices_of
from kvota.tools.plan.methods import CPU_METHODS, GPU_METHODS
from kvota.tools.plan.planner import Choice, work_out
from kvota.tools.plan.workload import Workload
from tests.support.plan_machine import CPU

GIB = 2**30
PRINTED = """\
weights int8 · 2 threads · context 8,192 tokens
  22.3 GB  memory this process may use              free on this machine
 − 591 MB  in use, model loaded                     weights 459 MB, measured while loading
 − 500 MB  reserve for activations                  constant
= 18.1 GB  KV budget                                what is left × kv_budget_ratio 0.85
   24,499  KV blocks of 32 tokens                   783,968 tokens, 23,040 B each
      569  typical requests at once (1,366 tokens)  95 of max_model_len 8,192
Listening on http://127.0.0.1:18611  (Ctrl-C drains and stops)
"""
METRICS = """\
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 5.9695104e+08
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",num_gpu_blocks="24499"} 1.0
"""
VLLM_LOG = "INFO Filesystem type: EXT4. Checkpoint size: 0.25 GiB. Available RAM: 19.78 GiB.\n"
VLLM_METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",kv_cache_memory_bytes="1073741824",num_gpu_blocks="364"} 1.0
"""


def test_the_bill_of_a_node_is_read_from_what_it_prints() -> None:
    bill = node_bill(PRINTED, METRICS)
    assert (bill.limit_bytes, bill.used_bytes) == (22_300_000_000, 591_000_000)
    assert (bill.weights_bytes, bill.kv_budget_bytes) == (459_000_000, 18_100_000_000)
    assert (bill.kv_bytes_per_token, bill.max_model_len) == (23_040, 8192)
    assert (bill.kv_tokens, bill.resident_bytes) == (24_499 * 32, 596_951_040)


def test_the_bill_that_is_read_is_the_bill_that_is_drawn() -> None:
    """So that neither can change its words without the other."""
    drawn = draw_bill(
        limit_bytes=22_340_000_000,  # of which three digits are shown
        limit_from="free on this machine",
        used_bytes=591_000_000,
        weights_bytes=459_000_000,
        kv_budget_ratio=0.85,
        kv_memory_bytes=None,
        block_size=32,
        bytes_per_block=32 * 23_040,
        max_model_len=8192,
    )
    printed = "\n".join("  ".join(line) for line in drawn.lines())
    read, known = node_bill(printed, METRICS), node_bill(PRINTED, METRICS)
    assert read == known


@pytest.mark.parametrize("missing", ["KV budget", "in use", "each", "max_model_len", "may use"])
def test_a_bill_that_lacks_a_line_is_refused(missing: str) -> None:
    printed = "\n".join(line for line in PRINTED.splitlines() if missing not in line)
    with pytest.raises(NotSaid):
        node_bill(printed, METRICS)


def test_the_bill_of_vllm_is_read_from_its_log_and_its_page() -> None:
    bill = vllm_cpu_bill(VLLM_LOG, VLLM_METRICS, worker_bytes=2 * GIB)
    assert bill == VllmCpuBill(
        checkpoint_bytes=0.25 * GIB, kv_bytes=GIB, kv_tokens=364 * 128, worker_bytes=2 * GIB
    )


@pytest.mark.parametrize(
    ("log", "metrics"), [("", VLLM_METRICS), (VLLM_LOG, METRICS), (VLLM_LOG, "")]
)
def test_vllm_that_does_not_say_is_refused(log: str, metrics: str) -> None:
    with pytest.raises(NotSaid):
        vllm_cpu_bill(log, metrics, worker_bytes=GIB)


# Measured with a fixed malloc threshold: what the worker had beyond one with two tiny layers.
@pytest.mark.parametrize(
    ("changes", "megabytes"),
    [
        ({}, 387.5),  # SmolLM2-135M: head and embedding are one
        (
            {
                "num_layers": 12,
                "hidden_size": 1024,
                "num_heads": 16,
                "num_kv_heads": 4,
                "mlp_size": 2816,
                "vocab_size": 32_000,
                "tied_embeddings": False,
            },
            538.1,
        ),
    ],
)
def test_vllm_packs_embedding_and_head_beside_what_was_loaded(
    changes: dict[str, Any], megabytes: float
) -> None:
    shape = replace(known_model("smollm2-135m"), **changes)
    held = held_bytes(matrices_of(shape), GPU_METHODS["bf16"])
    assert held / 1e6 == pytest.approx(megabytes, rel=0.02)


def test_a_worker_that_is_as_planned_is_near_in_every_line() -> None:
    tiny = replace(known_model("smollm2-135m"), num_layers=1, vocab_size=320)
    shape = known_model("smollm2-135m")
    per_token = shape.kv_layout().bytes_per_token
    held, little = (
        round(held_bytes(matrices_of(one), GPU_METHODS["bf16"])) for one in (shape, tiny)
    )
    without = VllmCpuBill(
        checkpoint_bytes=0,
        kv_bytes=GIB,
        kv_tokens=1000,
        worker_bytes=600 * 10**6 + little + 1000 * tiny.kv_layout().bytes_per_token,
    )
    assert base_bytes(tiny, without) == pytest.approx(600 * 10**6, abs=1)
    bill = VllmCpuBill(
        checkpoint_bytes=269e6,
        kv_bytes=GIB,
        kv_tokens=46_592,
        worker_bytes=600 * 10**6 + held + 46_592 * per_token,
    )
    assert all(abs(row.off) < 0.001 for row in compare_vllm(shape, bill, 600e6))
    too_full = replace(bill, worker_bytes=bill.worker_bytes + held // 10)
    assert [row.what for row in compare_vllm(shape, too_full, 600e6) if not row.is_near] == [
        "weights as its worker holds them"
    ]


def test_the_plan_of_a_node_is_held_against_its_bill() -> None:
    bill = node_bill(PRINTED, METRICS)
    machine = replace(CPU, memory_bytes=bill.limit_bytes)
    workload = Workload(longest_tokens=bill.max_model_len)
    plan = work_out(known_model("smollm2-135m"), machine, workload, Choice(CPU_METHODS["int8"]))
    rows = compare_node(plan, bill)
    assert all(row.is_near for row in rows), table(rows)
    heavier = compare_node(plan, replace(bill, weights_bytes=2 * bill.weights_bytes))
    assert [row.what for row in heavier if not row.is_near] == ["weights as the engine holds them"]


def test_a_row_is_near_within_5_percent_and_shows_its_unit() -> None:
    assert Row("a", 104.9, 100).is_near
    assert not Row("a", 94.9, 100).is_near
    assert Row("a", 2 * GIB, GIB).cells() == ("a", "2,048.0 MiB", "1,024.0 MiB", "+100.0%")
    assert Row("a", 23_040, 23_046).cells()[1:3] == ("23,040", "23,046")
    assert Row("a", 2e6, 2e6, is_bytes=False).cells()[1] == "2,000,000"
    assert table([Row("a", 1, 1)]).splitlines()[2] == "| a | 1 | 1 | +0.0% |"
