"""One configuration worked out: does it fit, how many requests at once, how fast.

Requests at once: the largest number for which KV holds that many typical requests at their full
length and both targets hold (`pace.py`).
"""

import math
from dataclasses import dataclass
from typing import Final

from kvota.core.errors import ConfigError, InsufficientMemory
from kvota.kv.layout import CacheType
from kvota.sizing.memory import draw_bill, size
from kvota.sizing.vllm import BLOCK_SIZE as VLLM_BLOCK_SIZE
from kvota.sizing.vllm import kv_memory, utilization
from kvota.tools.plan.footprint import (
    PROCESS_BYTES,
    StepLimits,
    check_parallel,
    device_weights,
    resident_weights,
    stored_bytes,
    vllm_bill,
)
from kvota.tools.plan.hardware import Hardware
from kvota.tools.plan.matrices import Matrix, matrices_of
from kvota.tools.plan.methods import Method
from kvota.tools.plan.pace import Pace, Pacing, Target, largest
from kvota.tools.plan.roofline import Roofline, Step
from kvota.tools.plan.shape import ModelShape
from kvota.tools.plan.workload import Workload

OWN_BLOCK_SIZE: Final = 32  # tokens: OpenVINO's CPU kernel
KV_BUDGET_RATIO: Final = 0.85
HEADROOM: Final = 0.7  # of what a replica can, for bursts and for the line to empty again
_BATCHED_TOKENS: Final = (8192, 4096, 2048, 1024, 512)
_SMALL_BATCHED_TOKENS: Final = (2048, 1024, 512)
_OWN_BATCHED_TOKENS: Final = (512,)  # kvota's default
_GPU_SEQS: Final = 256  # vLLM's default, for which it reserves logits
GPU_CACHE_TYPES: Final = (CacheType.F16, CacheType.F8)
CPU_CACHE_TYPES: Final = (CacheType.F16, CacheType.U8, CacheType.F32)
_LARGE_DEVICE: Final = 70 * 2**30  # from here on vLLM's default step is 8192 tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """What can be turned."""

    method: Method
    tensor_parallel: int = 1
    cache_type: CacheType = CacheType.F16


@dataclass(frozen=True, slots=True)
class MemoryLine:
    num_bytes: int
    what: str
    known_from: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The bill of one device. `lines` add up to `kv_bytes`, the last of them."""

    lines: tuple[MemoryLine, ...]
    weight_bytes: int
    kv_bytes: int
    block_size: int
    utilization: float | None = None  # vLLM's gpu_memory_utilization


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One configuration, worked out."""

    shape: ModelShape
    hardware: Hardware
    workload: Workload
    choice: Choice
    stored_bytes: int  # the weights of the whole model
    memory: Memory
    kv_bytes_per_token: int  # on each device
    max_num_batched_tokens: int
    max_model_len: int
    num_typical: int  # typical requests at their full length that KV holds at once
    num_longest: int  # the same of max_model_len
    alone: Pace
    loaded: Pace  # the most that keeps the targets that one request keeps
    limited_by: str  # what sets the concurrency of `loaded`

    @property
    def misses(self) -> tuple[Target, ...]:
        return self.alone.misses(self.workload)

    @property
    def users_per_replica(self) -> int:
        return max(1, math.floor(HEADROOM * self.loaded.concurrency))

    @property
    def replicas(self) -> int:
        """For all users. One where a target is missed: more of them make no request faster."""
        if self.misses:
            return 1
        return -(-self.workload.users // self.users_per_replica)

    @property
    def num_devices(self) -> int:
        return self.replicas * self.choice.tensor_parallel

    @property
    def pacing(self) -> Pacing:
        """How fast a replica is with any number of requests in flight."""
        roofline = self._configuration.roofline(matrices_of(self.shape))
        return Pacing(roofline, self.workload, self.max_num_batched_tokens)

    def num_held(self, num_tokens: int) -> int:
        """Requests of so many tokens, prompt and answer, that KV holds at once."""
        return self._configuration.num_held(self.memory, num_tokens)

    @property
    def _configuration(self) -> "_Configuration":
        return _Configuration(self.shape, self.hardware, self.workload, self.choice)


def work_out(shape: ModelShape, hardware: Hardware, workload: Workload, choice: Choice) -> Plan:
    """Raises InsufficientMemory when it does not fit, ConfigError when it cannot be."""
    check_parallel(shape, choice.tensor_parallel)
    _check_cache_type(hardware, choice.cache_type)
    if not hardware.is_gpu:
        _check_own_engine(shape)
    wanted = workload.longest_tokens
    if wanted is not None and wanted > shape.max_position:
        raise ConfigError(
            f"the longest request has {wanted:,} tokens, but {shape.name} reads at most "
            f"{shape.max_position:,}."
        )
    if workload.typical_tokens > shape.max_position:
        raise ConfigError(
            f"a typical request has {workload.typical_tokens:,} tokens, but {shape.name} reads at "
            f"most {shape.max_position:,}."
        )
    return _Configuration(shape, hardware, workload, choice).plan()


def _check_cache_type(hardware: Hardware, cache_type: CacheType) -> None:
    """Raises ConfigError for a KV type that the engine of this hardware does not have."""
    can = GPU_CACHE_TYPES if hardware.is_gpu else CPU_CACHE_TYPES
    if cache_type not in can:
        engine = "vLLM, which serves on a GPU," if hardware.is_gpu else "kvota's own engine"
        names = ", ".join(one.label for one in can)
        raise ConfigError(f"{engine} keeps no KV in {cache_type.label}: use one of {names}.")


def _check_own_engine(shape: ModelShape) -> None:
    """Raises ConfigError for arithmetic that kvota's CPU engine does not have."""
    lacks = {
        "latent attention": shape.latent is not None,
        "experts": shape.experts is not None,
        "attention sinks": shape.has_sinks,
        "norms after a layer's parts": shape.norms_per_layer > 2,
    }
    missing = [name for name, is_needed in lacks.items() if is_needed]
    if missing:
        raise ConfigError(
            f"kvota's own engine, which serves on a CPU, cannot run {shape.name}: it has no "
            f"{' and no '.join(missing)}. Name a GPU with --hardware."
        )


@dataclass(frozen=True, slots=True)
class _Configuration:
    """The figures of one configuration, while they are worked out."""

    shape: ModelShape
    hardware: Hardware
    workload: Workload
    choice: Choice

    def plan(self) -> Plan:
        matrices = matrices_of(self.shape)
        roofline = self.roofline(matrices)
        chunk = self._chunk(roofline)
        pacing = Pacing(roofline, self.workload, chunk)
        memory, num_typical = self._fitted(matrices, chunk, _GPU_SEQS)
        concurrency, limited_by = pacing.most(num_typical)
        if concurrency > _GPU_SEQS and self.hardware.is_gpu:  # more logits to reserve for
            memory, num_typical = self._fitted(matrices, chunk, concurrency)
            if num_typical < concurrency:
                concurrency, limited_by = pacing.most(num_typical)
        length = self._length(memory)
        return Plan(
            shape=self.shape,
            hardware=self.hardware,
            workload=self.workload,
            choice=self.choice,
            stored_bytes=stored_bytes(matrices, self.choice.method),
            memory=memory,
            kv_bytes_per_token=self._kv_bytes(1),
            max_num_batched_tokens=chunk,
            max_model_len=length,
            num_typical=num_typical,
            num_longest=self.num_held(memory, length),
            alone=pacing.at(1),
            loaded=pacing.at(concurrency),
            limited_by=limited_by,
        )

    def roofline(self, matrices: tuple[Matrix, ...]) -> Roofline:
        return Roofline(
            shape=self.shape,
            matrices=matrices,
            method=self.choice.method,
            hardware=self.hardware,
            tensor_parallel=self.choice.tensor_parallel,
            cache_type=self.choice.cache_type,
        )

    def _chunk(self, roofline: Roofline) -> int:
        """The largest step of prompt tokens that does not hold decodes up beyond the target."""
        sizes = self._chunk_sizes()
        for tokens in sizes:
            if roofline.time(Step(prompt_tokens=tokens)).total_s <= self.workload.tpot_s:
                return tokens
        return sizes[-1]

    def _chunk_sizes(self) -> tuple[int, ...]:
        if not self.hardware.is_gpu:
            return _OWN_BATCHED_TOKENS
        is_large = self.hardware.memory_bytes >= _LARGE_DEVICE
        return _BATCHED_TOKENS if is_large else _SMALL_BATCHED_TOKENS

    def _fitted(
        self, matrices: tuple[Matrix, ...], chunk: int, num_seqs: int
    ) -> tuple[Memory, int]:
        """The bill, and how many typical requests its KV holds."""
        if self.hardware.is_gpu:
            limits = StepLimits(max_num_batched_tokens=chunk, max_num_seqs=num_seqs)
            memory = self._gpu_memory(matrices, limits)
        else:
            memory = self._own_memory(matrices)
        self._require(memory, self.workload.longest_tokens or self.workload.typical_tokens)
        return memory, self.num_held(memory, self.workload.typical_tokens)

    def _require(self, memory: Memory, num_tokens: int) -> None:
        if not self.num_held(memory, num_tokens):
            raise InsufficientMemory(
                f"one request of {num_tokens:,} tokens needs {size(self._kv_bytes(num_tokens))} "
                f"of KV, and {size(memory.kv_bytes)} are left. Lower the longest length, or use "
                "smaller weights, a smaller KV dtype, or more devices."
            )

    def _gpu_memory(self, matrices: tuple[Matrix, ...], limits: StepLimits) -> Memory:
        choice = self.choice
        bill = vllm_bill(
            self.shape,
            self.hardware,
            weight_bytes=device_weights(
                self.shape, matrices, choice.method, choice.tensor_parallel
            ),
            limits=limits,
            cache_type=choice.cache_type,
            tensor_parallel=choice.tensor_parallel,
            longest_tokens=self.workload.longest_tokens or self.shape.max_position,
        )
        share = utilization(bill)
        left = kv_memory(bill, share)
        usable = int(share * bill.device_bytes)
        rows = (
            (bill.device_bytes, "the device", "catalogue"),
            (usable - bill.device_bytes, "CUDA graphs and a margin", f"utilization {share:.2f}"),
            (-bill.weight_bytes, "weights", "computed"),
            (-bill.activation_bytes, "activations", "estimate"),
            (-bill.outside_torch_bytes, "outside torch (NCCL, cuBLAS)", "estimate"),
            (left, "KV", "what is left"),
        )
        lines = tuple(MemoryLine(*row) for row in rows)
        return Memory(
            lines=lines,
            weight_bytes=bill.weight_bytes,
            kv_bytes=left,
            block_size=VLLM_BLOCK_SIZE,
            utilization=share,
        )

    def _own_memory(self, matrices: tuple[Matrix, ...]) -> Memory:
        weights = resident_weights(self.shape, matrices, self.choice.method)
        bill = draw_bill(
            limit_bytes=self.hardware.memory_bytes,
            limit_from=self.hardware.memory_from,
            used_bytes=PROCESS_BYTES + weights,
            weights_bytes=weights,
            kv_budget_ratio=KV_BUDGET_RATIO,
            kv_memory_bytes=None,
            block_size=OWN_BLOCK_SIZE,
            bytes_per_block=self._kv_bytes(OWN_BLOCK_SIZE),
            max_model_len=self.workload.longest_tokens or self.workload.typical_tokens,
        )
        left = bill.limit_bytes - bill.used_bytes - bill.reserve_bytes
        rows = (
            (bill.limit_bytes, "memory this process may use", bill.limit_from),
            (-PROCESS_BYTES, "the process, without a model", "measured once"),
            (-weights, "weights, as the CPU's kernels hold them", "computed"),
            (-bill.reserve_bytes, "reserve for activations", "constant"),
            (bill.kv_budget_bytes - left, "caution", f"kv_budget_ratio {KV_BUDGET_RATIO:g}"),
            (bill.kv_budget_bytes, "KV", "what is left"),
        )
        lines = tuple(MemoryLine(*row) for row in rows)
        return Memory(
            lines=lines,
            weight_bytes=weights,
            kv_bytes=bill.kv_budget_bytes,
            block_size=bill.block_size,
        )

    def _kv_bytes(self, num_tokens: int) -> int:
        """Of one sequence: vLLM gives back what lies outside a window, kvota does not."""
        layout = self.shape.kv_layout(
            self.choice.cache_type, tensor_parallel=self.choice.tensor_parallel
        )
        if self.hardware.is_gpu:
            return layout.bytes_of(num_tokens)
        return layout.bytes_per_block(num_tokens)

    def num_held(self, memory: Memory, num_tokens: int) -> int:
        whole = -(-num_tokens // memory.block_size) * memory.block_size
        return memory.kv_bytes // self._kv_bytes(whole)

    def _length(self, memory: Memory) -> int:
        """As long as was asked; else the model's own limit; else what fits."""
        if self.workload.longest_tokens is not None:
            return self.workload.longest_tokens
        least = self.workload.typical_tokens
        return largest(
            lambda tokens: self.num_held(memory, tokens) > 0, least, self.shape.max_position
        )
