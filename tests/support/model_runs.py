"""Run a model the way the engine would, one step after another, and keep what came out."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvota.core.plan import Chunk, Draw, StepPlan
from kvota.core.request import SamplingParams
from kvota.model.architecture import WeightSource
from kvota.model.compiled import KvDtype, compile_model
from kvota.model.executor import OpenVinoExecutor
from kvota.model.graph import build_graph
from kvota.model.sampler import Sampler
from kvota.model.source import open_source
from kvota.model.weights import WeightFormat

GREEDY = SamplingParams(temperature=0.0)
# Not the first blocks and not in order, so that a table that is not followed shows.
BLOCK_TABLE = (9, 3, 12, 5, 14, 7, 2, 11)
NUM_BLOCKS = 16


def exact_executor(model: WeightSource | Path) -> OpenVinoExecutor:
    """The model with f32 weights and f32 KV on one thread."""
    source = open_source(model) if isinstance(model, Path) else model
    compiled = compile_model(
        build_graph(source, WeightFormat.F32), kv_dtype=KvDtype.F32, num_threads=1
    )
    return compiled.executor(NUM_BLOCKS, Sampler(source.architecture.vocab_size))


def all_logits(
    executor: OpenVinoExecutor, tokens: Sequence[int], chunk_max: int
) -> npt.NDArray[np.float32]:
    """Logits `[len(tokens), vocab]` of one sequence, fed in chunks of at most `chunk_max`."""
    starts = range(0, len(tokens), chunk_max)
    steps = [[whole_chunk(tokens[start : start + chunk_max], start)] for start in starts]
    return logits_by_sequence(executor, steps)[0]


def logits_by_sequence(
    executor: OpenVinoExecutor, steps: Sequence[Sequence[Chunk]]
) -> dict[int, npt.NDArray[np.float32]]:
    """Run `steps` of chunks of several sequences; all logits of each sequence, in order.

    Every chunk must ask for the logits of all its tokens, as `whole_chunk` makes them.
    """
    rows: dict[int, list[npt.NDArray[np.float32]]] = defaultdict(list)
    for chunks in steps:
        logits = executor.logits(chunks)
        bounds = np.cumsum([len(chunk.token_ids) for chunk in chunks])[:-1]
        for chunk, own in zip(chunks, np.split(logits, bounds), strict=True):
            rows[chunk.sequence_id].append(own)
    return {sequence_id: np.concatenate(parts) for sequence_id, parts in rows.items()}


def whole_chunk(
    tokens: Sequence[int],
    start: int = 0,
    *,
    sequence_id: int = 0,
    table: Sequence[int] = BLOCK_TABLE,
) -> Chunk:
    """A chunk that wants the logits after each of its tokens."""
    return Chunk(sequence_id, tokens, start, table, prompt_logprobs=0, next_token=0)


def generated(
    executor: OpenVinoExecutor,
    prompt: Sequence[int],
    num_tokens: int,
    params: SamplingParams = GREEDY,
) -> list[int]:
    """`num_tokens` tokens after `prompt`: the prompt in one step, then one token a step."""
    tokens = list(prompt)
    start = 0
    for _ in range(num_tokens):
        draw = Draw(params=params, choice=0, tokens=tokens, num_prompt=len(prompt))
        chunk = Chunk(0, tokens[start:], start, BLOCK_TABLE, draws=(draw,))
        start = len(tokens)
        tokens.append(executor.execute(StepPlan([chunk])).chunks[0].sampled[0].token)
    return tokens[len(prompt) :]
