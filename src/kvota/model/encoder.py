"""A text encoder that runs: texts to token ids, batches of token ids to vectors."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import tokenizers

from kvota.core.errors import ModelError
from kvota.model.compiled import return_free_memory
from kvota.model.encoder_graph import IDS, MASK, build_encoder
from kvota.model.encoder_source import POSITIONS, WORDS, EncoderSource, open_encoder
from kvota.model.hf_tokenizer import read_hf_tokenizer
from kvota.model.naming import naming
from kvota.model.threads import usable_cores

Vectors = npt.NDArray[np.float32]

# Of each kind that the plugin keeps for every shape of batch: 0.2 MiB a shape for all-MiniLM-L6-v2,
# and there are thousands of shapes. Its default is 5,000.
KERNELS_KEPT_MAX = 1000


class Encoder:
    """One thread at a time may call `embed`; `encode` may be called by any."""

    def __init__(
        self, compiled: ov.CompiledModel, source: EncoderSource, tokenizer: tokenizers.Tokenizer
    ) -> None:
        self._request = compiled.create_infer_request()
        self._source = source
        self._tokenizer = tokenizer
        self.vocab_size = source.rows_of(WORDS)

    @property
    def max_len(self) -> int:
        """Tokens of the longest text, with those that frame it."""
        return self._source.shape.max_len

    @property
    def num_dimensions(self) -> int:
        return self._source.shape.hidden_size

    def encode(self, text: str) -> list[int]:
        """Token ids, framed as the model was trained: [CLS] … [SEP]."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def embed(self, texts: Sequence[Sequence[int]]) -> Vectors:
        """One vector for each text of token ids, none of them empty: [texts, dimensions].

        Texts are padded to the longest; what is padding is not looked at, but it is computed.
        """
        assert texts, "an empty batch has no length"
        longest = max(map(len, texts))
        assert min(map(len, texts)) > 0, "a text without tokens has no vector"
        assert longest <= self.max_len, (longest, self.max_len)
        ids = np.zeros((len(texts), longest), np.int32)
        mask = np.zeros((len(texts), longest), np.float32)
        for row, tokens in enumerate(texts):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1.0
        self._request.infer({IDS: ids, MASK: mask})
        return np.array(self._request.get_output_tensor(0).data, np.float32)


def load_encoder(directory: Path, *, num_threads: int | None = None) -> Encoder:
    """Read, verify and compile. Raises ModelError or UnsupportedModel naming file and tensor."""
    with naming(directory):
        source = open_encoder(directory)
        tokenizer = read_hf_tokenizer(directory).core
        graph = build_encoder(source)
        _check_fit(source, tokenizer)
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": num_threads or usable_cores(),
        "INFERENCE_PRECISION_HINT": "f32",
        "CPU_RUNTIME_CACHE_CAPACITY": KERNELS_KEPT_MAX,
    }
    compiled = ov.Core().compile_model(graph, "CPU", settings)
    encoder = Encoder(compiled, source, tokenizer)
    # Packs the weights, so that their memory is counted at start.
    encoder.embed([[0] * min(2, encoder.max_len)])
    return_free_memory()
    return encoder


def _check_fit(source: EncoderSource, tokenizer: tokenizers.Tokenizer) -> None:
    """Every token has a row, and a text of one token, framed, has positions."""
    num_rows, highest = source.rows_of(WORDS), max(tokenizer.get_vocab().values(), default=-1)
    if highest >= num_rows:
        raise ModelError(
            f"the tokenizer has ids up to {highest:,}, but the model {num_rows:,} tokens. They do "
            "not belong together; fetch both again."
        )
    num_positions = source.rows_of(POSITIONS)
    if num_positions < source.shape.max_len:
        raise ModelError(
            f"texts may have {source.shape.max_len} tokens, and {POSITIONS} has {num_positions} "
            "rows. Correct max_position_embeddings, or fetch both again."
        )
    num_framed = len(tokenizer.encode("a").ids)
    if num_framed > source.shape.max_len:
        raise ModelError(
            f"texts may have {source.shape.max_len} tokens, and one of a single token has "
            f"{num_framed} with those that frame it. Correct max_position_embeddings."
        )
