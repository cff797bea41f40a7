"""The facts about this machine that decide how well a server runs on it. Reads, judges nothing.

Where the kernel does not say something (another system, a hidden file) the fact is None or empty,
and nobody is told a number that was not read.
"""

import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import msgspec
import psutil

from kvota.sizing.control_groups import cores_quota
from kvota.sizing.memory import memory_limit

THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TBB_NUM_THREADS",
)
_ROOT: Final = Path("/")


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. `num_oom_kills`: processes of this container that died for want of memory."""

    usable: int
    usable_from: str
    total: int
    swap_used: int = 0
    num_oom_kills: int = 0


class Cores(msgspec.Struct, frozen=True, kw_only=True):
    """`quota`: cores' worth of time that the container may use; None: no limit."""

    allowed: int
    quota: float | None = None
    throttled_share: float = 0.0  # of the scheduler's periods, since the container began
    flags: frozenset[str] = frozenset()
    architecture: str = ""
    threads_asked: Mapping[str, str] = {}


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """Where models are kept. `error`: why nothing can be written there; None when it can."""

    path: str
    free_bytes: int = 0
    error: str | None = None


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """`installed` is None when it is missing; `least` is empty when any version will do."""

    name: str
    installed: str | None
    least: str = ""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    memory: Memory
    cores: Cores
    cache: Folder
    files_soft: int | None  # open files that this process may have; None: no limit
    files_hard: int | None
    python: tuple[int, int, int]
    libraries: tuple[Library, ...]
    port: int
    port_error: str | None  # why it cannot be listened on; None when it can
    clock_source: str
    unix_s: float


def this_machine(
    cache_dir: Path, port: int, environment: Mapping[str, str], root: Path = _ROOT
) -> Machine:
    """Everything, read now. `root` stands before /proc and /sys, for tests."""
    soft, hard = _open_files()
    return Machine(
        memory=read_memory(root),
        cores=read_cores(root, environment),
        cache=read_folder(cache_dir),
        files_soft=soft,
        files_hard=hard,
        python=sys.version_info[:3],
        libraries=read_libraries("kvota"),
        port=port,
        port_error=port_error(port),
        clock_source=_text(
            root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
        ).strip(),
        unix_s=time.time(),
    )


def read_memory(root: Path = _ROOT) -> Memory:
    usable, source = memory_limit(root / "sys/fs/cgroup", root / "proc/self/cgroup")
    events = _counters(root / "sys/fs/cgroup/memory.events")
    if "oom_kill" not in events:  # control groups, version 1
        events = _counters(root / "sys/fs/cgroup/memory/memory.oom_control")
    return Memory(
        usable=usable,
        usable_from=source,
        total=psutil.virtual_memory().total,
        swap_used=psutil.swap_memory().used,
        num_oom_kills=events.get("oom_kill", 0),
    )


def read_cores(root: Path, environment: Mapping[str, str]) -> Cores:
    group = root / "sys/fs/cgroup"
    stat = _counters(group / "cpu.stat") or _counters(group / "cpu/cpu.stat")
    periods = stat.get("nr_periods", 0)
    return Cores(
        allowed=_allowed_cores(),
        quota=cores_quota(group, root / "proc/self/cgroup"),
        throttled_share=stat.get("nr_throttled", 0) / periods if periods else 0.0,
        flags=cpu_flags(_text(root / "proc/cpuinfo")),
        architecture=platform.machine(),
        threads_asked={name: environment[name] for name in THREAD_VARIABLES if name in environment},
    )


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Of the first processor of a /proc/cpuinfo: `flags` on x86, `Features` on Arm."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def read_folder(path: Path) -> Folder:
    """Whether models can be kept there. Makes no folder: the nearest one that exists answers."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
        with TemporaryFile(dir=there):
            return Folder(path=str(path), free_bytes=free)
    except OSError as error:
        return Folder(path=str(path), error=error.strerror or str(error))


def read_libraries(package: str) -> tuple[Library, ...]:
    """What `package` needs, extras aside, and what of it is installed."""
    try:
        needed = requires(package) or []
    except PackageNotFoundError:
        return ()
    found = []
    for line in needed:
        name = re.match(r"[\w.-]+", line)
        if name is None or "extra ==" in line:
            continue
        least = re.search(r">=\s*([\d.]+)", line)
        found.append(
            Library(name=name[0], installed=_version(name[0]), least=least[1] if least else "")
        )
    return tuple(found)


def port_error(port: int, host: str = "127.0.0.1") -> str | None:
    """Why `port` cannot be listened on now; None when it can."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _open_files() -> tuple[int | None, int | None]:
    try:
        # Not on Windows; so it cannot be at the top.
        import resource
    except ImportError:
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    return None if soft == endless else soft, None if hard == endless else hard


def _allowed_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def _counters(file: Path) -> dict[str, int]:
    """Lines of "name number"."""
    pairs = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
