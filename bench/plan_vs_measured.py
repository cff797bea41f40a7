"""Does `kvota plan` say what a server will really hold? Line by line, against two engines.

    make bench-tools
    python -m bench.plan_vs_measured [--only kvota|vllm] [--quick]

`kvota node` with the default model, in the weights and KV types it has: the plan for the memory
that the node itself says it may use, against the bill it prints, its metrics page, and the
resident memory of the process. vLLM on a CPU, with random weights of the same model's sizes.

Takes about three minutes. The exit status is 1 when a line is more than 5 % off, 2 when a server
does not start or does not say what it holds.
"""

import argparse
import os
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.machine import sentence
from bench.plan_vs_measured_bills import TOLERANCE, NodeBill, NotSaid, Row, node_bill, table
from bench.plan_vs_measured_vllm import PYTHON as VLLM
from bench.plan_vs_measured_vllm import vllm_rows
from bench.server_process import free_port
from kvota.kv.layout import CacheType
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, resolve
from kvota.tools.plan.footprint import PROCESS_BYTES, resident_weights
from kvota.tools.plan.here import this_machine
from kvota.tools.plan.matrices import matrices_of
from kvota.tools.plan.methods import CPU_METHODS
from kvota.tools.plan.planner import Choice, Plan, work_out
from kvota.tools.plan.question import read_model
from kvota.tools.plan.workload import Workload
from scripts.real_backends import EngineServer, NotStarted, running

EXIT_APART: Final = 1
EXIT_NOTHING: Final = 2
VLLM_MODEL: Final = "smollm2-135m"  # of the planner's catalogue
NODES: Final = (("int8", CacheType.F16), ("int4", CacheType.U8), ("f32", CacheType.F32))


def node_rows(model: Path, folder: Path, weights: str, cache_type: CacheType) -> list[Row]:
    """Start a node and hold its bill against the plan. Raises NotStarted and NotSaid."""
    port, log = free_port(), folder / f"node-{weights}.log"
    server = EngineServer(
        kind="kvota",
        python=Path(sys.executable),
        arguments=(
            *("-m", "kvota", "node", str(model), "--port", str(port)),
            *("--weights", weights, "--kv-cache-dtype", cache_type.label),
        ),
        environment={"XDG_STATE_HOME": str(folder)},
    )
    with (
        running(server, port, log),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page,
    ):
        bill = node_bill(log.read_text(errors="replace"), page.read().decode())
    return compare(_plan(model, bill, weights, cache_type), bill)


def _plan(model: Path, bill: NodeBill, weights: str, cache_type: CacheType) -> Plan:
    """For the memory that the node says it may use."""
    shape, _ = read_model(str(model))
    hardware = replace(this_machine(), memory_bytes=bill.limit_bytes)
    workload = Workload(longest_tokens=bill.max_model_len)
    return work_out(shape, hardware, workload, Choice(CPU_METHODS[weights], cache_type=cache_type))


def compare(plan: Plan, bill: NodeBill) -> list[Row]:
    held = resident_weights(plan.shape, matrices_of(plan.shape), plan.choice.method)
    kv_tokens = plan.memory.kv_bytes // (plan.kv_bytes_per_token * plan.memory.block_size)
    return [
        Row("weights as the engine holds them", held, bill.weights_bytes),
        Row("in use, model loaded", PROCESS_BYTES + held, bill.used_bytes),
        Row("resident memory of the process", PROCESS_BYTES + held, bill.resident_bytes),
        Row("KV of a token", plan.kv_bytes_per_token, bill.kv_bytes_per_token),
        Row("KV budget", plan.memory.kv_bytes, bill.kv_budget_bytes),
        Row("tokens of KV", kv_tokens * plan.memory.block_size, bill.kv_tokens, is_bytes=False),
    ]


def all_near(title: str, rows: list[Row]) -> bool:
    """Prints them."""
    print(f"{title}\n\n{table(rows)}", flush=True)
    return all(row.is_near for row in rows)


def measure(folder: Path, only: str | None, nodes: Sequence[tuple[str, CacheType]] = NODES) -> bool:
    """Whether every line is near. Raises NotStarted and NotSaid."""
    is_good = True
    if only in (None, "kvota"):
        model = resolve(DEFAULT_MODEL, cache_dir_of(os.environ))
        for weights, cache_type in nodes:
            title = f"kvota node, {DEFAULT_MODEL}, weights {weights}, KV {cache_type.label}"
            rows = node_rows(model, folder, weights, cache_type)
            is_good = all_near(title, rows) and is_good
    if only in (None, "vllm"):
        rows = vllm_rows(folder, VLLM_MODEL)
        is_good = all_near(f"vLLM on a CPU, {VLLM_MODEL} in bf16", rows) and is_good
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare kvota plan with real memory bills.")
    parser.add_argument("--only", choices=("kvota", "vllm"))
    parser.add_argument("--quick", action="store_true", help="one storage of the node's weights")
    given = parser.parse_args()
    if given.only != "kvota" and not VLLM.exists():
        print(f"{VLLM} is not there; `make bench-tools` installs it.", file=sys.stderr)
        return EXIT_NOTHING
    print(f"{sentence()}\n")
    with tempfile.TemporaryDirectory(prefix="kvota-plan-") as name:
        try:
            is_good = measure(Path(name), given.only, NODES[:1] if given.quick else NODES)
        except (NotStarted, NotSaid) as error:
            print(f"No comparison: {error}", file=sys.stderr)
            return EXIT_NOTHING
    if not is_good:
        print(f"A line of the plan is more than {TOLERANCE:.0%} off.", file=sys.stderr)
    return 0 if is_good else EXIT_APART


if __name__ == "__main__":
    sys.exit(main())
