"""How many cores this process may really use."""

import math
import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cores(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Cores in this process's affinity mask, or fewer when its container has a CPU quota.

    A quota of 1.5 cores counts as 2 threads: one too many wastes less than one too few.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = _cgroup_v2_cores(cgroup_root) or _cgroup_v1_cores(cgroup_root)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _cgroup_v2_cores(root: Path) -> float | None:
    """`cpu.max` holds "quota period" in microseconds, or "max period" without a limit."""
    fields = _read(root / "cpu.max").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _cgroup_v1_cores(root: Path) -> float | None:
    quota = _read(root / "cpu" / "cpu.cfs_quota_us").strip()
    period = _read(root / "cpu" / "cpu.cfs_period_us").strip()
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
