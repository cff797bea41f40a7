"""The model without engine and server: for what only the forward pass can say."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvota.core.plan import Chunk, Draw, StepPlan
from kvota.core.request import SamplingParams
from kvota.model.executor import OpenVinoExecutor
from kvota.model.load import LoadedModel, load_model
from kvota.model.sampler import Sampler

BLOCKS = range(64)  # 2,048 tokens: the one sequence that these measurements need


def load(
    model: Path, threads: int, *, weights: str = "auto", kv_dtype: str = "f16"
) -> tuple[LoadedModel, OpenVinoExecutor]:
    """Load the model as the server does, with KV for one sequence."""
    loaded = load_model(model, weights=weights, kv_dtype=kv_dtype, num_threads=threads)
    sampler = Sampler(loaded.compiled.vocab_size, num_sampled=loaded.num_sampled)
    return loaded, loaded.compiled.executor(len(BLOCKS), sampler)


def step(executor: OpenVinoExecutor, tokens: Sequence[int], start: int = 0) -> int:
    """One step over `tokens` of the one sequence; the greedy token after them."""
    greedy = Draw(SamplingParams(temperature=0.0), 0, tokens, len(tokens))
    chunk = Chunk(0, tokens, start, BLOCKS, draws=(greedy,))
    return executor.execute(StepPlan([chunk])).chunks[0].sampled[0].token


def log_probabilities(
    executor: OpenVinoExecutor, tokens: Sequence[int], start: int
) -> npt.NDArray[np.float64]:
    """Log-softmax `[len(tokens), vocab]` after each of `tokens`, which begin at `start`."""
    chunk = Chunk(0, tokens, start, BLOCKS, prompt_logprobs=0, next_token=0)
    logits = executor.logits([chunk]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
