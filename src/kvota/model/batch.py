"""A step plan as the arrays that the graph takes, and the way back from rows of logits.

plan   [A A A][B][C C]                chunks, one after another
rows       ↑   ↑  ↑ ↑                 positions that need logits: a draw reads its chunk's last,
                                      prompt logprobs read every position
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvota.core.plan import Chunk, StepPlan

_Int = TypeVar("_Int", np.int32, np.int64)
_Array = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Which rows of the step's logits belong to a chunk."""

    prompt: slice  # of the chunk's prompt logprobs, one row for each of `next_tokens`
    next_tokens: Sequence[int]
    draw: int | None  # what all draws of the chunk read


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. `inputs` go to the graph by name; `rows[i]` belongs to chunk i."""

    inputs: dict[str, _Array]
    rows: Sequence[ChunkRows]
    num_rows: int


def batch(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """The arrays for `chunks`, which must hold at least one token each."""
    lengths = [len(chunk.token_ids) for chunk in chunks]
    starts = [chunk.start for chunk in chunks]
    tables = [
        chunk.block_table[: -(-(start + length) // block_size)]
        for chunk, start, length in zip(chunks, starts, lengths, strict=True)
    ]
    begins = np.array([0, *accumulate(lengths)], np.int32)
    indices, rows = _rows(chunks, begins.tolist())
    inputs: dict[str, _Array] = {
        "input_ids": _joined([chunk.token_ids for chunk in chunks], int(begins[-1]), np.int64),
        "position_ids": _positions(starts, lengths, begins),
        "past_lens": np.array(starts, np.int32),
        "subsequence_begins": begins,
        "block_indices": _joined(tables, sum(map(len, tables)), np.int32),
        "block_indices_begins": np.array([0, *accumulate(map(len, tables))], np.int32),
        "max_context_len": np.array(max(map(sum, zip(starts, lengths, strict=True))), np.int32),
        # The head cannot multiply zero rows; a step without draws computes one and drops it.
        "sampled_tokens_indices": np.array(indices or [0], np.int64),
    }
    return Batch(inputs, rows, len(indices))


def passes(plan: StepPlan, prompt_rows_max: int) -> Iterator[Sequence[tuple[int, Chunk]]]:
    """The plan as forward passes, each a list of (index of the chunk in the plan, chunk).

    Almost always one pass. Prompt logprobs need a row of logits for every prompt token, so their
    chunks are cut until a pass has at most `prompt_rows_max` such rows; a chunk's values do not
    depend on where it is cut. Pieces of one chunk never share a pass.
    """
    waiting: list[tuple[int, Chunk]] = []
    num_rows = 0
    for index, chunk in enumerate(plan.chunks):
        for piece_number, piece in enumerate(_cut(chunk, prompt_rows_max)):
            needed = _num_prompt_rows(piece)
            if waiting and (piece_number > 0 or (needed and num_rows + needed > prompt_rows_max)):
                yield waiting
                waiting, num_rows = [], 0
            waiting.append((index, piece))
            num_rows += needed
    if waiting:
        yield waiting


def _num_prompt_rows(chunk: Chunk) -> int:
    return 0 if chunk.prompt_logprobs is None else len(chunk.token_ids)


def _cut(chunk: Chunk, prompt_rows_max: int) -> Iterator[Chunk]:
    if _num_prompt_rows(chunk) <= prompt_rows_max:
        yield chunk
        return
    tokens = chunk.token_ids
    for first in range(0, len(tokens), prompt_rows_max):
        end = min(first + prompt_rows_max, len(tokens))
        is_last = end == len(tokens)
        yield replace(
            chunk,
            token_ids=tokens[first:end],
            start=chunk.start + first,
            draws=chunk.draws if is_last else (),
            next_token=chunk.next_token if is_last else tokens[end],
        )


def _rows(chunks: Sequence[Chunk], begins: Sequence[int]) -> tuple[list[int], list[ChunkRows]]:
    """Token indices that need logits, in row order, and each chunk's share of the rows."""
    indices: list[int] = []
    rows = []
    for chunk, begin, end in zip(chunks, begins, begins[1:], strict=False):
        first = len(indices)
        next_tokens = _next_tokens(chunk)
        indices.extend(range(begin, begin + len(next_tokens)))
        draw = None
        if chunk.draws:
            if len(next_tokens) < end - begin:
                indices.append(end - 1)
            draw = len(indices) - 1
        rows.append(ChunkRows(slice(first, first + len(next_tokens)), next_tokens, draw))
    return indices, rows


def _next_tokens(chunk: Chunk) -> Sequence[int]:
    if chunk.prompt_logprobs is None:
        return ()
    ending = () if chunk.next_token is None else (chunk.next_token,)
    return (*chunk.token_ids[1:], *ending)


def _joined(parts: Sequence[Sequence[int]], count: int, dtype: type[_Int]) -> npt.NDArray[_Int]:
    return np.fromiter(chain.from_iterable(parts), dtype, count)


def _positions(
    starts: Sequence[int], lengths: Sequence[int], begins: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """start, start + 1, … for every chunk: a running index, shifted by chunk."""
    shift = np.array(starts, np.int64) - begins[:-1]
    return np.arange(int(begins[-1]), dtype=np.int64) + np.repeat(shift, lengths)
