"""What a model type of Hugging Face implies, beside what its config states.

Sources: the classes of Transformers, of which a config may leave out whatever is as their defaults
say. Models with eyes or ears do that with their language model; `defaults` are for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a model type implies. `defaults`: fields that a text_config may leave out."""

    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    norms_per_layer: int = 2
    # "none" · "all" layers · "even" ones · "pattern": all but every n-th · "late" ·
    # "chunks": all but every fourth, which looks back to the beginning of a chunk
    windows: str = "none"
    head_size: int | None = None  # where the class has a default of its own
    has_sinks: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)


def _sizes(hidden: int, mlp: int, vocab: int, positions: int, **more: int) -> Mapping[str, int]:
    common = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }
    return MappingProxyType(common | more)


_LLAMA: Final = _sizes(
    4096, 11008, 32_000, 2048, num_hidden_layers=32, num_attention_heads=32
)  # and as many KV heads as heads
_MISTRAL: Final = _sizes(
    4096,
    14336,
    32_000,
    131_072,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
_GEMMA_2: Final = _sizes(
    2304,
    9216,
    256_000,
    8192,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    sliding_window=4096,
)
_GEMMA_3: Final = MappingProxyType(
    dict(_GEMMA_2) | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
)
_QWEN_2: Final = Family(qkv_bias=True, windows="late")

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": Family(defaults=_LLAMA),
        "mistral": Family(windows="all", defaults=_MISTRAL),
        "mixtral": Family(windows="all"),
        "qwen2": _QWEN_2,
        "qwen2_vl": _QWEN_2,
        "qwen2_vl_text": _QWEN_2,
        "qwen2_5_vl": _QWEN_2,
        "qwen2_5_vl_text": _QWEN_2,
        "qwen2_moe": Family(qkv_bias=True, windows="late"),
        "qwen3": Family(qk_norm=True, windows="late"),
        "qwen3_vl_text": Family(qk_norm=True),
        "qwen3_moe": Family(qk_norm=True, windows="late"),
        "qwen3_vl_moe_text": Family(qk_norm=True),
        "phi3": Family(windows="all"),
        "gemma": Family(tied_embeddings=True, head_size=256),
        "gemma2": Family(
            tied_embeddings=True,
            norms_per_layer=4,
            windows="even",
            head_size=256,
            defaults=_GEMMA_2,
        ),
        "gemma3_text": Family(
            tied_embeddings=True,
            norms_per_layer=4,
            windows="pattern",
            qk_norm=True,
            head_size=256,
            defaults=_GEMMA_3,
        ),
        "llama4_text": Family(windows="chunks"),
        "deepseek_v2": Family(),
        "deepseek_v3": Family(),
        "kimi_k2": Family(),
        "gpt_oss": Family(qkv_bias=True, has_sinks=True, windows="even"),
    }
)
