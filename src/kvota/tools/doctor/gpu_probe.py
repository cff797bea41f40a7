"""Asking nvidia-smi. Where it is not installed there are no GPUs to speak of."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvota.tools.doctor.gpu import QUERY, Gpus, parse_gpus, parse_matrix

TIMEOUT_S: Final = 20.0  # a driver that initialises all cards takes some seconds
_SHM: Final = Path("/dev/shm")


def read_gpus(environment: Mapping[str, str], program: str = "nvidia-smi") -> Gpus:
    if shutil.which(program) is None:
        return Gpus()
    listed, error = _ask(program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    if error is not None:
        return Gpus(error=error)
    gpus = parse_gpus(listed)
    several = len(gpus) > 1
    return Gpus(
        gpus=gpus,
        links=parse_matrix(_ask(program, "topo", "-m")[0]) if several else {},
        peers=parse_matrix(_ask(program, "topo", "-p2p", "r")[0]) if several else {},
        shm_bytes=shutil.disk_usage(_SHM).total if _SHM.exists() else None,
        variables={name: value for name, value in environment.items() if name.startswith("NCCL_")},
    )


def _ask(*command: str) -> tuple[str, str | None]:
    """What it printed, and what it said when it failed (it says that on either stream)."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi did not answer within {TIMEOUT_S:g} s"
    except OSError as error:
        return "", f"nvidia-smi cannot be run: {error.strerror}"
    if ended.returncode != 0:
        return "", ended.stderr.strip() or ended.stdout.strip() or "nvidia-smi failed"
    return ended.stdout, None
