"""Where a figure was measured: without it the figure means nothing."""

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

TELLING_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
)


def usable_threads() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, str]:
    """Processor, cores, vector flags, memory and versions."""
    model, flags = _processor()
    return {
        "processor": model,
        "cores": str(usable_threads()),
        "flags": " ".join(flag for flag in TELLING_FLAGS if flag in flags) or "unknown",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "openvino": importlib.metadata.version("openvino"),
        "kvota": importlib.metadata.version("kvota"),
    }


def sentence() -> str:
    own = machine()
    return (
        f"{own['processor']}, {own['cores']} cores ({own['flags']}), {own['memory']}, "
        f"Python {own['python']}, OpenVINO {own['openvino']}"
    )


def _processor() -> tuple[str, frozenset[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    facts = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    return facts.get("model name", platform.machine()), frozenset(facts.get("flags", "").split())
