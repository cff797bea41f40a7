"""The control groups that bound this process: its container's, its service's, and those above.

A container shows its own group as the root of the tree. Without one, a service's limit (systemd's
MemoryMax, CPUQuota) is that of its group or of one above it. Version 2 of the interface has one
tree; version 1 has one for each controller, with other names for the files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    folder: Path
    version: int
    source: str  # what to call a limit that is found here


def own_groups(
    controller: str, cgroup: Path = CGROUP, own: Path = OWN_GROUPS
) -> Iterator[ControlGroup]:
    """Every group whose limits of `controller` ("memory", "cpu") may hold for this process."""
    yield ControlGroup(cgroup, 2, "the container's limit")
    yield ControlGroup(cgroup / controller, 1, "the container's limit")
    for line in read(own).splitlines():  # hierarchy:controllers:/path
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, version = cgroup, 2
        elif controller in controllers.split(","):
            root, version = cgroup / controller, 1
        else:
            continue
        group = root / path.strip("/")
        for above in (group, *group.parents):
            if above == root or not above.is_relative_to(root):
                break
            yield ControlGroup(above, version, "this service's limit")


def cores_quota(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> float | None:
    """Cores' worth of time that the tightest group grants; None: no group sets a quota."""
    quotas = [_cores(group) for group in own_groups("cpu", cgroup, own)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _cores(group: ControlGroup) -> float | None:
    """`cpu.max` holds "quota period" in microseconds, or "max period" without a limit."""
    if group.version == 2:
        fields = read(group.folder / "cpu.max").split()
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        fields = [read(group.folder / name).strip() for name in names]
    if len(fields) != 2 or not all(field.isdigit() for field in fields):
        return None  # no such file, "max", or -1
    return int(fields[0]) / int(fields[1])


def read(file: Path) -> str:
    """The file's text, or nothing where it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
