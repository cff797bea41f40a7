"""From a row of logits to one token, for every draw on its own.

    logits ─▶ logit_bias ─▶ penalties ─▶ min_tokens ─▶ grammar ─┬─▶ argmax          temperature 0
                                                                └─▶ temperature ─▶ top_k ─▶ top_p
                                                                       ─▶ min_p ─▶ draw

A draw depends on its logits and its Draw, and on no other row: there is no generator whose state
a neighbour could advance. The random number is a hash of (seed, choice, position of the token), so
a seeded request says the same alone, in any batch, and again after a preemption.

Nothing that is wrong with one row may hurt another: a row without a possible token, a row that is
not finite and a grammar that breaks each end in `Sampled.error` of that draw. Numbers that are not
finite are the model's fault; what a request forbids itself is its own, and no retry would help it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvota.core.errors import BackendFailed, InvalidRequest, KvotaError
from kvota.core.plan import Draw, Sampled
from kvota.core.request import Constraint, SamplingParams, TokenLogprobs
from kvota.model.sampling_math import (
    Floats,
    Ids,
    above_min_p,
    nucleus,
    pick,
    rank_of,
    softmax_weights,
    token_logprobs,
    top_ids,
    uniform,
)

BIASES_KEPT = 64  # requests whose logit_bias is at hand as arrays
GREEDY_BELOW = 1e-5  # a lower temperature is taken as 0, as in vLLM
FORBIDDEN = np.float32(-np.inf)
NOT_FINITE = "The model's output for this token is not a number. Nothing can be drawn from it."
NOTHING_LEFT = (
    "No token may follow: grammar, min_tokens and logit_bias together forbid the whole vocabulary."
)


class Sampler:
    """Chooses tokens among the first `num_sampled` ids; the rest are padding rows of the head."""

    def __init__(self, vocab_size: int, *, num_sampled: int | None = None) -> None:
        """`vocab_size` is the width of the logits; `num_sampled` defaults to all of it."""
        num_sampled = vocab_size if num_sampled is None else num_sampled
        if not 0 < num_sampled <= vocab_size:
            raise ValueError(f"num_sampled must be in 1..{vocab_size}, got {num_sampled}")
        self._vocab_size = vocab_size
        self._num_sampled = num_sampled
        self._all_ids: Ids = np.arange(num_sampled)
        # By the mapping's identity, which no other has while it is kept here.
        self._biases: dict[int, tuple[Mapping[int, float], Ids, Floats]] = {}

    def sample(self, logits: Floats, draws: Sequence[Draw]) -> list[Sampled]:
        """One token per draw from `logits[rows, vocab]`, row i for draws[i].

        The logits are only read, and no part of them is kept.
        """
        return [self._sample(row, draw) for row, draw in zip(logits, draws, strict=True)]

    def prompt_logprobs(
        self, logits: Floats, next_tokens: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Log probabilities of the tokens that did follow, row i of `logits` for next_tokens[i].

        With their ranks: a prompt token may be anywhere in the ranking, far below the top.
        """
        return [
            self._ranked(row[: self._num_sampled], token, num_top)
            for row, token in zip(logits, next_tokens, strict=True)
        ]

    def _ranked(self, row: Floats, token: int, num_top: int) -> TokenLogprobs:
        return replace(token_logprobs(row, token, num_top), rank=rank_of(row, token))

    def _sample(self, row: Floats, draw: Draw) -> Sampled:
        row = row[: self._num_sampled]
        try:
            token = self._choose(self._scores(row, draw), draw)
        except _NoToken as failure:
            return Sampled(token=0, error=failure.error)
        wanted = draw.params.logprobs
        return Sampled(token, None if wanted is None else token_logprobs(row, token, wanted))

    def _scores(self, row: Floats, draw: Draw) -> Floats:
        """The row after everything that comes before the temperature: itself, or a copy."""
        params = draw.params
        num_produced = len(draw.tokens) - draw.num_prompt
        too_short = num_produced < params.min_tokens and bool(params.stop_token_ids)
        if not (params.logit_bias or _has_penalty(params) or too_short or draw.constraint):
            return row
        scores = row.copy()
        if params.logit_bias:
            self._add_bias(scores, params)
        if _has_penalty(params):
            self._penalise(scores, draw)
        if too_short:
            scores[self._inside(sorted(params.stop_token_ids))] = FORBIDDEN
        if draw.constraint:
            self._forbid(scores, draw.constraint)
        return scores

    def _choose(self, scores: Floats, draw: Draw) -> int:
        best = int(scores.argmax())  # the lowest id of the highest; the first NaN if there is one
        if not np.isfinite(scores[best]):
            is_forbidden = scores[best] == FORBIDDEN
            raise _NoToken(
                InvalidRequest(NOTHING_LEFT) if is_forbidden else BackendFailed(NOT_FINITE)
            )
        params = draw.params
        if params.temperature < GREEDY_BELOW:
            return best
        ids = self._all_ids
        if params.top_k is not None:
            ids = top_ids(scores, params.top_k)
            scores = scores[ids]
        weights = softmax_weights(scores, params.temperature)
        if params.top_p < 1.0:
            kept = nucleus(weights, params.top_p)
            ids, weights = ids[kept], weights[kept]
        if params.min_p > 0.0:
            kept = above_min_p(weights, params.min_p)
            ids, weights = ids[kept], weights[kept]
        return int(ids[pick(weights, uniform(params.seed, draw.choice, len(draw.tokens)))])

    def _add_bias(self, scores: Floats, params: SamplingParams) -> None:
        ids, values = self._bias_arrays(params.logit_bias)
        scores[ids] += values

    def _bias_arrays(self, logit_bias: Mapping[int, float]) -> tuple[Ids, Floats]:
        """Made once for a mapping, which a request has for all its draws, not once a draw."""
        known = self._biases.get(id(logit_bias))
        if known is None:
            inside = {t: bias for t, bias in logit_bias.items() if 0 <= t < self._num_sampled}
            ids = np.fromiter(inside.keys(), np.int64, len(inside))
            values = np.fromiter(inside.values(), np.float32, len(inside))
            known = self._biases[id(logit_bias)] = (logit_bias, ids, values)
            if len(self._biases) > BIASES_KEPT:
                del self._biases[next(iter(self._biases))]
        return known[1], known[2]

    def _penalise(self, scores: Floats, draw: Draw) -> None:
        """Repetition as in Hugging Face (prompt and output), the other two as in OpenAI (output).

        A repeated token's score is divided by the penalty when positive and multiplied when not;
        then frequency · count + presence is taken off the tokens of the output.
        """
        params = draw.params
        if params.repetition_penalty != 1.0:
            seen, _ = self._counts(draw.tokens)
            penalty = np.float32(params.repetition_penalty)
            scores[seen] *= np.where(scores[seen] > 0, 1 / penalty, penalty)
        if params.presence_penalty or params.frequency_penalty:
            used, counts = self._counts(draw.tokens[draw.num_prompt :])
            scores[used] -= params.presence_penalty + params.frequency_penalty * counts

    def _forbid(self, scores: Floats, constraint: Constraint) -> None:
        """Forbid what the grammar does not allow next."""
        words = np.zeros((self._vocab_size + 31) // 32, np.int32)
        try:
            constraint.write_mask(words)
        except InvalidRequest as failure:
            raise _NoToken(failure) from failure
        except Exception as failure:  # the boundary: a constraint may break, its neighbours not
            raise _NoToken(BackendFailed(f"The grammar cannot go on: {failure}")) from failure
        scores[~_unpack(words, len(scores))] = FORBIDDEN

    def _counts(self, tokens: Sequence[int]) -> tuple[Ids, Ids]:
        """The distinct ids and how often each occurs, counted anew: cheap, and cannot go stale."""
        return np.unique(self._inside(tokens), return_counts=True)

    def _inside(self, tokens: Sequence[int]) -> Ids:
        """The ids that have a score; a prompt may name others, such as image placeholders."""
        ids = np.asarray(tokens, np.int64)
        return ids[(ids >= 0) & (ids < self._num_sampled)]


class _NoToken(Exception):
    """This draw has no token; the error says why, and whose fault it is."""

    def __init__(self, error: KvotaError) -> None:
        super().__init__(error.message)
        self.error = error


def _has_penalty(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _unpack(words: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.bool_]:
    """The first `count` bits of little-endian words as booleans."""
    return np.unpackbits(words.view(np.uint8), count=count, bitorder="little").view(np.bool_)
