"""What a planner must know about a model: its sizes, never its weights."""

from dataclasses import dataclass

from kvota.kv.layout import CacheType, HeadKV, KVLayout, LatentKV, LayerGroup


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    kv_rank: int
    query_rank: int | None  # None: queries are not compressed
    nope_size: int
    rope_size: int
    value_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP. `size`: inner width of one expert."""

    num_experts: int
    num_active: int  # of them for each token
    size: int
    shared_size: int = 0  # inner width of all experts that every token takes
    num_dense_layers: int = 0  # the first layers, which keep an ordinary MLP
    has_router_bias: bool = False
    has_expert_bias: bool = False
    has_shared_gate: bool = False  # one number a token, by which the shared experts count


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One decoder-only model. Sizes are element counts."""

    name: str
    origin: str  # where the figures come from
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    vocab_size: int
    max_position: int
    tied_embeddings: bool
    latent: Latent | None = None
    experts: Experts | None = None
    window: int | None = None  # tokens a position of a windowed layer may look back
    windowed_layers: tuple[bool, ...] = ()  # one flag a layer; empty: none
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    has_sinks: bool = False  # one learned number a head (gpt-oss)
    norms_per_layer: int = 2  # vectors of the hidden size
    notes: tuple[str, ...] = ()  # what the reader could not be sure of

    @property
    def num_windowed(self) -> int:
        return sum(self.windowed_layers) if self.window is not None else 0

    def kv_layout(
        self, cache_type: CacheType = CacheType.F16, *, tensor_parallel: int = 1
    ) -> KVLayout:
        """The KV of one device. Raises ConfigError when the heads cannot be spread."""
        return KVLayout(
            groups=self._kv_groups(), cache_type=cache_type, tensor_parallel=tensor_parallel
        )

    def attended(self, num_tokens: float) -> float:
        """Tokens that a position with so many before it looks at, summed over all layers."""
        if self.window is None:
            return self.num_layers * num_tokens
        inside = min(num_tokens, self.window)
        return (self.num_layers - self.num_windowed) * num_tokens + self.num_windowed * inside

    @property
    def attention_flops_per_pair(self) -> int:
        """Of one query position and one it looks at, in one layer: scores and weighted values.

        Latent attention multiplies with the latent row itself, as engines do (absorbed weights).
        """
        if self.latent is not None:
            return 2 * self.num_heads * (2 * self.latent.kv_rank + self.latent.rope_size)
        return 4 * self.num_heads * self.head_size

    def _kv_groups(self) -> tuple[LayerGroup, ...]:
        kv: HeadKV | LatentKV
        if self.latent is not None:
            kv = LatentKV(self.latent.kv_rank, self.latent.rope_size)
        else:
            kv = HeadKV(self.num_kv_heads, self.head_size, self.head_size)
        num_full = self.num_layers - self.num_windowed
        counts = ((num_full, None), (self.num_windowed, self.window))
        return tuple(LayerGroup(kv, number, window) for number, window in counts if number)
