import subprocess
import sys
from pathlib import Path

from kvota.tools.plan.hardware import Arithmetic
from kvota.tools.plan.here import _cpu_flags, company, this_machine


def test_this_machine_has_memory_bandwidth_and_compute() -> None:
    machine = this_machine(measure_s=0.01)
    assert not machine.is_gpu
    assert machine.memory_bytes > 10**8
    assert machine.bandwidth > 0
    assert machine.compute[Arithmetic.I8] >= machine.compute[Arithmetic.F32] > 0


def test_a_machine_that_others_use_is_told() -> None:
    assert company(0.9, 2) == ""
    assert "load 22.1 on 2 cores" in company(22.1, 2)


def test_cpu_flags_are_read_where_there_are_some(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_vnni\n")
    assert _cpu_flags(file) == {"fpu", "avx2", "avx512_vnni"}
    assert _cpu_flags(tmp_path / "none") == frozenset()


def test_the_planner_starts_without_a_model_runtime() -> None:
    check = (
        "import sys, kvota.cli_tools_plan;"
        "assert not {'openvino', 'kvota.model', 'kvota.engine', 'kvota.node'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
