"""From a path to a model that can be run: tokenizer, template, graph, compiled weights.

Cheap things that can be wrong come first, so that a missing tokenizer is told in a second and not
after minutes of reading weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvota.core.errors import ConfigError, ModelError
from kvota.model.architecture import Architecture, Weight, WeightSource
from kvota.model.compiled import Compiled, KvDtype, compile_model
from kvota.model.gguf_source import read_gguf_metadata
from kvota.model.grammar import GrammarCompiler
from kvota.model.graph import build_graph
from kvota.model.ir import load_ir
from kvota.model.naming import naming
from kvota.model.paged import PagedModel
from kvota.model.source import ModelKind, kind_of, open_source
from kvota.model.template import ChatTemplate
from kvota.model.tokenizer import Tokenizer
from kvota.model.tool_format import ToolFormat, tool_format
from kvota.model.weights import WeightFormat

Progress = Callable[[int, int], None]
"""(weights read, weights in all)"""

MODEL_LEN_MIN: Final = 2  # one token to read and one to write


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, without its KV cache."""

    compiled: Compiled
    tokenizer: Tokenizer
    template: ChatTemplate | None
    grammar: GrammarCompiler
    weight_format: str  # for people
    warnings: tuple[str, ...]

    @property
    def tool_format(self) -> ToolFormat:
        return tool_format(self.tokenizer.tool_template or self.tokenizer.chat_template)

    @property
    def hidden_ids(self) -> frozenset[int]:
        """Tokens that answers do not show: special ones, less those that mark a tool call."""
        return self.tokenizer.hidden_ids(self.tool_format.visible_markers)

    @property
    def max_position(self) -> int:
        return self.compiled.max_position

    @property
    def num_sampled(self) -> int:
        """Ids below this may be sampled; the rest of the head's rows are padding."""
        return min(self.tokenizer.vocab_size, self.compiled.vocab_size)


def load_model(
    path: Path,
    *,
    weights: str = "auto",
    kv_dtype: str = "f16",
    num_threads: int | None = None,
    max_model_len: int | None = None,
    pass_tokens_max: int = 0,
    progress: Progress = lambda done, total: None,
) -> LoadedModel:
    """Read, verify and compile the model at `path`, for passes of up to `pass_tokens_max` tokens.

    Raises ModelError or UnsupportedModel naming the file and the tensor, and ConfigError for a
    setting that this model cannot follow.
    """
    if max_model_len is not None and max_model_len < MODEL_LEN_MIN:
        raise ConfigError(
            f"max_model_len is {max_model_len}; it must be at least {MODEL_LEN_MIN}, for a token "
            "of a prompt and one of its answer. Leave it out for as many as the model can."
        )
    with naming(path):
        kind = kind_of(path)
        tokenizer = _tokenizer(path, kind)
        template = _template(tokenizer)
        weight_format = WeightFormat(weights)
        paged, warnings = _paged(path, kind, weight_format, max_model_len, progress)
        _check_lengths(tokenizer, paged, path, max_model_len)
        grammar = GrammarCompiler(
            tokenizer.to_json(), paged.vocab_size, sorted(tokenizer.eos_ids) or [0]
        )
        compiled = compile_model(
            paged,
            kv_dtype=KvDtype(kv_dtype),
            num_threads=num_threads,
            pass_tokens_max=pass_tokens_max,
        )
    return LoadedModel(
        compiled=compiled,
        tokenizer=tokenizer,
        template=template,
        grammar=grammar,
        weight_format=paged.weights,
        warnings=warnings,
    )


def _check_lengths(
    tokenizer: Tokenizer, paged: PagedModel, path: Path, max_model_len: int | None
) -> None:
    """The context that is asked for, and the vocabulary, must fit the model's own."""
    if max_model_len is not None and max_model_len > paged.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len:,}, but {path} is made for at most "
            f"{paged.max_position:,} tokens."
        )
    if tokenizer.vocab_size > paged.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the model's output "
            f"only {paged.vocab_size:,}. They do not belong together; fetch both again."
        )


def _tokenizer(path: Path, kind: ModelKind) -> Tokenizer:
    if kind is not ModelKind.GGUF:
        return Tokenizer.from_directory(path)
    return Tokenizer.from_gguf_metadata(read_gguf_metadata(path))


def _template(tokenizer: Tokenizer) -> ChatTemplate | None:
    if tokenizer.chat_template is None:
        return None
    return ChatTemplate(
        tokenizer.chat_template,
        tool_source=tokenizer.tool_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )


def _paged(
    path: Path,
    kind: ModelKind,
    weight_format: WeightFormat,
    max_model_len: int | None,
    progress: Progress,
) -> tuple[PagedModel, tuple[str, ...]]:
    if kind is ModelKind.OPENVINO_IR:
        return load_ir(path, weight_format), ()
    source = open_source(path)
    counted = _CountedSource(source, progress)
    return build_graph(counted, weight_format, context_len=max_model_len), source.warnings


class _CountedSource:
    """A source that tells how many of its weights have been read."""

    def __init__(self, source: WeightSource, progress: Progress) -> None:
        self._source = source
        self.weights = _CountedWeights(source.weights, progress)

    @property
    def origin(self) -> str:
        return self._source.origin

    @property
    def architecture(self) -> Architecture:
        return self._source.architecture


class _CountedWeights(Mapping[str, Weight]):
    def __init__(self, weights: Mapping[str, Weight], progress: Progress) -> None:
        self._weights = weights
        self._progress = progress
        self._seen: set[str] = set()

    def __getitem__(self, name: str) -> Weight:
        weight = self._weights[name]
        self._seen.add(name)
        self._progress(len(self._seen), len(self._weights))
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
