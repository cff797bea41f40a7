"""Facts are read from the files that a kernel writes; where there are none, nothing is claimed."""

import errno
import os
import socket
from pathlib import Path

import pytest

from kvota.tools.doctor.machine import (
    cpu_flags,
    port_error,
    read_cores,
    read_folder,
    read_libraries,
    read_memory,
    this_machine,
)

CPUINFO = (
    "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_vnni\n\nprocessor\t: 1\nflags\t\t: no\n"
)


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_quota_and_throttling_are_read_from_control_groups_of_version_2(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000\n")
    write(tmp_path, "sys/fs/cgroup/cpu.stat", "usage_usec 7\nnr_periods 200\nnr_throttled 50\n")
    write(tmp_path, "proc/cpuinfo", CPUINFO)
    cores = read_cores(tmp_path, {"OMP_NUM_THREADS": "8", "HOME": "/"})
    assert cores.quota == 1.5
    assert cores.throttled_share == 0.25
    assert cores.flags == {"fpu", "avx2", "avx512f", "avx512_vnni"}
    assert cores.threads_asked == {"OMP_NUM_THREADS": "8"}


def test_and_from_version_1(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.stat", "nr_periods 10\nnr_throttled 1\n")
    cores = read_cores(tmp_path, {})
    assert cores.quota == 4
    assert cores.throttled_share == 0.1


@pytest.mark.parametrize("text", ["max 100000\n", "", "garbage\n"])
def test_without_a_limit_there_is_no_quota(tmp_path: Path, text: str) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.max", text)
    assert read_cores(tmp_path, {}).quota is None


def test_a_quota_of_minus_one_is_no_limit_in_version_1(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert read_cores(tmp_path, {}).quota is None


@pytest.mark.parametrize("file", ["memory.events", "memory/memory.oom_control"])
def test_processes_killed_for_memory_are_counted(tmp_path: Path, file: str) -> None:
    write(tmp_path, f"sys/fs/cgroup/{file}", "low 0\noom 3\noom_kill 2\n")
    assert read_memory(tmp_path).num_oom_kills == 2


def test_the_limit_of_a_container_is_its_memory(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/memory.max", "1000000\n")
    memory = read_memory(tmp_path)
    assert (memory.usable, memory.usable_from) == (1_000_000, "the container's limit")
    assert memory.num_oom_kills == 0


def test_arm_lists_its_features() -> None:
    assert cpu_flags("BogoMIPS : 50\nFeatures\t: fp asimd asimddp\n") == {"fp", "asimd", "asimddp"}
    assert cpu_flags("") == frozenset()


def test_a_folder_that_does_not_exist_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    folder = read_folder(tmp_path / "a" / "b")
    assert folder.error is None
    assert folder.free_bytes > 0
    assert not (tmp_path / "a").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_says_why_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert read_folder(tmp_path / "file" / "models").error is not None


def test_a_port_is_free_until_somebody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_error(port) == os.strerror(errno.EADDRINUSE)
    assert port_error(port) is None


def test_libraries_come_with_what_is_needed_of_them() -> None:
    found = {one.name: one for one in read_libraries("kvota")}
    assert found["psutil"].least == "7"
    assert found["psutil"].installed is not None
    assert "redis" not in found  # an extra
    assert read_libraries("no-such-package-here") == ()


def test_everything_of_this_machine_can_be_read(tmp_path: Path) -> None:
    machine = this_machine(tmp_path, 0, {})
    assert machine.memory.usable > 0
    assert machine.cores.allowed >= 1
    assert machine.python >= (3, 11)
