"""From the header of a GGUF model to a ModelShape, and to the bytes its tensors really take.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Where a family's windows
stand in no key, llama.cpp's own pattern for it holds.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import gguf

from kvota.core.errors import ModelError
from kvota.formats.gguf_header import TensorEntry
from kvota.formats.gguf_parts import GgufModel, model_name, read_model
from kvota.formats.settings import Settings
from kvota.tools.plan.hardware import Arithmetic
from kvota.tools.plan.methods import Method, Storage
from kvota.tools.plan.shape import Experts, Latent, ModelShape

# Every n-th layer of these looks at everything, when the file does not say which.
_PERIODS: Final[Mapping[str, int]] = MappingProxyType(
    {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "phi3": 0}
)

STORED: Final = "stored"  # the name of the method that a file has
_LAYERS_MAX: Final = 10_000


def read_gguf(path: Path) -> tuple[ModelShape, Method]:
    """The shape of a GGUF model, and its weights as they are stored.

    Reads the header only. Raises ModelError that names the file and the key.
    """
    model = read_model(path)
    return _shape(model, path), _as_stored(model, path)


def _shape(model: GgufModel, path: Path) -> ModelShape:
    kind = model.metadata.get("general.architecture")
    if not isinstance(kind, str):
        raise ModelError(f"{path}: general.architecture is missing; it must be a name.")
    keys = Settings(model.metadata, str(path), prefix=f"{kind}.")
    names, num_layers = model.tensors, keys.whole("block_count")
    if not 1 <= num_layers <= _LAYERS_MAX:
        raise keys.wrong("block_count", f"from 1 to {_LAYERS_MAX:,}")
    latent = _latent(keys)
    num_heads = keys.whole("attention.head_count")
    window, windowed = _windows(keys, kind, num_layers)
    block = f"blk.{num_layers - 1}."
    return ModelShape(
        name=model_name(path),
        origin=str(path),
        num_layers=num_layers,
        hidden_size=keys.whole("embedding_length"),
        num_heads=num_heads,
        num_kv_heads=keys.whole("attention.head_count_kv", num_heads),
        head_size=_head_size(keys, num_heads) if latent is None else latent.value_size,
        mlp_size=keys.whole("feed_forward_length"),
        vocab_size=_vocab_size(names, path),
        max_position=keys.whole("context_length"),
        tied_embeddings="output.weight" not in names,
        latent=latent,
        experts=_experts(keys, names, block),
        window=window,
        windowed_layers=windowed,
        qkv_bias=f"{block}attn_q.bias" in names,
        output_bias=f"{block}attn_output.bias" in names,
        mlp_bias=f"{block}ffn_down.bias" in names,
        qk_norm=f"{block}attn_q_norm.weight" in names,
        has_sinks=f"{block}attn_sinks.weight" in names,
        norms_per_layer=_num_norms(names, block),
    )


def _num_norms(names: Iterable[str], block: str) -> int:
    norms = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    there = set(names)
    return max(1, sum(f"{block}{norm}.weight" in there for norm in norms))


def _head_size(keys: Settings, num_heads: int) -> int:
    hidden_size = keys.whole("embedding_length")
    if keys.get("attention.key_length") is None and (num_heads < 1 or hidden_size % num_heads):
        raise keys.wrong(
            "attention.key_length",
            f"stated, as {hidden_size} elements do not divide into {num_heads} heads",
        )
    return keys.whole("attention.key_length", hidden_size // max(1, num_heads))


def _vocab_size(tensors: Mapping[str, TensorEntry], path: Path) -> int:
    entry = tensors.get("token_embd.weight")
    if entry is None:
        raise ModelError(f"{path}: the tensor token_embd.weight is missing.")
    return entry.shape[0]


def _latent(keys: Settings) -> Latent | None:
    if keys.get("attention.kv_lora_rank") is None:
        return None
    rope_size = keys.whole("rope.dimension_count")
    has_own = keys.get("attention.key_length_mla") is not None
    key_size = keys.whole("attention.key_length_mla" if has_own else "attention.key_length")
    value_size = keys.whole("attention.value_length_mla" if has_own else "attention.value_length")
    query_rank = keys.whole("attention.q_lora_rank", 0)
    return Latent(
        kv_rank=keys.whole("attention.kv_lora_rank"),
        query_rank=query_rank or None,
        nope_size=key_size - rope_size,
        rope_size=rope_size,
        value_size=value_size,
    )


def _experts(keys: Settings, names: Iterable[str], block: str) -> Experts | None:
    num_experts = keys.whole("expert_count", 0)
    if not num_experts:
        return None
    there = set(names)
    size = keys.whole("expert_feed_forward_length", keys.whole("feed_forward_length"))
    return Experts(
        num_experts=num_experts,
        num_active=keys.whole("expert_used_count"),
        size=size,
        shared_size=keys.whole(
            "expert_shared_feed_forward_length", size * keys.whole("expert_shared_count", 0)
        ),
        num_dense_layers=keys.whole("leading_dense_block_count", 0),
        has_router_bias=f"{block}exp_probs_b.bias" in there or f"{block}ffn_gate_inp.bias" in there,
        has_expert_bias=f"{block}ffn_down_exps.bias" in there,
        has_shared_gate=f"{block}ffn_gate_inp_shexp.weight" in there,
    )


def _windows(keys: Settings, kind: str, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    window = keys.whole("attention.sliding_window", 0)
    pattern = keys.get("attention.sliding_window_pattern")
    if window <= 0 or (pattern is None and kind not in _PERIODS):
        return None, ()
    if isinstance(pattern, list):
        if len(pattern) < num_layers:
            raise keys.wrong("attention.sliding_window_pattern", f"{num_layers} flags, one a layer")
        return window, tuple(bool(flag) for flag in pattern[:num_layers])
    period = keys.whole("attention.sliding_window_pattern", _PERIODS.get(kind, 0))
    return window, tuple(period == 0 or (layer + 1) % period != 0 for layer in range(num_layers))


def _as_stored(model: GgufModel, path: Path) -> Method:
    """The file's own storage: the mean bits of the embedding, the head, the layers, the rest."""
    num_bits: dict[str, int] = defaultdict(int)
    num_elements: dict[str, int] = defaultdict(int)
    types: Counter[str] = Counter()
    for entry in model.tensors.values():
        part, elements = _part(entry), _num_elements(entry)
        bits, type_name = _tensor_bits(entry, elements, path)
        num_bits[part] += bits
        num_elements[part] += elements
        types[type_name] += bits
    mean = {part: num_bits[part] / num_elements[part] for part in num_bits}
    embedding = Storage(mean["embedding"])
    return Method(
        name=STORED,
        title=f"as in the file, mostly {types.most_common(1)[0][0]}",
        layer=Storage(mean.get("layer", 16.0)),
        vocabulary=embedding,
        head=Storage(mean["head"]) if "head" in mean else embedding,
        small=Storage(mean.get("small", 32.0)),
        router=Storage(mean.get("router", 32.0)),
        arithmetic=Arithmetic.F16,
        rank=0,
    )


def _part(entry: TensorEntry) -> str:
    if entry.name == "token_embd.weight":
        return "embedding"
    if entry.name == "output.weight":
        return "head"
    if entry.name.endswith("ffn_gate_inp.weight"):
        return "router"
    return "layer" if len(entry.shape) > 1 else "small"


def _num_elements(entry: TensorEntry) -> int:
    number = 1
    for length in entry.shape:
        number *= length
    return number


def _tensor_bits(entry: TensorEntry, num_elements: int, path: Path) -> tuple[int, str]:
    try:
        kind = gguf.GGMLQuantizationType(entry.ggml_type)
    except ValueError:
        raise ModelError(
            f"{path}: the tensor {entry.name} has type {entry.ggml_type}, which gguf "
            "does not know. A newer gguf package may."
        ) from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return 8 * (num_elements // block) * block_bytes, str(kind.name)
