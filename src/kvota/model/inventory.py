"""Which tensors an architecture is made of, and proof that a file has them, before anyone listens.

Every reader verifies what it found against `expected_shapes`. The rule for tensors that are not
expected: they are left alone and never loaded. Those that belong to no known leftover (position
tables that old checkpoints store) are named in a warning, because a bias or an adapter that is
dropped in silence changes the answers.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvota.core.errors import ModelError, UnsupportedModel
from kvota.model.architecture import Architecture, Weight

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_SIZE_MAX = 2**31 - 1
_LAYERS_MAX = 4096
# The largest number of F16, in which models are kept and computed; int8's scales end beyond it.
_WEIGHT_MAX: Final = 65504.0
_SIZES = (
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "mlp_size",
    "vocab_size",
    "max_position",
)
_LEFTOVERS = re.compile(
    r"(.*rotary_emb\.inv_freq|.*attn\.(masked_)?bias|.*attn_rot_embd.*|rope_f\w+\.weight)"
)


@dataclass(frozen=True, slots=True)
class FileSource:
    """A verified model: every weight the architecture needs is there, with the right shape.

    `weights` holds exactly the names of `expected_shapes`. `warnings` are sentences for the
    operator about what loads but may surprise.
    """

    origin: str
    architecture: Architecture
    weights: Mapping[str, Weight]
    warnings: tuple[str, ...] = ()


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by Hugging Face's name, with its shape as stored there.

    With tied embeddings `lm_head.weight` is not among them.
    """
    a = architecture
    embedding = (a.vocab_size, a.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: embedding}
    for layer in range(a.num_layers):
        for name, shape in _layer_shapes(a).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (a.hidden_size,)
    if not a.tied_embeddings:
        shapes[HEAD] = embedding
    return shapes


def _layer_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = a.num_heads * a.head_size, a.num_kv_heads * a.head_size
    matrices = {
        "self_attn.q_proj": (q_size, a.hidden_size, a.qkv_bias),
        "self_attn.k_proj": (kv_size, a.hidden_size, a.qkv_bias),
        "self_attn.v_proj": (kv_size, a.hidden_size, a.qkv_bias),
        "self_attn.o_proj": (a.hidden_size, q_size, a.output_bias),
        "mlp.gate_proj": (a.mlp_size, a.hidden_size, a.mlp_bias),
        "mlp.up_proj": (a.mlp_size, a.hidden_size, a.mlp_bias),
        "mlp.down_proj": (a.hidden_size, a.mlp_size, a.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (a.hidden_size,),
        "post_attention_layernorm.weight": (a.hidden_size,),
    }
    for name, (num_out, num_in, has_bias) in matrices.items():
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)
    if a.qk_norm:
        shapes["self_attn.q_norm.weight"] = (a.head_size,)
        shapes["self_attn.k_norm.weight"] = (a.head_size,)
    return shapes


def check_sizes(architecture: Architecture, origin: str) -> None:
    """Refuse sizes that no model can have, before anything is derived from them.

    Raises ModelError naming the size.
    """
    a = architecture
    check_num_layers(a.num_layers, origin)
    for name in _SIZES:
        _check_size(name, getattr(a, name), _SIZE_MAX, origin)
    if a.num_heads % a.num_kv_heads:
        raise ModelError(
            f"{origin}: {a.num_heads} heads cannot share {a.num_kv_heads} KV heads evenly."
        )
    rotary = a.head_size if a.rope.rotary_dim is None else a.rope.rotary_dim
    if rotary % 2 or not 0 < rotary <= a.head_size:
        raise ModelError(
            f"{origin}: rope turns {rotary} of the {a.head_size} elements of a head; "
            "it must be an even number within the head."
        )
    _check_factors(a, rotary // 2, origin)


def check_num_layers(num_layers: int, origin: str) -> None:
    """For whoever makes lists of the layers: before it does. Raises ModelError."""
    _check_size("num_layers", num_layers, _LAYERS_MAX, origin)


def _check_size(name: str, size: int, bound: int, origin: str) -> None:
    if not 1 <= size <= bound:
        raise ModelError(f"{origin}: {name} is {size}; it must lie between 1 and {bound}.")


def _check_factors(a: Architecture, num_pairs: int, origin: str) -> None:
    for factors in (a.rope.frequency_factors, a.rope.short_factors, a.rope.long_factors):
        if factors and len(factors) != num_pairs:
            raise ModelError(
                f"{origin}: {len(factors)} rope factors for {num_pairs} rotary frequencies."
            )


def take_expected(
    architecture: Architecture,
    found: Mapping[str, Weight],
    origin: str,
    spell: Callable[[str], str] = str,
) -> dict[str, Weight]:
    """The weights that the architecture is made of, in its order.

    `spell` turns a name into the file's own spelling, for messages.

    Raises ModelError naming the first tensor that is missing or has another shape.
    """
    expected = expected_shapes(architecture)
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(
            f"{origin}: the tensor {spell(missing[0])} is missing{more}.{_hint(missing)}"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise ModelError(
                f"{origin}: the tensor {spell(name)} has shape {list(found[name].shape)}, "
                f"but the model's settings make it {list(shape)}."
            )
    return {name: found[name] for name in expected}


def check_numbers(values: npt.NDArray[np.float32], origin: str, name: str) -> None:
    """Refuse a tensor with numbers that no model computes with: its answers would be noise.

    A flipped bit in an exponent makes one of them, and so does a file that was half written.
    Raises ModelError.
    """
    if values.size and not (values.min() >= -_WEIGHT_MAX and values.max() <= _WEIGHT_MAX):
        raise ModelError(
            f"{origin}: the tensor {name} holds numbers that are beyond ±{_WEIGHT_MAX:.0f} or none "
            "at all (NaN), as no working model does: the file is damaged. Fetch it again."
        )


def _hint(missing: list[str]) -> str:
    if missing != [HEAD]:
        return ""
    return " If the model shares it with its embeddings, set tie_word_embeddings to true."


def unused_warning(unused: Iterable[str], origin: str) -> tuple[str, ...]:
    """One warning about tensors that the model does not use, or none when all are harmless."""
    names = sorted(name for name in unused if not _LEFTOVERS.fullmatch(name))
    if not names:
        return ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (f"{origin}: ignored {names[0]}{more}: this architecture does not use it.",)


def unsupported(origin: str, what: str, supported: Iterable[str]) -> UnsupportedModel:
    """The error for a sound file of a kind kvota cannot run. Ends with what it can."""
    return UnsupportedModel(f"{origin}: {what} Supported: {', '.join(supported)}.")
