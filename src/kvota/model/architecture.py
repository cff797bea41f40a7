"""What a decoder-only model is made of, whatever file it came from.

Readers (`source.py`) turn a GGUF header or a `config.json` into an Architecture and hand out the
weights under Hugging Face's names; the graph builder (`graph.py`) needs nothing else.

    ids ─▶ embed ─▶ [ norm ─ attention(rope) ─ + ─ norm ─ gated MLP ─ + ] × layers ─▶ norm ─▶ head
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt


class RopeKind(StrEnum):
    """How rotary frequencies are stretched for contexts longer than the model was trained on."""

    PLAIN = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    FACTORS = "factors"  # one divisor per frequency, stored in the file (GGUF `rope_freqs.weight`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding, rotate-half layout (first half pairs with second half)."""

    theta: float
    kind: RopeKind = RopeKind.PLAIN
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: None means derived from `factor`
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()  # longrope
    frequency_factors: tuple[float, ...] = ()  # factors
    rotary_dim: int | None = None  # None: the whole head


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shapes and switches of one decoder-only model. Sizes are element counts."""

    family: str  # "llama", "mistral", "qwen2", "qwen3", "smollm3"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    vocab_size: int
    max_position: int  # longest context the rope settings are good for
    rms_epsilon: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm on each head of q and k before rope (Qwen3)
    sliding_window: int | None = None  # tokens a position may look back, itself included
    sliding_layers: tuple[bool, ...] | None = None  # None: every layer
    rope_layers: tuple[bool, ...] | None = None  # where q and k are rotated; None: every layer


class Weight(Protocol):
    """One tensor of the model, still in its file."""

    @property
    def name(self) -> str: ...  # Hugging Face's name, e.g. "model.layers.0.mlp.up_proj.weight"

    @property
    def shape(self) -> tuple[int, ...]: ...  # as Hugging Face stores it: [out, in] for a matrix

    @property
    def stored_as(self) -> str: ...  # the file's own type name: "F32", "BF16", "Q4_1"…

    def read(self) -> npt.NDArray[np.float32]:
        """The values, dequantized. Raises ModelError naming the file and the tensor."""


class WeightSource(Protocol):
    """A model's architecture and weights. Weights are read one at a time, never all at once."""

    @property
    def origin(self) -> str: ...  # the path, for messages

    @property
    def architecture(self) -> Architecture: ...

    @property
    def weights(self) -> Mapping[str, Weight]: ...
