"""Tiny models with random weights, one per family, written as Hugging Face writes them.

    tiny_architecture ─▶ random_weights ─▶ write_safetensors   config.json, shards, index
                                       └─▶ write_gguf          in tiny_gguf.py

Two layers, hidden size 64, a vocabulary of a few hundred. The weights depend on nothing but a seed
and the tensor's name, and are scaled so that logits spread and greedy text does not stand still.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvota.model.architecture import Architecture, Rope, RopeKind
from tests.support.tiny_tokenizer import (
    ENDOFTEXT_ID,
    IM_END_ID,
    IM_START_ID,
    SPECIAL_TOKENS,
    tiny_tokenizer,
)

Weights = Mapping[str, npt.NDArray[np.float32]]
FloatType = Literal["F32", "F16", "BF16"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
VOCAB_SIZE = 320  # 20 more than the tokenizer knows, as real models have
NUM_TRAINED = 64  # positions that the stretched ropes pretend to be trained on
NUM_STRETCHED = 4 * NUM_TRAINED


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model on disk and what a correct reader must find in it.

    `weights` are the values after the file's rounding, under Hugging Face's names and shapes.
    """

    path: Path
    architecture: Architecture
    weights: Weights


def tiny_architecture(family: str, **changes: Any) -> Architecture:
    """One of FAMILIES, with the switches that make it that family. `changes` replace fields."""
    base = Architecture(
        family=family,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        mlp_size=96,
        vocab_size=VOCAB_SIZE,
        max_position=NUM_STRETCHED,
        rms_epsilon=1e-5,
        rope=Rope(theta=10000.0),
        tied_embeddings=family.startswith(("qwen", "smollm")),
    )
    own: dict[str, dict[str, Any]] = {
        "llama": {},
        "mistral": {"sliding_window": 24},
        "qwen2": {"qkv_bias": True},
        "qwen3": {"qk_norm": True, "head_size": 32},
        "smollm3": {"num_layers": 4, "rope_layers": (True, True, True, False)},
    }
    return replace(base, **(own[family] | changes))


def tiny_ropes(head_size: int = 16) -> dict[str, Rope]:
    """Every rope variant that a config.json can ask for, by a short name."""
    stretched: dict[str, Any] = {
        "theta": 10000.0,
        "factor": 4.0,
        "original_max_position": NUM_TRAINED,
    }
    yarn = Rope(kind=RopeKind.YARN, **stretched)
    pairs = np.arange(head_size // 2)
    longrope = Rope(
        kind=RopeKind.LONGROPE,
        short_factors=tuple((1.0 + 0.05 * pairs).tolist()),
        long_factors=tuple((1.0 + 0.5 * pairs).tolist()),
        **stretched,
    )
    return {
        "plain": Rope(theta=500.0),
        "linear": Rope(theta=10000.0, kind=RopeKind.LINEAR, factor=4.0),
        "dynamic": Rope(kind=RopeKind.DYNAMIC, **stretched),
        "llama3": Rope(
            kind=RopeKind.LLAMA3, low_freq_factor=1.0, high_freq_factor=4.0, **stretched
        ),
        "yarn": yarn,
        "yarn_betas": replace(yarn, beta_fast=16.0, beta_slow=2.0),
        "yarn_attention_factor": replace(yarn, attention_factor=1.3),
        "yarn_mscale": replace(yarn, mscale=1.2, mscale_all_dim=0.7),
        "longrope": longrope,
    }


def random_weights(architecture: Architecture, seed: int = 0) -> Weights:
    """Weights under Hugging Face's names. The same on every machine: RandomState is frozen."""
    return {
        name: _random_tensor(name, shape, seed)
        for name, shape in weight_shapes(architecture).items()
    }


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    chance = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    values = chance.standard_normal(shape)
    if "norm" in name:
        values = 1.0 + 0.2 * values
    elif name.endswith(".bias"):
        values = 0.5 * values
    elif name == "model.embed_tokens.weight":
        values = 0.2 * values
    else:
        values = 1.3 * values / np.sqrt(shape[-1])
    return values.astype(np.float32)


def weight_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, `[out, in]` for a matrix, in the order of the forward pass."""
    a = architecture
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (a.vocab_size, a.hidden_size)
    }
    for layer in range(a.num_layers):
        own: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (a.hidden_size,)}
        own |= _attention_shapes(a) | {"post_attention_layernorm.weight": (a.hidden_size,)}
        own |= _linear_shapes("mlp.gate_proj", a.mlp_size, a.hidden_size, a.mlp_bias)
        own |= _linear_shapes("mlp.up_proj", a.mlp_size, a.hidden_size, a.mlp_bias)
        own |= _linear_shapes("mlp.down_proj", a.hidden_size, a.mlp_size, a.mlp_bias)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes["model.norm.weight"] = (a.hidden_size,)
    if not a.tied_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes


def _attention_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = a.num_heads * a.head_size, a.num_kv_heads * a.head_size
    shapes = _linear_shapes("self_attn.q_proj", q_size, a.hidden_size, a.qkv_bias)
    shapes |= _linear_shapes("self_attn.k_proj", kv_size, a.hidden_size, a.qkv_bias)
    shapes |= _linear_shapes("self_attn.v_proj", kv_size, a.hidden_size, a.qkv_bias)
    shapes |= _linear_shapes("self_attn.o_proj", a.hidden_size, q_size, a.output_bias)
    if a.qk_norm:
        shapes["self_attn.q_norm.weight"] = (a.head_size,)
        shapes["self_attn.k_norm.weight"] = (a.head_size,)
    return shapes


def _linear_shapes(name: str, out: int, into: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, into)}
    return shapes | ({f"{name}.bias": (out,)} if bias else {})


def write_safetensors(
    folder: Path,
    family: str = "llama",
    *,
    architecture: Architecture | None = None,
    weights: Weights | None = None,
    dtype: FloatType = "F32",
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    with_tokenizer: bool = True,
) -> TinyModel:
    """Write a model folder as `save_pretrained` lays it out.

    `config` overrides keys of config.json; a value of None leaves the key out, except that of
    `sliding_window`, which says that there is none. With more than one shard there is an index
    file, and no `model.safetensors`.
    """
    architecture = architecture or tiny_architecture(family)
    exact = weights or random_weights(architecture)
    folder.mkdir(parents=True, exist_ok=True)
    merged = config_json(architecture) | {"torch_dtype": _TORCH_NAMES[dtype]} | dict(config or {})
    kept = {key: one for key, one in merged.items() if one is not None or key == "sliding_window"}
    (folder / "config.json").write_text(json.dumps(kept, indent=2))
    names = [_shard_name(shard, shards) for shard in range(shards)]
    for shard, name in enumerate(names):
        own = {key: exact[key] for key in list(exact)[shard::shards]}
        write_safetensors_file(folder / name, own, dtype)
    if shards > 1:
        where = {key: names[i % shards] for i, key in enumerate(exact)}
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if with_tokenizer:
        write_tokenizer(folder)
    return TinyModel(folder, architecture, {k: rounded(v, dtype) for k, v in exact.items()})


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json with its configuration, and the token that ends a text."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[IM_START_ID],
        "eos_token": SPECIAL_TOKENS[IM_END_ID],
        "unk_token": SPECIAL_TOKENS[ENDOFTEXT_ID],
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": IM_START_ID, "eos_token_id": IM_END_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def _shard_name(shard: int, shards: int) -> str:
    return (
        "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
    )


_CLASS_NAMES = {"smollm3": "SmolLM3"}
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config_json(architecture: Architecture) -> dict[str, Any]:
    """The config.json that Hugging Face's own class of this family would save."""
    a = architecture
    config: dict[str, Any] = {
        "model_type": a.family,
        "architectures": [f"{_CLASS_NAMES.get(a.family, a.family.capitalize())}ForCausalLM"],
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_size,
        "intermediate_size": a.mlp_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": _max_position_embeddings(a),
        "rms_norm_eps": a.rms_epsilon,
        "hidden_act": "silu",
        "rope_theta": a.rope.theta,
        "rope_scaling": rope_scaling_json(a.rope),
        "tie_word_embeddings": a.tied_embeddings,
    }
    if a.family != "qwen2":  # its biases are not a choice
        config["attention_bias"] = a.qkv_bias
    if a.family in ("llama", "smollm3"):
        config["mlp_bias"] = a.mlp_bias
    if a.rope_layers is not None:  # the name is the opposite of what its entries say
        config["no_rope_layers"] = [int(turns) for turns in a.rope_layers]
        config["pad_token_id"] = 0  # the class's own lies beyond a tiny vocabulary
        config["use_sliding_window"] = a.sliding_window is not None
    if a.family == "mistral" or a.sliding_window is not None:
        config["sliding_window"] = a.sliding_window
    if a.family.startswith("qwen") and a.sliding_window is not None:
        config |= {"use_sliding_window": True, "max_window_layers": _first_sliding(a)}
    return config


def _first_sliding(a: Architecture) -> int:
    return 0 if a.sliding_layers is None else a.sliding_layers.index(True)


def _max_position_embeddings(a: Architecture) -> int:
    """What this key means: the stretched length, but for dynamic rope the trained one."""
    if a.rope.kind is RopeKind.DYNAMIC:
        return int(a.max_position / a.rope.factor)
    return a.max_position


def rope_scaling_json(rope: Rope) -> dict[str, Any] | None:
    """The `rope_scaling` entry, in today's spelling; None for plain rope."""
    if rope.kind is RopeKind.PLAIN:
        return None
    entry: dict[str, Any] = {"rope_type": rope.kind.value, "factor": rope.factor}
    if rope.kind in (RopeKind.LLAMA3, RopeKind.YARN, RopeKind.LONGROPE):
        entry["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind is RopeKind.LLAMA3:
        entry["low_freq_factor"] = rope.low_freq_factor
        entry["high_freq_factor"] = rope.high_freq_factor
    if rope.kind is RopeKind.YARN:
        entry |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if rope.kind is RopeKind.LONGROPE:
        entry["short_factor"] = list(rope.short_factors)
        entry["long_factor"] = list(rope.long_factors)
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if getattr(rope, name) is not None:
            entry[name] = getattr(rope, name)
    return entry


def rounded(values: npt.NDArray[np.float32], dtype: FloatType) -> npt.NDArray[np.float32]:
    """The values that are left after storing them as `dtype`."""
    if dtype == "F16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        return (_to_bf16(values).astype(np.uint32) << 16).view(np.float32)
    return values


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even. Finite values only."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors_file(path: Path, tensors: Weights, dtype: FloatType = "F32") -> None:
    """One file of the format: header length, JSON header, then the bytes of each tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    offset = 0
    for name, values in tensors.items():
        part = _stored(values, dtype).tobytes()
        bounds = [offset, offset + len(part)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": bounds}
        parts.append(part)
        offset += len(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def _stored(values: npt.NDArray[np.float32], dtype: FloatType) -> npt.NDArray[Any]:
    if dtype == "BF16":
        return _to_bf16(values)
    return values.astype("<f2" if dtype == "F16" else "<f4")


def fixed_tokens(num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    """A prompt of random token ids, the same on every machine."""
    return [int(t) for t in np.random.RandomState(seed).randint(vocab_size, size=num_tokens)]
