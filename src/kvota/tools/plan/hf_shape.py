"""From Hugging Face's config.json to a ModelShape.

A planner reads many more families than kvota runs, and only sizes. What a family implies stands in
`families.py`. A family that is not listed is read as a Llama with a note that says so; one that
keeps another memory than KV (recurrent layers, an encoder) is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvota.core.errors import ModelError
from kvota.formats.settings import Settings
from kvota.tools.plan.families import FAMILIES, Family
from kvota.tools.plan.shape import Experts, Latent, ModelShape

_CONFIG_BYTES_MAX: Final = 16 * 2**20
_COUNT_MAX: Final = 10**9
_LAYERS_MAX: Final = 10_000  # more are a damaged file, and would be counted one by one
_MLP_OF_LLAMA_4: Final = "intermediate_size_mlp"
_SPARSE_STEPS: Final = ("decoder_sparse_step", "interleave_moe_layer_step")

# What holds no KV that grows with the tokens, so that none of the formulas here is right for it.
_OTHER_MEMORY: Final = frozenset({"linear_attention", "mamba", "conv", "recurrent", "hybrid"})
_OTHER_MEMORY_FIELDS: Final = (
    "hybrid_override_pattern",
    "layers_block_type",
    "block_types",
    "attn_layer_period",
    "ssm_cfg",
    "state_size",
    "mamba_d_state",
    "linear_num_key_heads",
)


def read_config(path: Path) -> ModelShape:
    """The shape in a config.json, or in the directory that holds one.

    Raises ModelError that names the file and the field.
    """
    file = path / "config.json" if path.is_dir() else path
    name = path.name if path.is_dir() else file.resolve().parent.name
    return shape_of(config_values(path), name=name, origin=str(file))


def config_values(path: Path) -> Mapping[str, Any]:
    """All that a config.json says, or the one of a directory. Raises ModelError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > _CONFIG_BYTES_MAX:
            raise ModelError(f"{file}: over {_CONFIG_BYTES_MAX} bytes, which no config needs.")
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file}: holds a {type(values).__name__}, not an object.")
    return values


def shape_of(values: Mapping[str, Any], *, name: str, origin: str) -> ModelShape:
    """The shape that a config describes. Raises ModelError that names the field."""
    text, notes = _text_part(values)
    config = Settings(text, origin)
    kind = str(config.get("model_type"))
    family = FAMILIES.get(kind)
    if family is None:
        family = Family()
        notes += (f"model_type {kind!r} is not known here; its sizes are read as a Llama's",)
    _require_kv(config, kind)
    num_layers = _count(config, "num_hidden_layers", most=_LAYERS_MAX)
    num_heads = _count(config, "num_attention_heads")
    latent = _latent(config)
    window, windowed = _windows(config, family, num_layers)
    bias = config.flag("attention_bias", family.has_sinks)
    return ModelShape(
        name=name,
        origin=origin,
        num_layers=num_layers,
        hidden_size=_count(config, "hidden_size"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, num_heads),
        head_size=_head_size(config, family, num_heads) if latent is None else latent.value_size,
        mlp_size=_count(config, _mlp_field(config)),
        vocab_size=_count(config, "vocab_size"),
        max_position=_max_position(config),
        tied_embeddings=config.flag("tie_word_embeddings", family.tied_embeddings),
        latent=latent,
        experts=_experts(config, num_layers),
        window=window,
        windowed_layers=windowed,
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        has_sinks=family.has_sinks,
        norms_per_layer=family.norms_per_layer,
        notes=notes,
    )


def _text_part(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The language model's own config, which models with eyes or ears keep one level down.

    There a config may leave out what its class has as the default.
    """
    inner = values.get("text_config")
    if not isinstance(inner, Mapping):
        return values, ()
    notes = ["only the language model is counted, not the parts for images or sound"]
    stated = {key: value for key, value in inner.items() if value is not None}
    kind = str(stated.get("model_type"))
    defaults = FAMILIES[kind].defaults if kind in FAMILIES else {}
    implied = {key: value for key, value in defaults.items() if key not in inner}
    if implied:
        listed = ", ".join(f"{key} {value}" for key, value in implied.items())
        notes.append(f"left out of text_config, so as the class of {kind} has it: {listed}")
    outer = {"tie_word_embeddings": values.get("tie_word_embeddings")}
    return {**outer, **implied, **stated}, tuple(notes)


def _require_kv(config: Settings, kind: str) -> None:
    """Raises ModelError for a model whose memory is not the KV of a decoder."""
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{config.origin}: is_encoder_decoder is true; only decoders can be planned here."
        )
    types = config.get("layer_types")
    other = _OTHER_MEMORY.intersection(_texts(types))
    fields = [name for name in _OTHER_MEMORY_FIELDS if config.get(name) is not None]
    if other or fields:
        sign = f"layer_types has {min(other)!r}" if other else f"{fields[0]} is there"
        raise ModelError(
            f"{config.origin}: {sign}, so layers of {kind!r} keep a state of a fixed size instead "
            "of KV, which cannot be planned here."
        )


def _texts(values: Any) -> list[str]:
    """The texts of a list; none of anything else."""
    return [one for one in values if isinstance(one, str)] if isinstance(values, list) else []


def _count(
    config: Settings,
    name: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = _COUNT_MAX,
) -> int:
    value = config.whole(name, default)
    if value < least:
        raise config.wrong(name, f"at least {least}")
    if value > most:
        raise config.wrong(name, f"at most {most:,}")
    return value


def _kv_heads(config: Settings, num_heads: int) -> int:
    num_kv_heads = _count(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong(
            "num_key_value_heads", f"a divisor of num_attention_heads, which is {num_heads}"
        )
    return num_kv_heads


def _head_size(config: Settings, family: Family, num_heads: int) -> int:
    """`head_dim` where it is stated; else the class's default; else hidden / heads."""
    if config.get("head_dim") is not None:
        return _count(config, "head_dim")
    if family.head_size is not None:
        return family.head_size
    hidden_size = _count(config, "hidden_size")
    if hidden_size % num_heads:
        raise ModelError(
            f"{config.origin}: head_dim is missing, and hidden_size {hidden_size} does not divide "
            f"into num_attention_heads {num_heads}. State head_dim."
        )
    return hidden_size // num_heads


def _mlp_field(config: Settings) -> str:
    """Llama 4 calls the width of an expert intermediate_size."""
    return "intermediate_size" if config.get("intermediate_size_mlp") is None else _MLP_OF_LLAMA_4


def _max_position(config: Settings) -> int:
    """The context as vLLM derives it: a config that stretches by YaRN, and Gemma 3's, states the
    stretched one already, one that stretches linearly or dynamically does not."""
    stated = _count(config, "max_position_embeddings")
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, Mapping) or config.get("model_type") == "gemma3_text":
        return stated
    if rope.get("rope_type", rope.get("type")) not in ("linear", "dynamic"):
        return stated
    return int(stated * Settings(rope, config.origin, where="rope_scaling.").positive("factor", 1))


def _latent(config: Settings) -> Latent | None:
    if config.get("kv_lora_rank") is None:
        return None
    return Latent(
        kv_rank=_count(config, "kv_lora_rank"),
        query_rank=None if config.get("q_lora_rank") is None else _count(config, "q_lora_rank"),
        nope_size=_count(config, "qk_nope_head_dim"),
        rope_size=_count(config, "qk_rope_head_dim"),
        value_size=_count(config, "v_head_dim"),
    )


def _experts(config: Settings, num_layers: int) -> Experts | None:
    """Experts under the names of Mixtral and gpt-oss, Qwen, or DeepSeek."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    name = next((one for one in names if config.get(one)), None)
    if name is None:
        return None
    num_experts, num_active = _count(config, name), _count(config, "num_experts_per_tok")
    if num_active > num_experts:
        raise config.wrong("num_experts_per_tok", f"at most {name}, which is {num_experts}")
    size = "intermediate_size" if name == "num_local_experts" else "moe_intermediate_size"
    expert_size = _count(config, size)
    is_gpt_oss = config.get("model_type") == "gpt_oss"
    shared = _count(config, "shared_expert_intermediate_size", 0, least=0)
    one_shared = expert_size if config.get("model_type") == "llama4_text" else 0
    return Experts(
        num_experts=num_experts,
        num_active=num_active,
        size=expert_size,
        shared_size=shared
        or one_shared
        or expert_size * _count(config, "n_shared_experts", 0, least=0),
        num_dense_layers=_num_dense(config, num_layers),
        has_router_bias=is_gpt_oss or config.get("topk_method") == "noaux_tc",
        has_expert_bias=is_gpt_oss,
        has_shared_gate=bool(shared),
    )


def _num_dense(config: Settings, num_layers: int) -> int:
    """Layers with an ordinary MLP: DeepSeek's first ones, or all but every n-th, or as listed."""
    step = next((_count(config, name) for name in _SPARSE_STEPS if config.get(name)), 1)
    first, listed = (
        _count(config, "first_k_dense_replace", 0, least=0),
        config.get("mlp_only_layers") or [],
    )
    if not isinstance(listed, list):
        raise config.wrong("mlp_only_layers", "a list of layers")
    return sum(
        layer < first or layer in listed or (layer + 1) % step != 0 for layer in range(num_layers)
    )


def _windows(
    config: Settings, family: Family, num_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """The window and the layers that have it. `layer_types` says it outright where it is there."""
    window = _window(config, family)
    if window <= 0:
        return None, ()
    layers = _stated_layers(config, num_layers) or _implied_layers(config, family, num_layers)
    return (window, layers) if any(layers) else (None, ())


def _window(config: Settings, family: Family) -> int:
    """Tokens; 0: none. Qwen states one that it does not use."""
    if family.windows == "chunks":
        return config.whole("attention_chunk_size", 8192)
    if family.windows == "late" and not config.flag("use_sliding_window", False):
        return 0
    return config.whole("sliding_window", 0)


def _stated_layers(config: Settings, num_layers: int) -> tuple[bool, ...]:
    types = config.get("layer_types")
    if types is None:
        return ()
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.wrong("layer_types", f"a list of {num_layers} names, one a layer")
    return tuple(name in ("sliding_attention", "chunked_attention") for name in types)


def _implied_layers(config: Settings, family: Family, num_layers: int) -> tuple[bool, ...]:
    layers = range(num_layers)
    if family.windows == "even":
        return tuple(layer % 2 == 0 for layer in layers)
    if family.windows == "none":
        return ()
    if family.windows == "chunks":
        return tuple((layer + 1) % 4 != 0 for layer in layers)
    if family.windows == "pattern":
        period = _count(config, "sliding_window_pattern", 6)
        return tuple((layer + 1) % period != 0 for layer in layers)
    if family.windows == "late":
        first = config.whole("max_window_layers", 28)
        return tuple(layer >= first for layer in layers)
    return tuple(True for _ in layers)
