"""From Hugging Face's config.json to an Architecture.

Where a key is absent, the default is the one of the architecture's own class in Transformers. That
means: embeddings are tied in SmolLM3 alone, and only Qwen2 has biases on q, k and v. An
absent `sliding_window` is not the same as null, which means none. The number of KV heads is not
guessed: it defaults to all heads, and the shapes of the tensors tell.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvota.core.errors import ModelError
from kvota.formats.settings import Settings
from kvota.model.architecture import Architecture
from kvota.model.inventory import check_num_layers, check_sizes, unsupported
from kvota.model.rope_config import DEFAULT_THETA, max_position_of, rope_of

FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
_CONFIG_BYTES_MAX = 16 * 2**20
_ACTIVATIONS = ("silu", "swish")  # two names of one function
_LAYER_TYPES = ("full_attention", "sliding_attention")
_WINDOW = 4096  # where a class has one and the config does not say
_QWEN3_HEAD_SIZE = 128
_SMOLLM3_THETA = 2_000_000.0
_FIRST_WINDOW_LAYER = 28  # Qwen's `max_window_layers`, when the config does not say


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError naming the file."""
    try:
        if path.stat().st_size > _CONFIG_BYTES_MAX:
            raise ModelError(f"{path}: over {_CONFIG_BYTES_MAX} bytes, which no such file needs.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, not an object.")
    return value


def architecture_of(values: Mapping[str, Any], origin: str) -> Architecture:
    """The architecture that a config describes. `origin` is its path, for messages.

    Raises UnsupportedModel for what kvota cannot run, ModelError for a key that makes no sense.
    """
    config = Settings(values, origin)
    family = _family(config)
    _check_supported(config)
    num_heads, num_layers = config.whole("num_attention_heads"), config.whole("num_hidden_layers")
    check_num_layers(num_layers, origin)
    head_size = _head_size(config, family, num_heads)
    is_smollm3 = family == "smollm3"
    rope = rope_of(config, head_size, theta=_SMOLLM3_THETA if is_smollm3 else DEFAULT_THETA)
    rope_layers = _rope_layers(config, num_layers) if is_smollm3 else None
    window, window_layers = _sliding(config, family, num_layers, rope_layers)
    may_have_bias = family in ("llama", "qwen3", "smollm3")
    attention_bias = may_have_bias and config.flag("attention_bias", False)
    architecture = Architecture(
        family=family,
        num_layers=num_layers,
        hidden_size=config.whole("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=config.whole("num_key_value_heads", num_heads),
        head_size=head_size,
        mlp_size=config.whole("intermediate_size"),
        vocab_size=config.whole("vocab_size"),
        max_position=max_position_of(config, rope),
        rms_epsilon=config.positive("rms_norm_eps", 1e-6),
        rope=rope,
        tied_embeddings=config.flag("tie_word_embeddings", is_smollm3),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family in ("llama", "smollm3") and config.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        sliding_window=window,
        sliding_layers=window_layers,
        rope_layers=rope_layers,
    )
    check_sizes(architecture, origin)
    return architecture


def _family(config: Settings) -> str:
    stated = config.get("architectures")
    if isinstance(stated, list) and stated:
        family = FAMILIES.get(str(stated[0]))
        shown = str(stated[0])
    else:
        shown = str(config.get("model_type"))
        family = shown if shown in FAMILIES.values() else None
    if family is None:
        raise unsupported(config.origin, f"the architecture {shown} is not supported.", FAMILIES)
    return family


def _check_supported(config: Settings) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise unsupported(
            config.origin,
            f"a checkpoint quantized with {method or 'an unnamed method'}.",
            ["safetensors in F32, F16, BF16 or F64", "quantized models as GGUF"],
        )
    activation = config.get("hidden_act")
    if activation is not None and activation not in _ACTIVATIONS:
        raise unsupported(
            config.origin, f"the activation {activation!r} is not supported.", _ACTIVATIONS
        )


def _head_size(config: Settings, family: str, num_heads: int) -> int:
    """`head_dim` where it is stated, or the class's own; else hidden / heads, if that is whole."""
    hidden_size = config.whole("hidden_size")
    if config.get("head_dim") is not None:
        return config.whole("head_dim")
    if family == "qwen3" and not config.has("head_dim"):
        return _QWEN3_HEAD_SIZE
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelError(
            f"{config.origin}: head_dim is missing, and hidden_size {hidden_size} does not divide "
            f"into {num_heads} heads. State head_dim."
        )
    return hidden_size // num_heads


def _rope_layers(config: Settings, num_layers: int) -> tuple[bool, ...]:
    """SmolLM3's: `no_rope_layers` has 1 where a layer rotates, 0 where it does not.

    Without such a list every `no_rope_layer_interval`-th layer does not.
    """
    stated = config.get("no_rope_layers")
    if stated is None:
        interval = config.whole("no_rope_layer_interval", 4)
        if interval < 1:
            raise config.wrong("no_rope_layer_interval", "at least 1")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    is_list = isinstance(stated, list) and len(stated) >= num_layers
    if not is_list or not all(turns in (0, 1) for turns in stated):
        raise config.wrong("no_rope_layers", f"a list of {num_layers} entries, 1 or 0")
    return tuple(bool(turns) for turns in stated[:num_layers])


def _sliding(
    config: Settings, family: str, num_layers: int, rope_layers: tuple[bool, ...] | None
) -> tuple[int | None, tuple[bool, ...] | None]:
    """The window and the layers that have it (None: all of them).

    Llama has none. Mistral has one on every layer unless `sliding_window` is null. Qwen has one
    when `use_sliding_window` says so, from layer `max_window_layers` on, and SmolLM3 then on the
    layers without rope. `layer_types` overrides which.
    """
    absent = 0 if config.has("sliding_window") or family == "smollm3" else _WINDOW
    window = config.whole("sliding_window", absent)
    if family == "llama" or window <= 0:
        return None, None
    if family != "mistral" and not config.flag("use_sliding_window", False):
        return None, None
    layers = _window_layers(config, num_layers)
    if layers is None and rope_layers is not None:
        layers = tuple(not turns for turns in rope_layers)
    elif layers is None and family != "mistral":
        first = config.whole("max_window_layers", _FIRST_WINDOW_LAYER)
        layers = tuple(layer >= first for layer in range(num_layers))
    if layers is None or all(layers):
        return window, None
    return (window, layers) if any(layers) else (None, None)


def _window_layers(config: Settings, num_layers: int) -> tuple[bool, ...] | None:
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.wrong("layer_types", f"a list of {num_layers} names, one a layer")
    for name in types:
        if name not in _LAYER_TYPES:
            raise unsupported(
                config.origin, f"the layer type {name!r} is not supported.", _LAYER_TYPES
            )
    return tuple(name == "sliding_attention" for name in types)
