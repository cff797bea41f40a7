"""A text encoder's files: what a sentence-transformers directory says, and its weights.

config.json                  the BERT architecture
model.safetensors            weights, with or without a leading `bert.`
tokenizer.json               a fast tokenizer, with [CLS] and [SEP] in its post-processor
modules.json                 what makes a vector: a transformer, its pooling, and maybe length 1
1_Pooling/config.json        how token vectors become one; the mean where it is missing
sentence_bert_config.json    how many tokens it was trained for
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvota.core.errors import ModelError
from kvota.formats.settings import Settings
from kvota.model.hf_config import read_json
from kvota.model.inventory import unsupported
from kvota.model.safetensors_file import SafetensorsWeight, read_tensors

Array = npt.NDArray[np.float32]
MODEL_TYPES: Final = ("bert",)
WORDS: Final = "embeddings.word_embeddings.weight"
POSITIONS: Final = "embeddings.position_embeddings.weight"
_ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
_MODULES: Final = ("Transformer", "Pooling", "Normalize")
_POOLING_NAMES: Final[Mapping[str, str]] = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
}
_PREFIX: Final = "bert."
_COUNT_MAX: Final = 2**31 - 1


class Pooling(StrEnum):
    """How the vectors of a text's tokens become one."""

    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    layer_norm_eps: float
    activation: str
    pooling: Pooling
    is_normalized: bool
    max_len: int  # tokens of one text, [CLS] and [SEP] included

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class EncoderSource:
    directory: Path
    shape: EncoderShape
    weights: Mapping[str, SafetensorsWeight]

    def read(self, name: str, *shape: int) -> Array:
        """A weight as f32. Raises ModelError when it is missing or has another shape."""
        weight = self.weights.get(name) or self.weights.get(_PREFIX + name)
        if weight is None:
            raise ModelError(f"{self.directory}: the tensor {name} is missing.")
        if weight.shape != shape:
            raise ModelError(
                f"{self.directory}: the tensor {name} has the shape {list(weight.shape)}; the "
                f"configuration asks for {list(shape)}."
            )
        return weight.read()

    def rows_of(self, name: str) -> int:
        """How many rows a table has, where the configuration need not be believed."""
        weight = self.weights.get(name) or self.weights.get(_PREFIX + name)
        if weight is None or len(weight.shape) != 2:
            raise ModelError(f"{self.directory}: the table {name} is missing.")
        return weight.shape[0]


def is_encoder(path: Path) -> bool:
    """Whether a directory holds a text encoder rather than a model that writes."""
    try:
        return _read_json(path / "config.json").get("model_type") in MODEL_TYPES
    except (ModelError, OSError, ValueError):  # whoever opens the model says what is wrong
        return False


def open_encoder(directory: Path) -> EncoderSource:
    """Read the configuration and find the weights.

    Raises ModelError naming the file, UnsupportedModel saying what is supported.
    """
    shape = _shape(directory)
    path = directory / "model.safetensors"
    if not path.is_file():
        raise ModelError(f"{path} is missing. An encoder's weights are read from that file alone.")
    return EncoderSource(directory, shape, read_tensors(path))


def _shape(directory: Path) -> EncoderShape:
    path = directory / "config.json"
    config = _read_json(path)
    if config.get("model_type") not in MODEL_TYPES:
        raise unsupported(str(path), f"the encoder is a {config.get('model_type')}.", MODEL_TYPES)
    activation = str(config.get("hidden_act", "gelu"))
    if activation not in _ACTIVATIONS:
        raise unsupported(str(path), f"the activation is {activation}.", _ACTIVATIONS)
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise unsupported(str(path), "positions are not absolute.", ("absolute",))
    hidden, heads = _count(path, config, "hidden_size"), _count(path, config, "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"{path}: hidden_size {hidden} is no multiple of {heads} heads.")
    positions = _count(path, config, "max_position_embeddings")
    modules = _modules(directory)
    trained = _read_json(directory / "sentence_bert_config.json").get("max_seq_length")
    return EncoderShape(
        hidden_size=hidden,
        num_layers=_count(path, config, "num_hidden_layers"),
        num_heads=heads,
        intermediate_size=_count(path, config, "intermediate_size"),
        layer_norm_eps=Settings(config, str(path)).positive("layer_norm_eps", 1e-12),
        activation=activation,
        pooling=_pooling(directory, modules),
        is_normalized=_is_normalized(modules),
        max_len=min(positions, trained) if isinstance(trained, int) and trained > 2 else positions,
    )


def _count(path: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _COUNT_MAX:
        shown = repr(value)[:100]
        raise ModelError(f"{path}: {name} is {shown}; it must be a whole number above 0.")
    return value


def _pooling(directory: Path, modules: Sequence[Mapping[str, Any]] | None) -> Pooling:
    """As the module for it says. Two spellings: a flag for each way, and since 2025 its name."""
    path = directory / "1_Pooling" / "config.json"
    for module in modules or ():
        if _kind_of(module) == "Pooling" and isinstance(module.get("path"), str):
            path = directory / module["path"] / "config.json"
    config = _read_json(path)
    chosen = {name for name, value in config.items() if name.startswith("pooling_mode_") and value}
    named = config.get("pooling_mode")
    if named is not None:
        ways = named if isinstance(named, list) else [named]
        chosen |= {_POOLING_NAMES.get(str(way), str(way)) for way in ways}
    if not chosen or chosen == {"pooling_mode_mean_tokens"}:
        return Pooling.MEAN
    if chosen == {"pooling_mode_cls_token"}:
        return Pooling.CLS
    raise unsupported(str(path), f"it pools by {', '.join(sorted(chosen))}.", tuple(Pooling))


def _modules(directory: Path) -> Sequence[Mapping[str, Any]] | None:
    """What makes a vector of a text, in turn. None: the directory does not say."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON: {error}.") from error
    if not isinstance(listed, list) or not all(isinstance(one, Mapping) for one in listed):
        raise ModelError(f"{path}: must be a list of modules.")
    for module in listed:
        if _kind_of(module) not in _MODULES:
            raise unsupported(str(path), f"it has a module {module.get('type')!r}.", _MODULES)
    return listed


def _kind_of(module: Mapping[str, Any]) -> str:
    return str(module.get("type")).rpartition(".")[2]


def _is_normalized(modules: Sequence[Mapping[str, Any]] | None) -> bool:
    if modules is None:
        return True  # clients compare by angle; a plain BERT directory does not say
    return any(_kind_of(module) == "Normalize" for module in modules)


def _read_json(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.is_file() else {}
