"""How many bytes KV takes: the only place that knows.

One token of one layer is rows: a row of K and a row of V for every KV head, or, with latent
attention, one row that all heads share.

    HeadKV     heads_per_device · (row(key_size) + row(value_size))
    LatentKV   row(latent_size + rope_size), whole on every device
    row(n)     n · bytes_per_element + bytes_per_row

`bytes_per_row` is what a quantized cache keeps beside each row: a scale and a zero point.

Over several devices: tensor parallel splits the KV heads, and more devices than heads means that
heads are repeated, one on each device. A latent row has no heads to split, so every device holds
all of it. Pipeline parallel splits the layers; the stage with most of them is what counts. Data
parallel changes nothing here: a replica has its own requests.

A layer with a sliding window needs the last `window` tokens only. Whether the rest is given back
is the engine's affair: kvota and others whose blocks hold all layers keep everything
(`bytes_per_token`, times the tokens), vLLM frees what lies outside (`bytes_of`).
"""

from dataclasses import dataclass
from enum import Enum

from kvota.core.errors import ConfigError


class CacheType(Enum):
    """How an element of K or V is stored: (bytes per element, bytes beside each row)."""

    F32 = ("f32", 4, 0)
    F16 = ("f16", 2, 0)  # and bf16
    F8 = ("f8", 1, 0)  # one scale for a whole layer: nothing beside a row
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

    def row_bytes(self, num_elements: int) -> int:
        return num_elements * self.bytes_per_element + self.bytes_per_row


@dataclass(frozen=True, slots=True)
class HeadKV:
    """A row of K and a row of V for every KV head: multi-head, grouped-query, multi-query."""

    num_kv_heads: int
    key_size: int
    value_size: int

    def __post_init__(self) -> None:
        if min(self.num_kv_heads, self.key_size, self.value_size) < 1:
            raise ConfigError("KV heads and head size must be at least 1")

    def heads_on(self, devices: int) -> int:
        """KV heads of each device. Raises ConfigError when they cannot be spread evenly."""
        more, less = sorted((self.num_kv_heads, devices), reverse=True)
        if more % less:
            raise ConfigError(
                f"{self.num_kv_heads} KV heads cannot be spread over {devices} "
                "devices; tensor parallel must divide the number of heads or be a multiple of it"
            )
        return max(1, self.num_kv_heads // devices)

    def bytes_on(self, devices: int, stored: CacheType) -> int:
        """One token of one layer, on each of `devices`."""
        rows = stored.row_bytes(self.key_size) + stored.row_bytes(self.value_size)
        return self.heads_on(devices) * rows


@dataclass(frozen=True, slots=True)
class LatentKV:
    """Multi-head latent attention: DeepSeek-V2, arXiv 2405.04434, section 2.1."""

    latent_size: int  # kv_lora_rank
    rope_size: int  # qk_rope_head_dim

    def __post_init__(self) -> None:
        if self.latent_size < 1 or self.rope_size < 0:
            raise ConfigError("the latent size must be at least 1 and the rope size at least 0")

    def bytes_on(self, devices: int, stored: CacheType) -> int:
        """One token of one layer: the same on each device, however many there are."""
        return stored.row_bytes(self.latent_size + self.rope_size)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep KV alike. `window`: tokens a position may look back, None: all."""

    kv: HeadKV | LatentKV
    num_layers: int
    window: int | None = None

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ConfigError(f"a group of layers must have at least 1, got {self.num_layers}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"a sliding window must be at least 1 token, got {self.window}")

    def tokens_kept(self, num_tokens: int) -> int:
        return num_tokens if self.window is None else min(num_tokens, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of a model's KV. All byte counts are for one device."""

    groups: tuple[LayerGroup, ...]
    cache_type: CacheType = CacheType.F16
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("a KV layout needs at least 1 group of layers")
        if min(self.tensor_parallel, self.pipeline_parallel) < 1:
            raise ConfigError("tensor and pipeline parallel must be at least 1")
        if self.pipeline_parallel > self.num_layers:
            raise ConfigError(
                f"{self.num_layers} layers cannot be spread over {self.pipeline_parallel} stages"
            )
        for group in self.groups:
            group.kv.bytes_on(self.tensor_parallel, self.cache_type)

    @staticmethod
    def uniform(
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        cache_type: CacheType = CacheType.F16,
        tensor_parallel: int = 1,
    ) -> "KVLayout":
        """All layers alike, with heads of one size: most models."""
        group = LayerGroup(HeadKV(num_kv_heads, head_size, head_size), num_layers)
        return KVLayout(groups=(group,), cache_type=cache_type, tensor_parallel=tensor_parallel)

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """One token in every layer: what it takes while it lies inside every window."""
        return self.bytes_of(1)

    def bytes_of(self, num_tokens: int) -> int:
        """A sequence of `num_tokens`, where what lies outside a window is given back."""
        return sum(self._group_bytes(group, num_tokens) for group in self.groups)

    def bytes_per_block(self, block_size: int) -> int:
        """A block that holds all layers of its tokens, also those outside a window."""
        return block_size * self.bytes_per_token

    def _group_bytes(self, group: LayerGroup, num_tokens: int) -> int:
        layers_here = -(-group.num_layers // self.pipeline_parallel)
        per_token = group.kv.bytes_on(self.tensor_parallel, self.cache_type)
        return layers_here * per_token * group.tokens_kept(num_tokens)
