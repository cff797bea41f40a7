"""How many bytes KV takes: the only place that knows.

One token of one layer is a row of K and a row of V for every KV head:

    bytes/token = layers · 2 · heads_per_device · (head_size · bytes_per_element + bytes_per_row)

`bytes_per_row` is what a quantized cache keeps beside each row: a scale and a zero point.
With tensor parallel the KV heads are split over the devices; more devices than heads means that
heads are repeated, one on each device. Layers with a sliding window count in full: a block holds
all layers of its tokens, also those that lie outside a window.
"""

from dataclasses import dataclass
from enum import Enum

from kvota.core.errors import ConfigError


class CacheType(Enum):
    """How an element of K or V is stored: (bytes per element, bytes beside each row)."""

    F32 = ("f32", 4, 0)
    F16 = ("f16", 2, 0)
    F8 = ("f8", 1, 0)
    U8 = ("u8", 1, 8)  # OpenVINO CPU, by token: f32 scale and f32 zero point per row

    def __init__(self, label: str, bytes_per_element: int, bytes_per_row: int) -> None:
        self.label = label
        self.bytes_per_element = bytes_per_element
        self.bytes_per_row = bytes_per_row

    @staticmethod
    def named(label: str) -> "CacheType":
        """The type called `label` in settings. Raises ConfigError naming the valid ones."""
        for cache_type in CacheType:
            if cache_type.label == label:
                return cache_type
        names = ", ".join(cache_type.label for cache_type in CacheType)
        raise ConfigError(f"unknown KV cache type {label!r}; use one of {names}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of a model's KV. All byte counts are for one device."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    cache_type: CacheType = CacheType.F16
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_kv_heads, self.head_size, self.tensor_parallel) < 1:
            raise ConfigError("layers, KV heads, head size and tensor parallel must be at least 1")
        more, less = sorted((self.num_kv_heads, self.tensor_parallel), reverse=True)
        if more % less:
            raise ConfigError(
                f"{self.num_kv_heads} KV heads cannot be spread over {self.tensor_parallel} "
                "devices; tensor parallel must divide the number of heads or be a multiple of it"
            )

    @property
    def heads_per_device(self) -> int:
        return max(1, self.num_kv_heads // self.tensor_parallel)

    @property
    def bytes_per_layer_token(self) -> int:
        """K and V of one token in one layer."""
        stored = self.cache_type
        row_bytes = self.head_size * stored.bytes_per_element + stored.bytes_per_row
        return 2 * self.heads_per_device * row_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.bytes_per_layer_token

    def bytes_per_block(self, block_size: int) -> int:
        return block_size * self.bytes_per_token
