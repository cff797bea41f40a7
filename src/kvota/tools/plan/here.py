"""This machine as Hardware: what it may hold, and how fast it is, measured for half a second.

Bandwidth: every usable core reads an array of its own that no cache holds. Compute: f32 products
of numpy on all of them at once. The fastest of many short tries counts. What the engine makes of
those rates was measured once, SmolLM2-135M with int8 weights on two threads of an AVX-512 EPYC:

    a prompt of 512 tokens     198 ms    about 560 G operations/s, where numpy's f32 reached 200
    1, 4, 16, 64 decodes       8.5, 10, 18, 44 ms: beyond the products, 0.15 ms a layer and 7 µs a
                               layer and sequence

So where the CPU has int8 dot products (VNNI), int8 counts as 2.8 times f32; elsewhere the engine
multiplies int8 weights in f32.

It is measured in a process of its own, because the threads of a BLAS wait for each other: on a
machine that does something else as well, they would measure that.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvota.sizing.memory import memory_limit
from kvota.tools.plan.hardware import Arithmetic, Efficiency, Hardware

_STREAM_BYTES: Final = 64 * 2**20  # of each core
_SIDE: Final = 256  # of the square matrices
_PRODUCTS: Final = 8  # at a time: over in milliseconds, before somebody else wants the core
VNNI_GAIN: Final = 2.8
_VNNI_FLAGS: Final = frozenset({"avx512_vnni", "avx_vnni"})
_MEASURE_S: Final = 0.25
_ONE_THREAD: Final[Mapping[str, str]] = {
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}
EFFICIENCY: Final = Efficiency(
    memory=0.8,
    compute=1.0,  # numpy's rate is what real loops reach
    step_overhead_s=0.0,
    layer_s=150e-6,
    sequence_layer_s=7e-6,
    source=(
        "Bandwidth and compute were measured now; what the engine makes of them was measured once, "
        "with SmolLM2-135M in int8 on two threads of an AVX-512 EPYC."
    ),
)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Of all usable cores together, per second."""

    bytes_read: float
    products: float  # f32 operations


def this_machine(measure_s: float = _MEASURE_S) -> Hardware:
    """Measures for about twice `measure_s`. On a busy machine rates come out low."""
    limit_bytes, limit_from = memory_limit()
    rates = _measured_alone(measure_s)
    int8_gain = VNNI_GAIN if _cpu_flags() & _VNNI_FLAGS else 1.0
    return Hardware(
        name="here",
        title=f"this machine ({_usable_cores()} cores)",
        source=f"{platform.machine()}, measured now with numpy{company(_load(), _usable_cores())}",
        memory_bytes=limit_bytes,
        memory_from=limit_from,
        bandwidth=rates.bytes_read,
        compute={Arithmetic.F32: rates.products, Arithmetic.I8: rates.products * int8_gain},
        is_gpu=False,
        efficiency=EFFICIENCY,
    )


def company(load: float, cores: int) -> str:
    """What to add where others wanted more than half of the cores: rates come out low then."""
    if load <= cores / 2:
        return ""
    return f", while others used it (load {load:.1f} on {cores} cores): it is faster when alone"


def _load() -> float:
    """How many processes wanted a core over the last minute."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has none
        return 0.0


def measure(measure_s: float) -> Rates:
    """The rates, in this process. Its BLAS should have one thread."""
    cores = _usable_cores()
    return Rates(bytes_read=_read_rate(cores, measure_s), products=_product_rate(cores, measure_s))


def _measured_alone(measure_s: float) -> Rates:
    command = [sys.executable, "-m", "kvota.tools.plan.here", str(measure_s)]
    ended = subprocess.run(
        command, env={**os.environ, **_ONE_THREAD}, stdout=subprocess.PIPE, check=True
    )
    return msgspec.json.decode(ended.stdout, type=Rates)


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def _read_rate(cores: int, measure_s: float) -> float:
    """Bytes per second that all cores together read from memory."""
    arrays = [np.ones(_STREAM_BYTES // 8, np.int64) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:

        def read_all() -> None:
            list(pool.map(np.bitwise_or.reduce, arrays))

        return cores * _STREAM_BYTES / _least_time(read_all, measure_s)


def _product_rate(cores: int, measure_s: float) -> float:
    """f32 operations per second of matrix products on all cores at the same time.

    At the same time, because two threads of one core share its arithmetic.
    """
    left = np.ones((_SIDE, _SIDE), np.float32)
    outs = [np.empty_like(left) for _ in range(cores)]

    def multiply(out: npt.NDArray[np.float32]) -> None:
        for _ in range(_PRODUCTS):
            np.matmul(left, left, out=out)

    with ThreadPoolExecutor(cores) as pool:
        least_s = _least_time(lambda: list(pool.map(multiply, outs)), measure_s)
    return cores * _PRODUCTS * 2 * _SIDE**3 / least_s


def _least_time(work: Callable[[], object], measure_s: float) -> float:
    """The fastest of the runs that fit into `measure_s`, at least one after a first try."""
    work()
    least = float("inf")
    ends_s = time.perf_counter() + measure_s
    while True:
        started_s = time.perf_counter()
        work()
        ended_s = time.perf_counter()
        least = min(least, ended_s - started_s)
        if ended_s >= ends_s:
            return max(least, 1e-9)


def _cpu_flags(file: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measure(float(sys.argv[1]))))
