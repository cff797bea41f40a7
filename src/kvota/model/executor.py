"""Runs step plans on OpenVINO's CPU kernels.

    plan ─▶ copy blocks ─▶ arrays ─▶ forward pass ─▶ rows of logits ─▶ sampler ─▶ result

Not thread-safe: one step at a time. The forward pass releases the interpreter's lock.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import openvino as ov

from kvota.core.plan import (
    BlockCopy,
    Capacity,
    Chunk,
    ChunkResult,
    Draw,
    Sampled,
    StepPlan,
    StepResult,
)
from kvota.core.request import TokenLogprobs
from kvota.model.batch import Batch, ChunkRows, Paging, batch, passes

_Logits = npt.NDArray[np.float32]

PROMPT_LOGITS_BYTES_MAX = 32 * 1024 * 1024  # of the rows that a pass computes for prompt logprobs


class TokenSampler(Protocol):
    """Turns rows of logits into tokens and log probabilities."""

    def sample(self, logits: _Logits, draws: Sequence[Draw]) -> Sequence[Sampled]: ...

    def prompt_logprobs(
        self, logits: _Logits, next_tokens: Sequence[int], num_top: int
    ) -> Sequence[TokenLogprobs]: ...


class OpenVinoExecutor:
    """The engine's Executor over one compiled model and its KV caches, which never grow.

    `caches` hold one block more than `capacity` says: scratch space for padding.
    """

    def __init__(
        self,
        request: ov.InferRequest,
        caches: Sequence[ov.Tensor],
        capacity: Capacity,
        sampler: TokenSampler,
        *,
        vocab_size: int,
    ) -> None:
        self._request = request
        self._caches = [tensor.data for tensor in caches]
        self._capacity = capacity
        self._paging = Paging(capacity.block_size, scratch_block=capacity.num_blocks)
        self._sampler = sampler
        self._prompt_rows_max = max(1, PROMPT_LOGITS_BYTES_MAX // (4 * vocab_size))

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute every chunk's tokens into KV, answer draws and prompt logprobs."""
        self._copy(plan.copies)
        sampled: list[Sequence[Sampled]] = [()] * len(plan.chunks)
        logprobs: list[list[TokenLogprobs]] = [[] for _ in plan.chunks]
        for owned_chunks in passes(plan, self._prompt_rows_max):
            chunks = [chunk for _, chunk in owned_chunks]
            step = batch(chunks, self._paging)
            logits = self._forward(step)
            answers = self._sample(chunks, step, logits)
            for (owner, chunk), rows, drawn in zip(owned_chunks, step.rows, answers, strict=True):
                sampled[owner] = drawn
                logprobs[owner].extend(self._prompt_logprobs(chunk, rows, logits))
        return StepResult([ChunkResult(*both) for both in zip(sampled, logprobs, strict=True)])

    def logits(self, chunks: Sequence[Chunk]) -> _Logits:
        """Compute `chunks` into KV in one pass; a copy of the rows they ask for, in order.

        A seam for tests. A chunk must not have both prompt and generated tokens.
        """
        return self._forward(batch(chunks, self._paging)).copy()

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            for cache in self._caches:
                cache[copy.target] = cache[copy.source]

    def _forward(self, step: Batch) -> _Logits:
        """Logits [num_rows, vocab]; a view that the next pass overwrites."""
        outputs = self._request.infer(step.inputs, share_inputs=True, share_outputs=True)
        logits: _Logits = outputs["logits"]
        return logits[: step.num_rows]

    def _sample(
        self, chunks: Sequence[Chunk], step: Batch, logits: _Logits
    ) -> list[Sequence[Sampled]]:
        """Each chunk's drawn tokens. Several draws of a chunk read the same row."""
        draws_of = [_draws(chunk) for chunk in chunks]
        draws = [draw for own in draws_of for draw in own]
        if not draws:
            return [()] * len(chunks)
        drawn = iter(self._sampler.sample(_draw_rows(chunks, step, logits), draws))
        return [
            _as_guessed([next(drawn) for _ in own], chunk.speculated)
            for chunk, own in zip(chunks, draws_of, strict=True)
        ]

    def _prompt_logprobs(
        self, chunk: Chunk, rows: ChunkRows, logits: _Logits
    ) -> Sequence[TokenLogprobs]:
        if chunk.prompt_logprobs is None or not rows.next_tokens:
            return ()
        return self._sampler.prompt_logprobs(
            logits[rows.prompt], rows.next_tokens, chunk.prompt_logprobs
        )


def _draws(chunk: Chunk) -> Sequence[Draw]:
    """The chunk's own, and one after each speculated token, as if that had been drawn."""
    if not chunk.speculated:
        return chunk.draws
    [draw] = chunk.draws
    tokens, draws = [*draw.tokens], [draw]
    for guess in chunk.speculated:
        tokens = [*tokens, guess]
        draws.append(replace(draw, tokens=tokens))
    return draws


def _as_guessed(drawn: list[Sampled], speculated: Sequence[int]) -> Sequence[Sampled]:
    """Up to the first that is not what was speculated: the rest followed another token."""
    for number, (sampled, guess) in enumerate(zip(drawn, speculated, strict=False), 1):
        if sampled.error is not None or sampled.token != guess:
            return drawn[:number]
    return drawn


def _draw_rows(chunks: Sequence[Chunk], step: Batch, logits: _Logits) -> _Logits:
    """One row per draw; the logits themselves, uncopied, when they are that already."""
    wanted: list[int] = []
    for chunk, rows in zip(chunks, step.rows, strict=True):
        if rows.draw is not None:
            wanted.extend([rows.draw] * len(chunk.draws))
            wanted.extend(range(rows.draw + 1, rows.draw + 1 + len(chunk.speculated)))
    return logits if wanted == list(range(step.num_rows)) else logits[wanted]
