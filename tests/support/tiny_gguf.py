"""The tiny models as GGUF files, by the rules of llama.cpp's converter.

The rules that matter here: tensors have their own names; for the `llama` architecture the rows of
q and k are reordered from rotate-half to pairwise rotation (Qwen's are not); Llama 3's rope
becomes a tensor of divisors, `rope_freqs.weight`; vectors stay F32; a tied head is left out.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kvota.model.architecture import Architecture, Rope, RopeKind
from tests.support.reference import rope_frequencies
from tests.support.tiny_models import (
    CHAT_TEMPLATE,
    TinyModel,
    Weights,
    random_weights,
    tiny_architecture,
)
from tests.support.tiny_tokenizer import IM_END_ID, IM_START_ID, SPECIAL_TOKENS, tiny_tokenizer

_OUTSIDE_LAYERS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PAD_TOKEN = "[PAD{}]"


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    architecture: Architecture | None = None,
    weights: Weights | None = None,
    quant: str = "F32",
    with_tokenizer: bool = True,
    extra_tensors: Weights | None = None,
    tensors_per_part: int = 0,
) -> TinyModel:
    """Write one GGUF file. `quant` is a ggml type name that the gguf package can quantize to.

    With `tensors_per_part` it is written in parts, and the path is that of the first.

    The returned architecture is what the file says: Llama 3's rope comes back as FACTORS, a
    Mistral is a Llama, windows are dropped (the converter's rule for these families). The returned
    weights are dequantized and in Hugging Face's row order.
    """
    architecture = architecture or tiny_architecture(family)
    exact = weights or random_weights(architecture)
    writer = gguf.GGUFWriter(
        path, _gguf_architecture(architecture), split_max_tensors=tensors_per_part
    )
    _write_shapes(writer, architecture)
    _write_rope(writer, architecture)
    if with_tokenizer:
        _write_tokenizer(writer, architecture.vocab_size)
    stored: dict[str, npt.NDArray[np.float32]] = {}
    for name, values in exact.items():
        stored[name] = _write_tensor(writer, architecture, name, values, quant)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if tensors_per_part:
        path = min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return TinyModel(path, _as_stored(architecture), stored)


def gguf_name(name: str) -> str:
    """Hugging Face's name in GGUF's words: model.layers.3.mlp.up_proj.bias → blk.3.ffn_up.bias."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTSIDE_LAYERS:
        return f"{_OUTSIDE_LAYERS[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_IN_LAYER[inner]}.{kind}"


def paired_rows(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows (i, i + half) of each head next to each other: the converter's `permute`."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _gguf_architecture(a: Architecture) -> str:
    return "llama" if a.family == "mistral" else a.family


def _as_stored(a: Architecture) -> Architecture:
    family = _gguf_architecture(a)
    rope = replace(
        a.rope,
        theta=_float32(a.rope.theta),
        short_factors=tuple(map(_float32, a.rope.short_factors)),
        long_factors=tuple(map(_float32, a.rope.long_factors)),
    )
    if rope.kind is RopeKind.LLAMA3:
        factors = tuple(map(_float32, llama3_divisors(rope, a.head_size)))
        rope = Rope(theta=rope.theta, kind=RopeKind.FACTORS, frequency_factors=factors)
    epsilon = _float32(a.rms_epsilon)
    return replace(
        a, family=family, rope=rope, rms_epsilon=epsilon, sliding_window=None, sliding_layers=None
    )


def _float32(value: float) -> float:
    """GGUF keeps real numbers in 32 bits."""
    return float(np.float32(value))


def llama3_divisors(rope: Rope, head_size: int) -> npt.NDArray[np.float32]:
    """What the converter stores as `rope_freqs.weight`: plain frequency / stretched frequency."""
    plain = rope_frequencies(Rope(theta=rope.theta), head_size, 0)
    return (plain / rope_frequencies(rope, head_size, 0)).astype(np.float32)


def _write_shapes(writer: Any, a: Architecture) -> None:
    writer.add_name(f"tiny {a.family}")
    writer.add_vocab_size(a.vocab_size)
    writer.add_context_length(a.max_position)
    writer.add_embedding_length(a.hidden_size)
    writer.add_block_count(a.num_layers)
    writer.add_feed_forward_length(a.mlp_size)
    writer.add_head_count(a.num_heads)
    writer.add_head_count_kv(a.num_kv_heads)
    writer.add_key_length(a.head_size)
    writer.add_value_length(a.head_size)
    writer.add_layer_norm_rms_eps(a.rms_epsilon)


def _write_rope(writer: Any, a: Architecture) -> None:
    rope = a.rope
    if rope.kind is RopeKind.DYNAMIC or rope.attention_factor or rope.mscale:
        raise ValueError(f"GGUF has no word for {rope}")
    writer.add_rope_freq_base(rope.theta)
    writer.add_rope_dimension_count(rope.rotary_dim or a.head_size)
    if rope.kind is RopeKind.LLAMA3:
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, a.head_size))
    elif rope.kind in (RopeKind.LINEAR, RopeKind.YARN, RopeKind.LONGROPE):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.kind.value))
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind in (RopeKind.YARN, RopeKind.LONGROPE):
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position)
    if rope.kind is RopeKind.YARN:
        writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow)
    if rope.kind is RopeKind.LONGROPE:
        for length, factors in (("long", rope.long_factors), ("short", rope.short_factors)):
            name = f"rope_factors_{length}.weight"
            writer.add_tensor(name, np.array(factors, dtype=np.float32))


def _write_tensor(
    writer: Any, a: Architecture, name: str, values: npt.NDArray[np.float32], quant: str
) -> npt.NDArray[np.float32]:
    """Write one tensor; return what a reader gets back."""
    kind = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else quant]
    heads = {"q_proj": a.num_heads, "k_proj": a.num_kv_heads}.get(name.split(".")[-2])
    is_paired = heads is not None and _gguf_architecture(a) in ("llama", "smollm3")
    ordered = paired_rows(values, heads) if is_paired and heads is not None else values
    raw = gguf.quants.quantize(ordered, kind)
    writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    # Rows are quantized one by one, so their order does not change their values.
    return np.asarray(gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind), np.float32)


def _write_tokenizer(writer: Any, vocab_size: int) -> None:
    """The `tokenizer.ggml.*` entries, with [PADn] names up to the model's vocabulary."""
    tokenizer = tiny_tokenizer()
    known = {index: token for token, index in tokenizer.get_vocab().items()}
    tokens = [known.get(i, PAD_TOKEN.format(i)) for i in range(vocab_size)]
    types = [_token_type(token, i in known) for i, token in enumerate(tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(_merges(tokenizer))
    writer.add_bos_token_id(IM_START_ID)
    writer.add_eos_token_id(IM_END_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _token_type(token: str, is_known: bool) -> int:
    if not is_known:
        return int(gguf.TokenType.UNUSED)
    return int(gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL)


def _merges(tokenizer: Any) -> list[str]:
    model = json.loads(tokenizer.to_str())["model"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
