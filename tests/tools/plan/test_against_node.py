"""The plan against the memory bill of a node that has really loaded the default model.

It is loaded in a process of its own, with everything a node imports, because the bill counts the
whole process.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvota.kv.layout import CacheType
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, fetch
from kvota.model.load import load_model
from kvota.sizing.memory import draw_bill
from kvota.tools.plan.methods import CPU_METHODS
from kvota.tools.plan.planner import Choice, Plan, work_out
from kvota.tools.plan.question import read_model
from kvota.tools.plan.workload import Workload
from tests.support.plan_machine import CPU
from tests.support.tiny_models import write_safetensors

LIMIT_BYTES = 2 * 10**9  # small, so that the model matters

LOAD = """
import sys
from dataclasses import replace
from pathlib import Path
import kvota.cli
import kvota.node.serve
from kvota.model.load import load_model
from kvota.sizing.memory import resident_bytes

loaded = load_model(Path(sys.argv[1]), weights="int8")
print(resident_bytes(), loaded.compiled.bytes_per_block)
"""


def measured(path: Path) -> tuple[int, int]:
    """(bytes of the process with the model in it, bytes of a KV block)."""
    ended = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], capture_output=True, check=True, text=True
    )
    used_bytes, bytes_per_block = map(int, ended.stdout.split())
    return used_bytes, bytes_per_block


def planned(path: Path) -> Plan:
    shape, _ = read_model(str(path))
    machine = replace(CPU, memory_bytes=LIMIT_BYTES)
    return work_out(shape, machine, Workload(), Choice(CPU_METHODS["int8"]))


@pytest.mark.model
def test_the_plan_is_within_5_percent_of_the_nodes_own_bill() -> None:
    path = fetch(DEFAULT_MODEL, cache_dir_of(os.environ))
    used_bytes, bytes_per_block = measured(path)
    bill = draw_bill(
        limit_bytes=LIMIT_BYTES,
        limit_from="test",
        used_bytes=used_bytes,
        weights_bytes=used_bytes,
        kv_budget_ratio=0.85,
        kv_memory_bytes=None,
        block_size=32,
        bytes_per_block=bytes_per_block,
        max_model_len=8192,
    )
    plan = planned(path)
    assert plan.kv_bytes_per_token * 32 == bytes_per_block
    assert plan.memory.kv_bytes == pytest.approx(bill.kv_budget_bytes, rel=0.05)
    assert plan.num_typical == pytest.approx(bill.num_requests(1155 + 211), rel=0.05)
    held_bytes = -sum(line.num_bytes for line in plan.memory.lines[1:3])
    assert held_bytes == pytest.approx(used_bytes, rel=0.05)


@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.F16, CacheType.U8])
def test_a_block_takes_what_the_compiled_model_asks_for(
    cache_type: CacheType, tmp_path: Path
) -> None:
    tiny = write_safetensors(tmp_path, "qwen3")
    loaded = load_model(tiny.path, kv_dtype=cache_type.label, num_threads=1)
    shape, _ = read_model(str(tiny.path))
    layout = shape.kv_layout(cache_type)
    assert layout.bytes_per_block(32) == loaded.compiled.bytes_per_block
