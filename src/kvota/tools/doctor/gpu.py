"""NVIDIA GPUs, as nvidia-smi and the kernel describe them. Parsers and judgement, both pure.

kvota's own engine runs on CPUs; this is for whoever serves with vLLM behind its gateway. What is
read, in the words of `nvidia-smi --help-query-gpu`, `nvidia-smi topo --help` and NCCL's
documentation of its environment variables:

    nvidia-smi --query-gpu=… --format=csv,noheader,nounits      one line a GPU
    nvidia-smi topo -m       how two GPUs are connected: NV12, PIX, PXB, PHB, NODE, SYS
    nvidia-smi topo -p2p r   whether one can read the other's memory: OK, CNS, GNS, TNS, NS
"""

import re
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Final

import msgspec

from kvota.sizing.memory import size
from kvota.tools.doctor.finding import Finding, Level, ok

QUERY: Final = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "compute_mode",
    "mig.mode.current",
)
MIB: Final = 2**20
HOT_C: Final = 87  # most data-centre cards slow down a little above
SHM_LEAST_BYTES: Final = 2**30  # of /dev/shm, through which NCCL passes what cannot go directly
USED_FINE: Final = 0.05
_STYLES: Final = re.compile(r"\x1b\[[0-9;]*m")  # topo underlines its header, even into a pipe
_WHY_NO_P2P: Final = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it (different root complexes, or ACS in a guest)",
    "NS": "it is not supported",
    "DR": "a driver setting disables it",
    "U": "the driver does not know",
}
_NCCL_OFF: Final = {
    "NCCL_P2P_DISABLE": "GPUs talk through host memory instead of directly",
    "NCCL_SHM_DISABLE": "GPUs of one machine talk through the network",
    "NCCL_IB_DISABLE": "machines talk over TCP even where there is InfiniBand",
}


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are bytes. None: the driver does not say."""

    index: int
    name: str
    driver: str
    total: int | None
    used: int | None
    celsius: int | None
    compute_mode: str
    mig: str


Matrix = Mapping[tuple[int, int], str]
"""(GPU, other GPU) → a word of nvidia-smi."""


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """What there is. `error`: what nvidia-smi said when it failed. `shm_bytes`: of /dev/shm."""

    gpus: tuple[Gpu, ...] = ()
    links: Matrix = {}
    peers: Matrix = {}
    error: str | None = None
    shm_bytes: int | None = None
    variables: Mapping[str, str] = {}


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The lines of the query above. Lines of another form are passed over."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(QUERY) or not fields[0].isdigit():
            continue
        index, name, driver, total, used, celsius, mode, mig = fields
        found.append(
            Gpu(
                index=int(index), name=name, driver=driver, total=_mib(total), used=_mib(used),
                celsius=_number(celsius), compute_mode=mode, mig=mig,
            )
        )  # fmt: skip
    return tuple(found)


def parse_matrix(text: str) -> dict[tuple[int, int], str]:
    """GPU against GPU, of `topo -m` or `topo -p2p r`; network cards and affinities left out."""
    lines = [_STYLES.sub("", line) for line in text.splitlines()]
    header = next((line.split() for line in lines if line.split()[:1] == ["GPU0"]), [])
    columns = [_index(name) for name in header if _index(name) is not None]
    cells: dict[tuple[int, int], str] = {}
    for line in lines:
        name, *values = line.split() or [""]
        row = _index(name)
        if row is None or values[:1] == ["GPU1"] or len(values) < len(columns):
            continue
        for column, value in zip(columns, values, strict=False):
            if column is not None and column != row:
                cells[row, column] = value
    return cells


def examine_gpus(found: Gpus) -> list[Finding]:
    """Nothing to say but that there are none, where there are none."""
    if found.error is not None:
        return [_broken(found.error)]
    if not found.gpus:
        return [ok("gpu", "none; kvota's engine runs on the CPU")]
    return [
        *(_gpu(one) for one in found.gpus),
        *_drivers(found.gpus),
        *(_together(found) if len(found.gpus) > 1 else ()),
    ]


def _broken(error: str) -> Finding:
    return Finding(
        name="gpu driver",
        level=Level.PROBLEM,
        said=error.strip().splitlines()[0] if error.strip() else "nvidia-smi failed",
        means="no process can use a GPU until the driver answers",
        change="load the driver (`modprobe nvidia`), restart after an update of it, or start the "
        "container with --gpus all",
        source="nvidia-smi",
    )


def _gpu(one: Gpu) -> Finding:
    name = f"gpu {one.index}"
    total, used = one.total, one.used
    memory = "" if total is None or used is None else f", {size(used)} of {size(total)} in use"
    said = f"{one.name}, driver {one.driver}{memory}"
    if one.celsius is not None and one.celsius >= HOT_C:
        return Finding(
            name=name, level=Level.PROBLEM, said=f"{said}, {one.celsius} °C",
            means="it lowers its clock to stay alive: every step takes longer",
            change="air; `nvidia-smi -q -d PERFORMANCE` shows the reason for the clock",
            source="nvidia-smi",
        )  # fmt: skip
    if one.compute_mode == "Prohibited":
        return Finding(
            name=name, level=Level.PROBLEM, said=f"{said}, compute mode Prohibited",
            means="no process may compute on it", change=f"`nvidia-smi -i {one.index} -c DEFAULT`",
            source="nvidia-smi",
        )  # fmt: skip
    if total and used is not None and used > USED_FINE * total:
        return Finding(
            name=name, level=Level.NOTE, said=said,
            means="memory that a new server cannot have; fine if a server runs there already",
            change="`nvidia-smi` lists the processes; lower gpu_memory_utilization for company",
            source="nvidia-smi",
        )  # fmt: skip
    return ok(name, said, "nvidia-smi")


def _drivers(gpus: tuple[Gpu, ...]) -> Iterable[Finding]:
    if len({one.name for one in gpus}) > 1:
        yield Finding(
            name="gpus differ", level=Level.NOTE,
            said=", ".join(sorted({one.name for one in gpus})),
            means="tensor parallel over different cards runs at the pace of the slowest",
            change="a server for each kind, and a gateway in front",
            source="nvidia-smi",
        )  # fmt: skip


def _together(found: Gpus) -> Iterable[Finding]:
    """What matters to a model that is spread over several GPUs."""
    yield _peers(found)
    if found.shm_bytes is not None and found.shm_bytes < SHM_LEAST_BYTES:
        yield Finding(
            name="shared memory", level=Level.PROBLEM, said=f"/dev/shm has {size(found.shm_bytes)}",
            means="NCCL fails or hangs when tensor parallel begins",
            change="start the container with --ipc=host or --shm-size 16g",
            source="/dev/shm",
        )  # fmt: skip
    for name, meaning in _NCCL_OFF.items():
        if found.variables.get(name, "0") not in ("", "0"):
            yield Finding(
                name="nccl", level=Level.NOTE, said=f"{name}={found.variables[name]}",
                means=meaning, change=f"unset {name}, unless it is there for a known fault",
                source="environment",
            )  # fmt: skip


def _peers(found: Gpus) -> Finding:
    bad = {
        word for pair, word in found.peers.items() if word not in ("OK", "X") and pair[0] < pair[1]
    }
    far = [pair for pair in combinations(range(len(found.gpus)), 2) if _is_far(found.links, pair)]
    said = ", ".join(sorted(set(found.links.values()))) or "not known"
    if bad:
        reasons = "; ".join(_WHY_NO_P2P.get(word, word) for word in sorted(bad))
        return Finding(
            name="gpu links", level=Level.NOTE, said=f"{said}, no peer access: {reasons}",
            means="every layer's exchange takes the way through host memory",
            change="pipeline parallel or one replica for each GPU instead of tensor parallel; in "
            "a guest: pass the PCIe topology through and turn ACS off",
            source="nvidia-smi topo -p2p r",
        )  # fmt: skip
    if far:
        return Finding(
            name="gpu links", level=Level.NOTE, said=f"{said}; {len(far)} pairs across sockets",
            means="tensor parallel over the link between sockets is slow",
            change="CUDA_VISIBLE_DEVICES: a group within one socket for each server",
            source="nvidia-smi topo -m",
        )  # fmt: skip
    return ok("gpu links", f"{said}, peer access", "nvidia-smi topo")


def _is_far(links: Matrix, pair: tuple[int, int]) -> bool:
    return links.get(pair) == "SYS"


def _index(name: str) -> int | None:
    match = re.fullmatch(r"GPU(\d+)", name)
    return int(match[1]) if match else None


def _mib(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number * MIB


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
