"""What servers say of their memory, read from their logs and pages. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from kvota.sizing.memory import parse_size
from kvota.tools.top.samples import Samples

TOLERANCE: Final = 0.05
_MIB: Final = 2**20
_GIB: Final = 2**30


class NotSaid(Exception):
    """A server's output lacks a figure; the message says which."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a bill, as planned and as it turned out. Bytes, or a count."""

    what: str
    planned: float
    measured: float
    is_bytes: bool = True

    @property
    def off(self) -> float:
        return self.planned / self.measured - 1

    @property
    def is_near(self) -> bool:
        return abs(self.off) <= TOLERANCE

    def cells(self) -> tuple[str, str, str, str]:
        return self.what, self._shown(self.planned), self._shown(self.measured), f"{self.off:+.1%}"

    def _shown(self, value: float) -> str:
        is_large = self.is_bytes and value >= _MIB
        return f"{value / _MIB:,.1f} MiB" if is_large else f"{value:,.0f}"


def table(rows: list[Row]) -> str:
    lines = ["| | planned | measured | off |", "|---|--:|--:|--:|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.cells())} |" for row in rows), ""])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBill:
    """The bill that `kvota node` prints, to three digits, and what its metrics page says."""

    limit_bytes: int
    used_bytes: int
    weights_bytes: int
    kv_budget_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    kv_tokens: int
    resident_bytes: int


def node_bill(printed: str, metrics: str) -> NodeBill:
    """Raises NotSaid."""
    samples = Samples.parse(metrics)
    return NodeBill(
        limit_bytes=_printed(printed, r"([\d.]+ [KMG]?B) +memory this process may use"),
        used_bytes=_printed(printed, r"([\d.]+ [KMG]?B) +in use, model loaded"),
        weights_bytes=_printed(printed, r"weights ([\d.]+ [KMG]?B), measured"),
        kv_budget_bytes=_printed(printed, r"([\d.]+ [KMG]?B) +KV budget"),
        kv_bytes_per_token=_printed(printed, r"tokens, ([\d,]+ B) each"),
        max_model_len=_printed(printed, r"of max_model_len ([\d,]+)"),
        kv_tokens=_kv_tokens(samples),
        resident_bytes=round(_sample(samples, "process_resident_memory_bytes")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCpuBill:
    """What vLLM says of one start on a CPU. `kv_bytes` is what it was told to take for KV."""

    checkpoint_bytes: float  # to a hundredth of a GiB
    kv_bytes: int
    kv_tokens: int
    worker_bytes: int  # resident memory of the process that holds weights and KV


def vllm_cpu_bill(log: str, metrics: str, worker_bytes: int) -> VllmCpuBill:
    """Raises NotSaid."""
    samples = Samples.parse(metrics)
    found = re.search(r"Checkpoint size: ([\d.]+) GiB", log)
    if found is None:
        raise NotSaid("vLLM's log does not say how large the checkpoint is")
    kv_bytes = samples.label("vllm:cache_config_info", "kv_cache_memory_bytes")
    if kv_bytes is None or not kv_bytes.isdigit():
        raise NotSaid("vLLM's metrics page does not say how much memory is for KV")
    return VllmCpuBill(
        checkpoint_bytes=float(found[1]) * _GIB,
        kv_bytes=int(kv_bytes),
        kv_tokens=_kv_tokens(samples),
        worker_bytes=worker_bytes,
    )


def _kv_tokens(samples: Samples) -> int:
    num_blocks, block_size = (
        samples.label("vllm:cache_config_info", label) for label in ("num_gpu_blocks", "block_size")
    )
    if num_blocks is None or block_size is None:
        raise NotSaid("the metrics page does not say how many KV blocks there are")
    return int(num_blocks) * int(block_size)


def _printed(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise NotSaid(f"the node printed no bill with {pattern!r}")
    return parse_size(found[1].replace(",", ""), pattern)


def _sample(samples: Samples, name: str) -> float:
    value = samples.total(name)
    if value is None:
        raise NotSaid(f"the metrics page has no {name}")
    return value
