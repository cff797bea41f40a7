"""From the keys of a GGUF header to an Architecture.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#standardized-key-value-pairs.
What a key means where that page is silent is what llama.cpp does with it.
"""

import math
from collections.abc import Mapping
from typing import Any

from kvota.core.errors import ModelError
from kvota.formats.settings import Settings
from kvota.model.architecture import Architecture, Rope, RopeKind
from kvota.model.inventory import check_num_layers, check_sizes, unsupported
from kvota.model.rope_config import stretched

# ggml's architecture name to ours. Mistral's models come as "llama" or, since 2025, "mistral3".
FAMILIES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "mistral",
    "mistral3": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
}
# The families whose q and k rows llama.cpp stores interleaved, pair by pair.
INTERLEAVED = frozenset({"llama", "mistral", "smollm3"})

_DEFAULT_THETA = 10000.0  # llama.cpp's, when the file does not say
_SMOLLM3_PERIOD = 4  # every so many layers one has no rope; no key says so, llama.cpp fixes it
# Keys that change the computation in ways the graph does not know, with their harmless values.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0,),
    "residual_scale": (0,),
    "embedding_scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.temperature_scale": (0,),
    "attention.max_alibi_bias": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1, -1),
}


def architecture_of(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Mapping[str, tuple[float, ...]],
    origin: str,
) -> Architecture:
    """The architecture that a GGUF header describes.

    `shapes` are those of the file's tensors under Hugging Face's names: biases, an untied output
    layer and the size of the vocabulary show there and nowhere else. `rope_factors` are the values
    of `rope_freqs.weight`, `rope_factors_short.weight` and `rope_factors_long.weight`, where the
    file has them and its family uses them.

    Raises UnsupportedModel for what kvota cannot run, ModelError for a key that makes no sense.
    """
    family = _family(metadata, origin)
    keys = Settings(metadata, origin, prefix=f"{metadata['general.architecture']}.")
    _check_neutral(keys)
    hidden_size, num_heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    head_size = _head_size(keys, hidden_size, num_heads)
    rope = _rope(keys, family, head_size, rope_factors)
    window = keys.whole("attention.sliding_window", 0) or None
    num_layers = keys.whole("block_count")
    check_num_layers(num_layers, origin)
    first = "model.layers.0."
    architecture = Architecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=keys.whole("attention.head_count_kv", num_heads),
        head_size=head_size,
        mlp_size=keys.whole("feed_forward_length"),
        vocab_size=_vocab_size(shapes, origin),
        max_position=_max_position(keys, rope),
        rms_epsilon=keys.positive("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tied_embeddings="lm_head.weight" not in shapes,
        qkv_bias=f"{first}self_attn.q_proj.bias" in shapes,
        output_bias=f"{first}self_attn.o_proj.bias" in shapes,
        mlp_bias=f"{first}mlp.down_proj.bias" in shapes,
        qk_norm=f"{first}self_attn.q_norm.weight" in shapes or family == "qwen3",
        sliding_window=window,
        sliding_layers=_sliding_layers(keys, num_layers) if window else None,
        rope_layers=_rope_layers(num_layers) if family == "smollm3" else None,
    )
    check_sizes(architecture, origin)
    return architecture


def _family(metadata: Mapping[str, Any], origin: str) -> str:
    """Our name of the architecture, once the file is known to hold a model of it."""
    if metadata.get("general.type", "model") != "model":
        raise unsupported(
            origin, f"a GGUF of type {metadata['general.type']!r} is not supported.", ["model"]
        )
    arch = str(metadata.get("general.architecture"))
    if arch not in FAMILIES:
        raise unsupported(origin, f"the GGUF architecture {arch!r} is not supported.", FAMILIES)
    return FAMILIES[arch]


def _check_neutral(keys: Settings) -> None:
    for name, neutral in _NEUTRAL.items():
        value = keys.get(name)
        if value is not None and value not in neutral:
            raise unsupported(
                keys.origin,
                f"the key {name} = {value!r} asks for a computation kvota lacks.",
                ["dense models without such scaling or experts"],
            )


def _head_size(keys: Settings, hidden_size: int, num_heads: int) -> int:
    if keys.get("attention.key_length") is None and (num_heads < 1 or hidden_size % num_heads):
        raise ModelError(
            f"{keys.origin}: {hidden_size} hidden elements do not divide into {num_heads} heads, "
            "and the key attention.key_length is missing."
        )
    head_size = keys.whole("attention.key_length", hidden_size // max(num_heads, 1))
    value_size = keys.whole("attention.value_length", head_size)
    if value_size != head_size:
        raise unsupported(
            keys.origin,
            f"heads of size {head_size} for keys and {value_size} for values.",
            ["one head size"],
        )
    return head_size


def _vocab_size(shapes: Mapping[str, tuple[int, ...]], origin: str) -> int:
    shape = shapes.get("model.embed_tokens.weight")
    if not shape:
        raise ModelError(f"{origin}: the tensor token_embd.weight is missing.")
    return shape[0]


def _max_position(keys: Settings, rope: Rope) -> int:
    """The stated context, or what yarn stretches the original one to."""
    if rope.kind is RopeKind.YARN and rope.original_max_position is not None:
        return stretched(rope)
    return keys.whole("context_length")


def _sliding_layers(keys: Settings, num_layers: int) -> tuple[bool, ...] | None:
    """`sliding_window_pattern`: one flag a layer; or n: every n-th layer looks at everything."""
    pattern = keys.get("attention.sliding_window_pattern")
    if pattern is None:
        return None
    if isinstance(pattern, list):
        if len(pattern) < num_layers:
            raise ModelError(
                f"{keys.origin}: sliding_window_pattern has {len(pattern)} of {num_layers} layers."
            )
        return tuple(bool(flag) for flag in pattern[:num_layers])
    period = keys.whole("attention.sliding_window_pattern")
    return tuple(period == 0 or (layer + 1) % period != 0 for layer in range(num_layers))


def _rope_layers(num_layers: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % _SMOLLM3_PERIOD != 0 for layer in range(num_layers))


def _rope(
    keys: Settings, family: str, head_size: int, tensors: Mapping[str, tuple[float, ...]]
) -> Rope:
    rotary_dim = keys.whole("rope.dimension_count", head_size)
    if rotary_dim != head_size and family in INTERLEAVED:
        raise unsupported(
            keys.origin,
            f"rope over {rotary_dim} of {head_size} elements in a {family} file.",
            ["rope over whole heads"],
        )
    kind = _rope_kind(keys, tensors)
    frequencies = tensors.get("rope_freqs.weight", ()) if kind is RopeKind.FACTORS else ()
    long = kind is RopeKind.LONGROPE
    return Rope(
        theta=keys.positive("rope.freq_base", _DEFAULT_THETA),
        kind=kind,
        factor=_factor(keys, kind),
        original_max_position=_original(keys, kind),
        beta_fast=keys.real("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.real("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_attention_factor(keys, kind),
        short_factors=tensors.get("rope_factors_short.weight", ()) if long else (),
        long_factors=tensors.get("rope_factors_long.weight", ()) if long else (),
        frequency_factors=frequencies,
        rotary_dim=None if rotary_dim == head_size else rotary_dim,
    )


def _rope_kind(keys: Settings, tensors: Mapping[str, tuple[float, ...]]) -> RopeKind:
    """Factors that are all one change nothing and may stand beside another scaling."""
    kinds = {
        "none": RopeKind.PLAIN,
        "linear": RopeKind.LINEAR,
        "yarn": RopeKind.YARN,
        "longrope": RopeKind.LONGROPE,
    }
    fallback = "linear" if keys.get("rope.scale_linear") else "none"
    name = str(keys.get("rope.scaling.type") or fallback)
    if name not in kinds:
        raise unsupported(keys.origin, f"rope scaling {name!r} is not supported.", kinds)
    factors = tensors.get("rope_freqs.weight", ())
    if all(factor == 1.0 for factor in factors):
        return kinds[name]
    if kinds[name] is not RopeKind.PLAIN:
        raise unsupported(
            keys.origin, f"rope_freqs.weight together with {name} scaling.", ["one of the two"]
        )
    return RopeKind.FACTORS


def _factor(keys: Settings, kind: RopeKind) -> float:
    if kind not in (RopeKind.LINEAR, RopeKind.YARN, RopeKind.LONGROPE):
        return 1.0
    old_name = keys.positive("rope.scale_linear", 1.0)
    return keys.positive("rope.scaling.factor", old_name)


def _original(keys: Settings, kind: RopeKind) -> int | None:
    if kind not in (RopeKind.YARN, RopeKind.LONGROPE):
        return None
    return keys.whole("rope.scaling.original_context_length", keys.whole("context_length"))


def _attention_factor(keys: Settings, kind: RopeKind) -> float | None:
    """For yarn llama.cpp multiplies the stated factor by 1 + 0.1 ln(factor); for longrope not."""
    if kind not in (RopeKind.YARN, RopeKind.LONGROPE):
        return None
    stated = keys.real("rope.scaling.yarn_attn_factor", keys.real("rope.scaling.attn_factor", 0.0))
    if not stated:
        return None
    if kind is RopeKind.LONGROPE:
        return stated
    return stated * (1.0 + 0.1 * math.log(max(_factor(keys, kind), 1.0)))
