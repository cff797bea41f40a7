"""The memory bill: how much KV cache this process may have, and what that is good for.

    memory this process may use        the machine's, or its container's limit if that is lower
    − in use with the weights loaded   measured, not estimated
    − reserve for activations          the step's own working memory
    × kv_budget_ratio                  the operator's caution
    = KV budget → blocks → tokens → requests

The KV cache is allocated once, at start, in whole blocks; nothing else in the process grows with
load beyond the reserve. So a server that has started does not run out of memory later.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvota.core.errors import ConfigError, InsufficientMemory
from kvota.sizing.control_groups import CGROUP, OWN_GROUPS, ControlGroup, own_groups, read

ACTIVATION_RESERVE_BYTES = 500 * 10**6
# Mean prompt plus output of the Azure conversation trace (2023): a typical chat request.
TYPICAL_REQUEST_TOKENS = 1155 + 211

# Of memory.stat: pages of files, and the kernel's own caches, given back when memory is wanted.
_DROPPABLE = ("active_file", "inactive_file", "slab_reclaimable")
_DROPPABLE_IN_VERSION_1 = ("total_active_file", "total_inactive_file")
_WORTH_SAYING = 10**6

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": 2**10,
    "m": 10**6,
    "mb": 10**6,
    "mib": 2**20,
    "g": 10**9,
    "gb": 10**9,
    "gib": 2**30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBill:
    """Where the memory goes. All sizes in bytes."""

    limit_bytes: int
    limit_from: str
    used_bytes: int
    weights_bytes: int
    reserve_bytes: int
    kv_budget_ratio: float
    kv_budget_bytes: int
    kv_fixed_by_hand: bool
    block_size: int  # tokens
    bytes_per_block: int
    num_blocks: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def num_requests(self, num_tokens: int) -> int:
        """How many requests of `num_tokens` fit at once, each in blocks of its own."""
        return self.num_blocks // -(-num_tokens // self.block_size)

    def lines(self) -> list[tuple[str, str, str]]:
        """(amount, what, how it is known) for printing."""
        budget = (
            "fixed by kv_memory"
            if self.kv_fixed_by_hand
            else f"what is left × kv_budget_ratio {self.kv_budget_ratio:g}"
        )
        typical = min(TYPICAL_REQUEST_TOKENS, self.max_model_len)
        return [
            (size(self.limit_bytes), "memory this process may use", self.limit_from),
            (f"− {size(self.used_bytes)}", "in use, model loaded", self._weights_text()),
            (f"− {size(self.reserve_bytes)}", "reserve for activations", "constant"),
            (f"= {size(self.kv_budget_bytes)}", "KV budget", budget),
            (
                f"{self.num_blocks:,}",
                f"KV blocks of {self.block_size} tokens",
                f"{self.num_tokens:,} tokens, {self.bytes_per_block // self.block_size:,} B each",
            ),
            (
                f"{self.num_requests(typical):,}",
                f"typical requests at once ({typical:,} tokens)",
                f"{self.num_requests(self.max_model_len):,} of max_model_len "
                f"{self.max_model_len:,}",
            ),
        ]

    def _weights_text(self) -> str:
        return f"weights {size(self.weights_bytes)}, measured while loading"


def draw_bill(
    *,
    limit_bytes: int,
    limit_from: str,
    used_bytes: int,
    weights_bytes: int,
    kv_budget_ratio: float,
    kv_memory_bytes: int | None,
    block_size: int,
    bytes_per_block: int,
    max_model_len: int,
) -> MemoryBill:
    """Work out the KV budget. `used_bytes` is the process with its weights in memory.

    Raises InsufficientMemory when one request of `max_model_len` does not fit, or when
    `kv_memory_bytes` is more than there is; the message gives the settings that would help.
    """
    left = max(0, limit_bytes - used_bytes - ACTIVATION_RESERVE_BYTES)
    budget = int(left * kv_budget_ratio) if kv_memory_bytes is None else kv_memory_bytes
    if budget > left:
        raise InsufficientMemory(
            f"kv_memory asks for {size(budget)}, but {size(left)} are left of "
            f"{size(limit_bytes)} ({limit_from}) after the model and the reserve for activations."
        )
    if left < bytes_per_block:
        raise InsufficientMemory(
            f"Nothing is left for the KV cache of {size(limit_bytes)} ({limit_from}): the loaded "
            f"model takes {size(used_bytes)}, and {size(ACTIVATION_RESERVE_BYTES)} are the reserve "
            "for activations. Give it more memory (a larger container), smaller --weights or a "
            "smaller model."
        )
    num_blocks = budget // bytes_per_block
    if num_blocks * block_size < max_model_len:
        raise InsufficientMemory(_too_small(num_blocks * block_size, budget, max_model_len))
    return MemoryBill(
        limit_bytes=limit_bytes,
        limit_from=limit_from,
        used_bytes=used_bytes,
        weights_bytes=weights_bytes,
        reserve_bytes=ACTIVATION_RESERVE_BYTES,
        kv_budget_ratio=kv_budget_ratio,
        kv_budget_bytes=budget,
        kv_fixed_by_hand=kv_memory_bytes is not None,
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
    )


def memory_limit(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> tuple[int, str]:
    """Bytes this process may use, and where that figure comes from.

    The lowest of: what the machine has free plus what this process already holds, and the
    limits of the control groups it is in, less what other processes in them hold.
    """
    memory = psutil.virtual_memory()
    free = memory.available + resident_bytes()
    limits = [(free, "free on this machine")]
    for group in own_groups("memory", cgroup, own):
        name = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
        limit = _read_number(group.folder / name)
        if limit is not None and limit < memory.total:
            others = _held_by_others(group)
            limits.append((max(0, limit - others), _less(group.source, others)))
    return min(limits)


def _less(source: str, others: int) -> str:
    return source if others < _WORTH_SAYING else f"{source}, less {size(others)} that others hold"


def _held_by_others(group: ControlGroup) -> int:
    """What the group is charged for, less what it can drop and what is this process's own.

    Files' pages are nobody's here: they are charged to the group, but go when memory is wanted.
    """
    name = "memory.current" if group.version == 2 else "memory.usage_in_bytes"
    charged = _read_number(group.folder / name)
    if charged is None:
        return 0
    stat = dict(line.split() for line in read(group.folder / "memory.stat").splitlines())
    droppable = _DROPPABLE if group.version == 2 else _DROPPABLE_IN_VERSION_1
    dropped = sum(int(stat.get(part, 0)) for part in droppable)
    held = psutil.Process().memory_info()
    own = int(held.rss) - int(getattr(held, "shared", 0))  # shared: of files
    return max(0, charged - dropped - own)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def size(num_bytes: int) -> str:
    """A size for people: "737 KB", "1.53 GB" (powers of ten)."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes} B"


def parse_size(text: str, setting: str) -> int:
    """Bytes of "800MB", "2GiB" or "1.5g". Raises ConfigError naming the setting."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ConfigError(f'{setting} is "{text}", which is no size: write it like 800MB or 2GiB.')
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def _too_small(num_tokens: int, budget: int, max_model_len: int) -> str:
    shorter = f"--max-model-len of at most {num_tokens:,}, " if num_tokens else ""
    return (
        f"The KV budget of {size(budget)} holds {num_tokens:,} tokens, fewer than one request of "
        f"max_model_len {max_model_len:,}. Any one of these helps: {shorter}a "
        "smaller --kv-cache-dtype (u8 is half of f16), or more memory (--kv-memory, "
        "--kv-budget-ratio, a larger container)."
    )


def _read_number(file: Path) -> int | None:
    """None where there is no such file, or it holds "max"."""
    text = read(file).strip()
    return int(text) if text.isdigit() else None
