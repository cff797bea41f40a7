"""A tiny BERT with random weights, as sentence-transformers writes it, and what it must compute."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

Array = npt.NDArray[np.float64]
Weights = Mapping[str, npt.NDArray[np.float32]]

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "sun", "rain", "##y", "moon", "is", "the", "a")
CONFIG: Mapping[str, Any] = {
    "model_type": "bert", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 40, "max_position_embeddings": 32, "layer_norm_eps": 1e-6,
    "hidden_act": "gelu", "type_vocab_size": 2, "vocab_size": len(WORDS),
}  # fmt: skip


def write_tiny_encoder(
    directory: Path,
    *,
    pooling: str | None = "mean_tokens",
    is_normalized: bool = True,
    max_len: int | None = 16,
    prefix: str = "",
    **config: Any,
) -> Weights:
    """Write the directory; the weights as they were written, without `prefix`."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {**CONFIG, **config}
    (directory / "config.json").write_text(json.dumps(settings))
    _tokenizer().save(str(directory / "tokenizer.json"))
    if pooling is not None:
        (directory / "1_Pooling").mkdir(exist_ok=True)
        modes = {
            f"pooling_mode_{pooling}": True,
            "pooling_mode_max_tokens": pooling == "max_tokens",
        }
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    names = ["Transformer", "Pooling", *(["Normalize"] if is_normalized else [])]
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in names]
    (directory / "modules.json").write_text(json.dumps(modules))
    if max_len is not None:
        limit = {"max_seq_length": max_len}
        (directory / "sentence_bert_config.json").write_text(json.dumps(limit))
    weights = _random_weights(settings)
    save_file(
        {prefix + name: value for name, value in weights.items()}, directory / "model.safetensors"
    )
    return weights


def reference_vector(
    weights: Weights, tokens: Sequence[int], *, pooling: str = "mean", is_normalized: bool = True,
    activation: str = "gelu",
) -> Array:  # fmt: skip
    """One text by itself, in f64, line by line as the paper has it."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    x = w["embeddings.word_embeddings.weight"][list(tokens)]
    x = x + w["embeddings.position_embeddings.weight"][: len(tokens)]
    x = _norm(w, "embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0])
    for number in range(CONFIG["num_hidden_layers"]):
        name = f"encoder.layer.{number}"
        seen = _linear(w, f"{name}.attention.output.dense", _attention(w, name, x))
        x = _norm(w, f"{name}.attention.output.LayerNorm", x + seen)
        wide = _activate(activation, _linear(w, f"{name}.intermediate.dense", x))
        x = _norm(w, f"{name}.output.LayerNorm", x + _linear(w, f"{name}.output.dense", wide))
    vector: Array = x[0] if pooling == "cls" else x.mean(axis=0)
    return vector / np.linalg.norm(vector) if is_normalized else vector


def _attention(w: Mapping[str, Array], name: str, x: Array) -> Array:
    size = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    parts = [_linear(w, f"{name}.attention.self.{part}", x) for part in ("query", "key", "value")]
    heads = []
    for begin in range(0, CONFIG["hidden_size"], size):
        q, k, v = (part[:, begin : begin + size] for part in parts)
        scores = np.exp(q @ k.T / math.sqrt(size))
        heads.append(scores / scores.sum(axis=1, keepdims=True) @ v)
    return np.concatenate(heads, axis=1)


def _activate(activation: str, x: Array) -> Array:
    if activation == "relu":
        return np.maximum(x, 0.0)
    if activation == "gelu":
        share: Array = np.vectorize(math.erf)(x / math.sqrt(2.0))
    else:
        share = np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * x * (1.0 + share)


def _linear(w: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _norm(w: Mapping[str, Array], name: str, x: Array) -> Array:
    centred = x - x.mean(axis=1, keepdims=True)
    level = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + CONFIG["layer_norm_eps"])
    scaled: Array = level * w[f"{name}.weight"] + w[f"{name}.bias"]
    return scaled


def _random_weights(config: Mapping[str, Any]) -> Weights:
    rng = np.random.default_rng(7)
    size, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], size),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], size),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], size),
    }
    norms = ["embeddings.LayerNorm"]
    linears: dict[str, tuple[int, int]] = {}
    for number in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{number}"
        linears |= {
            f"{name}.attention.self.{part}": (size, size) for part in ("query", "key", "value")
        }
        linears[f"{name}.attention.output.dense"] = (size, size)
        linears[f"{name}.intermediate.dense"] = (inner, size)
        linears[f"{name}.output.dense"] = (size, inner)
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    return {name: rng.normal(0.0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}


def _tokenizer() -> Tokenizer:
    vocab = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer
