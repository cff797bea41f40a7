"""What is said of a machine: a good one gets no word, each fault gets one with its remedy."""

from typing import Any

import msgspec
import pytest

from kvota.tools.doctor.environment import examine, usable_threads
from kvota.tools.doctor.finding import Finding, Level
from kvota.tools.doctor.machine import Cores, Folder, Library, Machine, Memory
from kvota.tools.doctor.show import machine_verdict

GIB = 2**30
GOOD = Machine(
    memory=Memory(usable=32 * GIB, usable_from="free on this machine", total=64 * GIB),
    cores=Cores(allowed=8, flags=frozenset({"avx2", "avx512f", "avx512_vnni"})),
    cache=Folder(path="/models", free_bytes=100 * GIB),
    files_soft=65_536,
    files_hard=65_536,
    python=(3, 11, 9),
    libraries=(Library(name="numpy", installed="2.4.6", least="2.4"),),
    port=8000,
    port_error=None,
    clock_source="tsc",
    unix_s=1_800_000_000.0,
)


def but(**changes: Any) -> list[Finding]:
    return examine(msgspec.structs.replace(GOOD, **changes))


def worth_saying(findings: list[Finding]) -> dict[str, Level]:
    return {one.name: one.level for one in findings if one.level is not Level.OK}


def test_of_a_good_machine_there_is_nothing_to_say() -> None:
    findings = examine(GOOD)
    assert worth_saying(findings) == {}
    assert machine_verdict(findings) == "This machine can serve."


MEMORY, CORES = GOOD.memory, GOOD.cores
FAULTS: list[tuple[dict[str, Any], str, Level, str]] = [
    (
        {"memory": Memory(usable=GIB // 2, usable_from="the container's limit", total=8 * GIB)},
        "memory", Level.PROBLEM, "container limit",
    ),
    (
        {"memory": Memory(usable=2 * GIB, usable_from="the container's limit", total=8 * GIB)},
        "memory", Level.NOTE, "kvota plan",
    ),
    (
        {"memory": msgspec.structs.replace(MEMORY, num_oom_kills=1)},
        "killed for memory", Level.PROBLEM, "kv_budget_ratio",
    ),
    ({"memory": msgspec.structs.replace(MEMORY, swap_used=2 * GIB)}, "swap", Level.NOTE, "swapoff"),
    (
        {"cache": Folder(path="/models", error="Permission denied")},
        "model cache", Level.PROBLEM, "KVOTA_CACHE_DIR",
    ),
    ({"cache": Folder(path="/m", free_bytes=10**8)}, "model cache", Level.PROBLEM, "remove"),
    ({"cache": Folder(path="/m", free_bytes=GIB)}, "model cache", Level.NOTE, "remove"),
    ({"files_soft": 64}, "open files", Level.PROBLEM, "ulimit -n"),
    ({"files_soft": 1024}, "open files", Level.NOTE, "LimitNOFILE"),
    (
        {"cores": msgspec.structs.replace(CORES, quota=2.0, throttled_share=0.4)},
        "throttled", Level.PROBLEM, "--threads 2",
    ),
    (
        {"cores": Cores(allowed=8, quota=1.5, threads_asked={"OMP_NUM_THREADS": "8"})},
        "threads", Level.NOTE, "set it to 2",
    ),
    (
        {"cores": msgspec.structs.replace(CORES, flags=frozenset({"avx2"}))},
        "instructions", Level.NOTE, "flags",
    ),
    ({"python": (3, 10, 1)}, "python", Level.PROBLEM, "newer"),
    (
        {"libraries": (Library(name="openvino", installed="2025.1.0", least="2026.4.1"),)},
        "libraries", Level.PROBLEM, "pip install",
    ),
    (
        {"libraries": (Library(name="openvino", installed=None),)},
        "libraries", Level.PROBLEM, "pip install",
    ),
    ({"port_error": "Address already in use"}, "port", Level.NOTE, "--url http://127.0.0.1:8000"),
    ({"unix_s": 0.0}, "clock", Level.PROBLEM, "chrony"),
    ({"clock_source": "hpet"}, "clock", Level.NOTE, "tsc"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "name", "level", "remedy"), FAULTS)
def test_each_fault_is_found_alone_with_its_remedy(
    fault: dict[str, Any], name: str, level: Level, remedy: str
) -> None:
    findings = but(**fault)
    assert worth_saying(findings) == {name: level}
    found = next(one for one in findings if one.name == name and one.level is level)
    assert remedy in found.change
    assert found.means
    assert name in machine_verdict(findings)
    assert ("not fit" in machine_verdict(findings)) == (level is Level.PROBLEM)


@pytest.mark.parametrize(
    ("allowed", "quota", "threads"), [(8, None, 8), (8, 1.5, 2), (8, 0.2, 1), (2, 16.0, 2)]
)
def test_threads_are_counted_as_the_engine_counts_them(
    allowed: int, quota: float | None, threads: int
) -> None:
    assert usable_threads(Cores(allowed=allowed, quota=quota)) == threads


@pytest.mark.parametrize(
    ("installed", "least", "is_fine"),
    [
        ("2026.4.1rc2", "2026.4", True),
        ("2.10", "2.9", True),
        ("2.9", "2.10", False),
        ("3", "", True),
    ],
)
def test_versions_are_compared_as_numbers(installed: str, least: str, is_fine: bool) -> None:
    findings = but(libraries=(Library(name="x", installed=installed, least=least),))
    assert ("libraries" not in worth_saying(findings)) == is_fine
