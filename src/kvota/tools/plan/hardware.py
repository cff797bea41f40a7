"""A device that models run on, as a planner sees it: how much it holds, how fast it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Arithmetic(StrEnum):
    """What a matrix product multiplies."""

    F32 = "fp32"
    F16 = "fp16"
    BF16 = "bf16"
    F8 = "fp8"
    I8 = "int8"


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What part of the printed rates real kernels reach. Assumptions, not measurements.

    Of memory bandwidth 0.75 to 0.85 is usual for decoding with CUDA graphs, of compute 0.5 to 0.7
    for long prompts. `IDEAL` gives the hard bound instead. `source` tells readers so.
    """

    memory: float = 0.8
    compute: float = 0.6
    step_overhead_s: float = 0.001  # scheduling, launches, sampling
    layer_s: float = 0.0  # the same that grows with the layers
    sequence_layer_s: float = 0.0  # and with every decoding sequence as well
    collective_s: float = 10e-6  # latency of one all-reduce
    source: str = (
        "The shares are assumptions, usual for vLLM's kernels, not measured on this device. With "
        "them published step times of Llama 3.1 8B on A100 and H100 are met within 5 %, and long "
        "prompts of Llama 2 70B on two A100 (Splitwise) within 15 %."
    )


IDEAL = Efficiency(memory=1.0, compute=1.0, step_overhead_s=0.0, collective_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, or the CPU of this machine. Rates are per second, of bytes and operations."""

    name: str
    title: str
    source: str
    memory_bytes: int
    memory_from: str
    bandwidth: float
    compute: Mapping[Arithmetic, float]
    link: float | None = None  # to the other devices, one direction; None: there are none
    is_gpu: bool = True
    efficiency: Efficiency = Efficiency()

    def can(self, arithmetic: Arithmetic) -> bool:
        return arithmetic in self.compute
