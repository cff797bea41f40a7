"""A step plan as the arrays that the graph takes, and the way back from rows of logits.

    plan   [A A A][B][C C]                chunks, one after another
    rows       ↑   ↑  ↑ ↑                 positions that need logits: a draw reads its chunk's last,
                                          prompt logprobs read every position

What a token computes must not depend on its neighbours, on how its prompt was cut into chunks, or
on whether it was computed again after a preemption. The kernels keep that promise to the last bit,
as long as every token takes the same way through them each time. They take another way for

- a pass of one row: products of a vector are summed in another order than those of a matrix;
- a chunk of one token: attention for one query is summed in another order than for several.

So passes and logits have two rows at least, prompt tokens always go as "several", and generated
tokens always go one by one, each as a subsequence of its own, also when many are computed again
at once (the op writes all keys and values of a pass before it attends). Padding writes its KV to
a scratch block, or to the slot after the token, which nothing reads before it is written again.
Passes and logits are padded to few different sizes as well (`shapes`): one subsequence of padding
at the end, and rows of logits that nobody reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvota.core.plan import Chunk, StepPlan
from kvota.model.shapes import rounded_size

_Int = TypeVar("_Int", np.int32, np.int64)
_Array = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_PADDING = 0  # any token will do
_NUM_ROWS_MIN = 2


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Which rows of the step's logits belong to a chunk."""

    prompt: slice  # of the chunk's prompt logprobs, one row for each of `next_tokens`
    next_tokens: Sequence[int]
    draw: int | None  # what all draws of the chunk read; rows after speculated tokens follow it


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. `inputs` go to the graph by name; `rows[i]` belongs to chunk i."""

    inputs: dict[str, _Array]
    rows: Sequence[ChunkRows]
    num_rows: int  # without padding


@dataclass(frozen=True, slots=True)
class Paging:
    """The KV cache as the arrays see it. No sequence ever owns the scratch block."""

    block_size: int
    scratch_block: int


@dataclass(frozen=True, slots=True)
class _Subsequence:
    """What the attention op takes for one sequence: new tokens, how many came before, blocks."""

    token_ids: Sequence[int]
    start: int
    table: Sequence[int]


def batch(chunks: Sequence[Chunk], paging: Paging) -> Batch:
    """The arrays for `chunks`: not empty, and each either of prompt tokens or of generated ones."""
    parts: list[_Subsequence] = []
    begins: list[int] = []
    num_tokens = 0
    for chunk in chunks:
        begins.append(num_tokens)
        for part in _subsequences(chunk, paging):
            parts.append(part)
            num_tokens += len(part.token_ids)
    if num_missing := _num_missing(num_tokens):
        parts.append(_padding(num_missing, paging))
    indices, rows = _rows(chunks, begins)
    padding = [0] * _num_missing(len(indices))
    inputs = _arrays(parts) | {"sampled_tokens_indices": np.array(indices + padding, np.int64)}
    return Batch(inputs, rows, len(indices))


def passes(plan: StepPlan, prompt_rows_max: int) -> Iterator[Sequence[tuple[int, Chunk]]]:
    """The plan as forward passes, each a list of (index of the chunk in the plan, chunk).

    Almost always one pass. Prompt logprobs need a row of logits for every prompt token, so their
    chunks are cut until a pass has at most `prompt_rows_max` such rows. A chunk that has both
    prompt and generated tokens is cut between them. Pieces of one chunk never share a pass.
    """
    waiting: list[tuple[int, Chunk]] = []
    num_rows = 0
    for index, chunk in enumerate(plan.chunks):
        for piece_number, piece in enumerate(_pieces(chunk, prompt_rows_max)):
            needed = _num_prompt_rows(piece)
            if waiting and (piece_number > 0 or (needed and num_rows + needed > prompt_rows_max)):
                yield waiting
                waiting, num_rows = [], 0
            waiting.append((index, piece))
            num_rows += needed
    if waiting:
        yield waiting


def _pieces(chunk: Chunk, prompt_rows_max: int) -> Iterator[Chunk]:
    length = len(chunk.token_ids)
    boundary = _num_prompt(chunk) - chunk.start
    lengths = [boundary, length - boundary] if 0 < boundary < length else [length]
    first = 0
    for part in lengths:
        step = part if chunk.prompt_logprobs is None else min(part, prompt_rows_max)
        for begin in range(first, first + part, step):
            yield _piece(chunk, begin, min(begin + step, first + part))
        first += part


def _piece(chunk: Chunk, begin: int, end: int) -> Chunk:
    """Tokens `begin` to `end` of the chunk; draws stay with the piece that holds its end."""
    tokens = chunk.token_ids
    if (begin, end) == (0, len(tokens)):
        return chunk
    is_last = end == len(tokens)
    return replace(
        chunk,
        token_ids=tokens[begin:end],
        start=chunk.start + begin,
        draws=chunk.draws if is_last else (),
        next_token=chunk.next_token if is_last else tokens[end],
    )


def _num_prompt(chunk: Chunk) -> int:
    """Positions before this one hold prompt tokens; without any word on it, all of them do."""
    if chunk.num_prompt is not None:
        return chunk.num_prompt
    return chunk.draws[0].num_prompt if chunk.draws else chunk.start + len(chunk.token_ids)


def _num_prompt_rows(chunk: Chunk) -> int:
    return 0 if chunk.prompt_logprobs is None else len(chunk.token_ids)


def _subsequences(chunk: Chunk, paging: Paging) -> Iterator[_Subsequence]:
    length = len(chunk.token_ids)
    if chunk.start >= _num_prompt(chunk):
        for position, token in enumerate((*chunk.token_ids, *chunk.speculated), chunk.start):
            yield _Subsequence((token,), position, _table(chunk, position + 1, paging))
    elif length > 1:
        yield _Subsequence(
            chunk.token_ids, chunk.start, _table(chunk, chunk.start + length, paging)
        )
    else:
        table = [*_table(chunk, chunk.start + 1, paging), paging.scratch_block]
        num_blocks = _num_blocks(chunk.start + 2, paging)
        yield _Subsequence((*chunk.token_ids, _PADDING), chunk.start, table[:num_blocks])


def _num_missing(num_rows: int) -> int:
    """Rows of padding that a pass, or its logits, need to be of a size that passes have."""
    return max(_NUM_ROWS_MIN, rounded_size(num_rows)) - num_rows


def _padding(num_tokens: int, paging: Paging) -> _Subsequence:
    """All of it in the scratch block, over and over if need be: nothing reads what it writes."""
    table = (paging.scratch_block,) * _num_blocks(num_tokens, paging)
    return _Subsequence((_PADDING,) * num_tokens, 0, table)


def _table(chunk: Chunk, num_tokens: int, paging: Paging) -> Sequence[int]:
    return chunk.block_table[: _num_blocks(num_tokens, paging)]


def _num_blocks(num_tokens: int, paging: Paging) -> int:
    return -(-num_tokens // paging.block_size)


def _rows(chunks: Sequence[Chunk], begins: Sequence[int]) -> tuple[list[int], list[ChunkRows]]:
    """Token indices that need logits, in row order, and each chunk's share of the rows."""
    indices: list[int] = []
    rows = []
    for chunk, begin in zip(chunks, begins, strict=True):
        first = len(indices)
        next_tokens = _next_tokens(chunk)
        indices.extend(range(begin, begin + len(next_tokens)))
        draw = None
        if chunk.draws:
            if len(next_tokens) < len(chunk.token_ids):
                indices.append(begin + len(chunk.token_ids) - 1)
            draw = len(indices) - 1
            last = indices[-1]
            indices.extend(range(last + 1, last + 1 + len(chunk.speculated)))
        rows.append(ChunkRows(slice(first, first + len(next_tokens)), next_tokens, draw))
    return indices, rows


def _next_tokens(chunk: Chunk) -> Sequence[int]:
    if chunk.prompt_logprobs is None:
        return ()
    ending = () if chunk.next_token is None else (chunk.next_token,)
    return (*chunk.token_ids[1:], *ending)


def _arrays(parts: Sequence[_Subsequence]) -> dict[str, _Array]:
    starts = [part.start for part in parts]
    lengths = [len(part.token_ids) for part in parts]
    tables = [part.table for part in parts]
    begins = np.array([0, *accumulate(lengths)], np.int32)
    table_begins = np.array([0, *accumulate(map(len, tables))], np.int32)
    longest = max(start + length for start, length in zip(starts, lengths, strict=True))
    return {
        "input_ids": _joined([part.token_ids for part in parts], int(begins[-1]), np.int64),
        "position_ids": _positions(starts, lengths, begins),
        "past_lens": np.array(starts, np.int32),
        "subsequence_begins": begins,
        "block_indices": _joined(tables, int(table_begins[-1]), np.int32),
        "block_indices_begins": table_begins,
        "max_context_len": np.array(longest, np.int32),
    }


def _joined(parts: Sequence[Sequence[int]], count: int, dtype: type[_Int]) -> npt.NDArray[_Int]:
    return np.fromiter(chain.from_iterable(parts), dtype, count)


def _positions(
    starts: Sequence[int], lengths: Sequence[int], begins: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """start, start + 1, … for every chunk: a running index, shifted by chunk."""
    shift = np.array(starts, np.int64) - begins[:-1]
    return np.arange(int(begins[-1]), dtype=np.int64) + np.repeat(shift, lengths)
