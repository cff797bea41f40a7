"""How many cores this process may really use."""

import math
import os
from pathlib import Path

from kvota.sizing.control_groups import CGROUP, OWN_GROUPS, cores_quota


def usable_cores(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> int:
    """Cores in this process's affinity mask, or fewer when its container or service has a quota.

    A quota of 1.5 cores counts as 2 threads: one too many wastes less than one too few.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cores_quota(cgroup, own)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))
