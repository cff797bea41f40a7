"""How long a step takes: the roofline (Williams et al., 2009), with its bound named.

    t = max(operations / compute, bytes / bandwidth) + network + overhead

operations  2 × (active parameters) for every token, the head only for tokens that are sampled,
            and attention: one pair of positions costs `attention_flops_per_pair` in each layer
bytes       the weights once a step (of experts those that some token takes), the KV that is read
            by every decoding sequence and written for every token
network     two all-reduces a layer of a step's hidden states in 16 bits, each moving
            2·(n − 1)/n of them over the link of every device
overhead    what a step costs whatever is in it, and on a CPU every layer and decoding sequence
"""

from dataclasses import dataclass
from enum import StrEnum

from kvota.kv.layout import CacheType
from kvota.tools.plan.hardware import Hardware
from kvota.tools.plan.matrices import Matrix, Role
from kvota.tools.plan.methods import Method
from kvota.tools.plan.shape import ModelShape

_HIDDEN_BYTES = 2
_REDUCES_PER_LAYER = 2


class Bound(StrEnum):
    """What a step waits for most."""

    MEMORY = "memory bandwidth"
    COMPUTE = "compute"
    NETWORK = "the link between devices"
    OVERHEAD = "overhead of a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The work of one forward pass. Means, so they need not be whole."""

    prompt_tokens: float = 0.0  # of prompts that are being read
    prompt_context: float = 0.0  # tokens before the middle one of them
    num_decoding: float = 0.0
    decode_context: float = 0.0  # tokens before each of those
    num_prompts_ended: float = 0.0  # that get their first token from it

    @property
    def num_tokens(self) -> float:
        return self.prompt_tokens + self.num_decoding


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds, each of the four."""

    compute_s: float
    memory_s: float
    network_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        return max(self.compute_s, self.memory_s) + self.network_s + self.overhead_s

    @property
    def bound(self) -> Bound:
        waits = {
            Bound.MEMORY: self.memory_s,
            Bound.COMPUTE: self.compute_s,
            Bound.NETWORK: self.network_s,
            Bound.OVERHEAD: self.overhead_s,
        }
        return max(waits, key=waits.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One replica: a model in one storage on `tensor_parallel` devices."""

    shape: ModelShape
    matrices: tuple[Matrix, ...]
    method: Method
    hardware: Hardware
    tensor_parallel: int = 1
    cache_type: CacheType = CacheType.F16

    def time(self, step: Step) -> StepTime:
        efficiency = self.hardware.efficiency
        rate = self.hardware.compute[self.method.arithmetic] * efficiency.compute
        return StepTime(
            compute_s=self._operations(step) / self.tensor_parallel / rate,
            memory_s=self._bytes(step) / (self.hardware.bandwidth * efficiency.memory),
            network_s=self._network_s(step),
            overhead_s=self._overhead_s(step),
        )

    def _overhead_s(self, step: Step) -> float:
        efficiency = self.hardware.efficiency
        per_layer = efficiency.layer_s + efficiency.sequence_layer_s * step.num_decoding
        return efficiency.step_overhead_s + self.shape.num_layers * per_layer

    def _operations(self, step: Step) -> float:
        sampled = step.num_decoding + step.num_prompts_ended
        products = 0.0
        for matrix in self.matrices:
            if matrix.role in (Role.LAYER, Role.ROUTER):
                products += 2 * matrix.num_active_params * step.num_tokens
            elif matrix.role is Role.HEAD:
                products += 2 * matrix.num_active_params * sampled
        pairs = step.prompt_tokens * self.shape.attended(step.prompt_context)
        pairs += step.num_decoding * self.shape.attended(step.decode_context)
        return products + pairs * self.shape.attention_flops_per_pair

    def _bytes(self, step: Step) -> float:
        """On each device."""
        layout = self.shape.kv_layout(self.cache_type, tensor_parallel=self.tensor_parallel)
        read = step.num_decoding * layout.bytes_of(max(1, round(step.decode_context)))
        written = step.num_tokens * layout.bytes_per_token
        return self._weight_bytes(step) + read + written

    def _weight_bytes(self, step: Step) -> float:
        is_tied = self.shape.tied_embeddings
        num_bytes = 0.0
        for matrix in self.matrices:
            if matrix.role is Role.EMBEDDING and not is_tied:
                continue  # a row a token: nothing beside the rest
            stored = self.method.num_bytes(matrix, is_tied=is_tied)
            held = matrix.share_held(self.tensor_parallel, self.shape.num_kv_heads)
            num_bytes += stored * held * matrix.share_read(step.num_tokens)
        return num_bytes

    def _network_s(self, step: Step) -> float:
        devices = self.tensor_parallel
        if devices == 1 or self.hardware.link is None:
            return 0.0
        moved = 2 * (devices - 1) / devices * step.num_tokens
        moved *= self.shape.hidden_size * _HIDDEN_BYTES
        once = moved / self.hardware.link + self.hardware.efficiency.collective_s
        return _REDUCES_PER_LAYER * self.shape.num_layers * once
