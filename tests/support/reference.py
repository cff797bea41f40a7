"""The oracle for model code: a plain forward pass, written from the papers and shared with nothing.

All in float64, the whole sequence at once, no KV cache, one head after the other. It is slow and
meant to be read beside the papers:

- Llama (Touvron et al. 2023): pre-norm RMSNorm, rotary positions, gated SiLU MLP, shared KV heads.
- Mistral (Jiang et al. 2023): the same with a sliding window.
- Qwen2 (Yang et al. 2024): biases on q, k and v. Qwen3 (2025): RMSNorm on each head of q and k.
- SmolLM3 (2025): Llama without rotary positions on some layers (NoPE, Yang et al. 2025).
- Rotary stretching: linear (Chen et al. 2023), dynamic NTK, YaRN (Peng et al. 2023, sections 3.2
  to 3.4), Llama 3.1's piecewise rule, LongRoPE (Ding et al. 2024), and a divisor per frequency.

`tests/golden/families.json` holds logits that Hugging Face's own models gave for the same weights;
`tests/support/test_reference.py` compares.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvota.model.architecture import Architecture, Rope, RopeKind

Array = npt.NDArray[np.float64]


def reference_logits(
    architecture: Architecture,
    weights: Mapping[str, npt.NDArray[np.floating]],
    token_ids: Sequence[int],
) -> Array:
    """Logits `[len(token_ids), vocab_size]` of every position, given all before it.

    `weights` carry Hugging Face's names. With tied embeddings `lm_head.weight` is not looked at.
    """
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    embedding = w["model.embed_tokens.weight"]
    hidden = embedding[np.asarray(token_ids, dtype=np.int64)]
    for layer in range(architecture.num_layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): v for name, v in w.items() if name.startswith(prefix)}
        normed = rms_norm(hidden, own["input_layernorm.weight"], architecture.rms_epsilon)
        hidden = hidden + _attention(architecture, own, normed, layer)
        normed = rms_norm(hidden, own["post_attention_layernorm.weight"], architecture.rms_epsilon)
        hidden = hidden + _mlp(own, normed)
    hidden = rms_norm(hidden, w["model.norm.weight"], architecture.rms_epsilon)
    head = embedding if architecture.tied_embeddings else w["lm_head.weight"]
    return product(hidden, head)


def greedy_tokens(
    architecture: Architecture,
    weights: Mapping[str, npt.NDArray[np.floating]],
    prompt: Sequence[int],
    num_tokens: int,
) -> list[int]:
    """The `num_tokens` most likely continuations of `prompt`, each by a fresh whole pass."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(reference_logits(architecture, weights, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def is_sliding(architecture: Architecture, layer: int) -> bool:
    """Whether this layer looks back only `sliding_window` tokens."""
    if architecture.sliding_window is None:
        return False
    return architecture.sliding_layers is None or architecture.sliding_layers[layer]


def rms_norm(x: Array, gain: Array, epsilon: float) -> Array:
    """Scale the last axis to a root mean square of one, then by `gain`."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean_square + epsilon) * gain)


def product(x: Array, rows: Array) -> Array:
    """x · rowsᵀ without BLAS, whose threads cost 20 times more than matrices this small."""
    return np.asarray(np.einsum("ti,oi->to", x, rows))


def _linear(w: Mapping[str, Array], name: str, x: Array) -> Array:
    return product(x, w[f"{name}.weight"]) + w.get(f"{name}.bias", np.zeros(()))


def _mlp(w: Mapping[str, Array], x: Array) -> Array:
    gate = _linear(w, "mlp.gate_proj", x)
    silu = gate / (1.0 + np.exp(-gate))
    return _linear(w, "mlp.down_proj", silu * _linear(w, "mlp.up_proj", x))


def _attention(a: Architecture, w: Mapping[str, Array], x: Array, layer: int) -> Array:
    num_tokens = len(x)
    cos, sin = rope_table(a, num_tokens)
    if a.rope_layers is not None and not a.rope_layers[layer]:
        cos, sin = np.ones_like(cos), np.zeros_like(sin)
    q = _linear(w, "self_attn.q_proj", x).reshape(num_tokens, a.num_heads, a.head_size)
    k = _linear(w, "self_attn.k_proj", x).reshape(num_tokens, a.num_kv_heads, a.head_size)
    v = _linear(w, "self_attn.v_proj", x).reshape(num_tokens, a.num_kv_heads, a.head_size)
    if a.qk_norm:
        q = rms_norm(q, w["self_attn.q_norm.weight"], a.rms_epsilon)
        k = rms_norm(k, w["self_attn.k_norm.weight"], a.rms_epsilon)
    visible = _visible(num_tokens, a.sliding_window if is_sliding(a, layer) else None)
    heads = []
    for head in range(a.num_heads):
        shared = head // (a.num_heads // a.num_kv_heads)  # the KV head this query head reads
        query = rotate(q[:, head], cos, sin)
        key = rotate(k[:, shared], cos, sin)
        scores = product(query, key) / np.sqrt(a.head_size)
        shares = _softmax(np.where(visible, scores, -np.inf))
        heads.append(product(shares, v[:, shared].T))
    return _linear(w, "self_attn.o_proj", np.concatenate(heads, axis=-1))


def _visible(num_tokens: int, window: int | None) -> npt.NDArray[np.bool_]:
    """`[query, key]`: no later token, and with a window only the last `window`, itself included."""
    query, key = np.arange(num_tokens)[:, None], np.arange(num_tokens)[None, :]
    visible = key <= query
    return visible if window is None else visible & (query - key < window)


def _softmax(scores: Array) -> Array:
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the pairs (i, i + half) of `x[token, size]`; sizes past the rotary ones stay.

    `cos` and `sin` are `[token, half]`.
    """
    half = cos.shape[-1]
    first, second, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return np.concatenate(turned, axis=-1)


def rope_table(a: Architecture, num_tokens: int) -> tuple[Array, Array]:
    """cos and sin, `[token, rotary_dim / 2]`, for positions 0 to num_tokens − 1."""
    size = a.rope.rotary_dim or a.head_size
    angles = np.outer(np.arange(num_tokens), rope_frequencies(a.rope, size, a.max_position))
    scale = rope_attention_factor(a.rope)
    return np.cos(angles) * scale, np.sin(angles) * scale


def rope_frequencies(rope: Rope, size: int, max_position: int) -> Array:
    """Radians per position of each of the `size / 2` pairs.

    Where a rule depends on the length (dynamic, longrope) it is taken for `max_position`, the
    longest context, and not for the length so far: keys in the KV cache cannot turn again.
    """
    if rope.kind is RopeKind.DYNAMIC:
        return _plain(dynamic_theta(rope, size, max_position), size)
    plain = _plain(rope.theta, size)
    match rope.kind:
        case RopeKind.LINEAR:
            return np.asarray(plain / rope.factor)
        case RopeKind.LLAMA3:
            return np.array([_llama3(rope, float(f)) for f in plain])
        case RopeKind.YARN:
            return _yarn(rope, plain)
        case RopeKind.LONGROPE:
            is_long = max_position > _original(rope)
            divisors = rope.long_factors if is_long else rope.short_factors
            return np.asarray(plain / np.array(divisors))
        case RopeKind.FACTORS:
            return np.asarray(plain / np.array(rope.frequency_factors))
        case _:
            return plain


def rope_attention_factor(rope: Rope) -> float:
    """What cos and sin are multiplied by; the attention logits grow by its square."""
    if rope.kind not in (RopeKind.YARN, RopeKind.LONGROPE):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind is RopeKind.LONGROPE:
        return _longrope_scale(rope.factor, _original(rope))
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def dynamic_theta(rope: Rope, size: int, length: int) -> float:
    """NTK-aware base for a context of `length` (bloc97 and emozilla, 2023)."""
    stretch = rope.factor * length / _original(rope) - (rope.factor - 1)
    return float(rope.theta * max(stretch, 1.0) ** (size / (size - 2)))


def _plain(theta: float, size: int) -> Array:
    return np.asarray(theta ** (-np.arange(0, size, 2, dtype=np.float64) / size))


def _original(rope: Rope) -> int:
    assert rope.original_max_position is not None, f"{rope.kind} needs original_max_position"
    return rope.original_max_position


def _llama3(rope: Rope, frequency: float) -> float:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    wavelength = 2 * np.pi / frequency
    turns = _original(rope) / wavelength  # over the context it was trained on
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    if turns > rope.high_freq_factor:
        return frequency
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return float((1 - keep) * frequency / rope.factor + keep * frequency)


def _yarn(rope: Rope, plain: Array) -> Array:
    """Pairs that turn more than beta_fast times stay, under beta_slow are stretched (eq. 22-24)."""
    half = len(plain)

    def pair_that_turns(times: float) -> float:
        ratio = _original(rope) / (times * 2 * np.pi)
        return float(half * np.log(ratio) / np.log(rope.theta))

    low = max(np.floor(pair_that_turns(rope.beta_fast)), 0)
    high = min(np.ceil(pair_that_turns(rope.beta_slow)), 2 * half - 1)
    if low == high:
        high += 0.001  # the published code's guard against a division by zero
    stretched = np.clip((np.arange(half) - low) / (high - low), 0, 1)
    return np.asarray(plain / rope.factor * stretched + plain * (1 - stretched))


def _longrope_scale(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else float(np.sqrt(1 + np.log(factor) / np.log(original)))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else float(0.1 * mscale * np.log(factor) + 1.0)
