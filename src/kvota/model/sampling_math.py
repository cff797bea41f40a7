"""The arithmetic of choosing a token: arrays in, arrays out, no state.

Tokens are ranked by score, the higher first, and equal scores by id, the lower first. Every cut
(top_k, top_p, top logprobs) keeps the head of this ranking, so ties cannot make it depend on the
order in which a sort happened to work.

Scores are one row of float32 without NaN or +inf; a forbidden token is -inf. Weights are
probabilities before normalisation: exp((score - max) / temperature), so the largest is 1.
"""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvota.core.request import TokenLogprobs

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

GROUP_SIZE = 64  # of the groups whose maxima bound the k-th largest score from below
SPAN = 512  # of the spans that are summed before the span of the draw is searched


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on nothing but the arguments."""
    digest = blake2b(f"{seed}:{choice}:{position}".encode(), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def top_ids(scores: Floats, count: int) -> Ids:
    """The first `count` ids of the ranking, as ascending ids."""
    if count >= len(scores):
        return np.arange(len(scores))
    return _head(scores, count, _kth_largest(scores, count))


def softmax_weights(scores: Floats, temperature: float) -> Floats:
    """exp((score - max) / temperature); a difference too large for float32 becomes 0."""
    with np.errstate(over="ignore"):
        weights: Floats = (scores - scores.max()) / np.float32(temperature)
    np.exp(weights, out=weights)
    return weights


def nucleus(weights: Floats, top_p: float) -> Ids:
    """The shortest head of the ranking that holds at least `top_p` of the mass, as ascending ids.

    A token stays when the tokens ranked before it hold less than `top_p`; so the one that
    crosses the line stays, and at least one always does.

    Only the tokens of at least (1 - top_p) · total / len are sorted: all others together cannot
    hold more than 1 - top_p, so the head ends before them.
    """
    total = float(weights.sum(dtype=np.float64))
    candidates = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    ranked = np.sort(weights[candidates])[::-1]
    crossing = int(np.searchsorted(ranked.cumsum(dtype=np.float64), top_p * total))
    count = min(crossing + 1, len(candidates))
    return candidates[_head(weights[candidates], count, ranked[count - 1])]


def above_min_p(weights: Floats, min_p: float) -> Ids:
    """The ids of at least `min_p` times the probability of the most likely token, ascending."""
    return np.flatnonzero(weights >= min_p * weights.max())


def pick(weights: Floats, point: float) -> int:
    """The index i with cdf(i - 1) <= point < cdf(i), in index order; its weight is never 0.

    Index order rather than rank order: noise of the kernels moves every boundary by a hair
    there, while two tokens of almost equal score would trade places in a ranking.
    """
    spans = np.add.reduceat(weights, np.arange(0, len(weights), SPAN), dtype=np.float64).cumsum()
    target = point * float(spans[-1])
    span = _first_above(spans, target)
    before = float(spans[span - 1]) if span else 0.0
    inside = weights[span * SPAN : (span + 1) * SPAN].cumsum(dtype=np.float64)
    return span * SPAN + _first_above(inside, target - before)


def rank_of(scores: Floats, token: int) -> int | None:
    """The place of `token` in the ranking, from 1; None in a row that is not finite."""
    if not np.isfinite(scores.max()):
        return None
    own = scores[token]
    num_ahead = np.count_nonzero(scores > own) + np.count_nonzero(scores[:token] == own)
    return 1 + int(num_ahead)


def token_logprobs(scores: Floats, token: int, num_top: int) -> TokenLogprobs:
    """Natural-log probabilities of `token` and of the first `num_top` of the ranking.

    A row that is not finite has no probabilities: then the logprob is NaN and `top` is empty.
    """
    peak = float(scores.max())
    if not np.isfinite(peak):
        return TokenLogprobs(token, float("nan"))
    log_total = peak + float(np.log(np.exp(scores - scores.max()).sum(dtype=np.float64)))
    top = top_ids(scores, num_top) if num_top else np.empty(0, np.int64)
    ranked = top[np.argsort(-scores[top], kind="stable")]
    logprobs = scores[ranked].astype(np.float64) - log_total  # as precise as the token's own
    pairs = zip(ranked.tolist(), logprobs.tolist(), strict=True)
    return TokenLogprobs(token, float(scores[token]) - log_total, tuple(pairs))


def _kth_largest(scores: Floats, k: int) -> np.float32:
    """The k-th largest score, 1 <= k <= len.

    At least k scores reach the k-th largest of the group maxima, so everything below it is
    dropped before the partition. Groups are columns of a matrix: their maxima are one cheap pass.
    """
    groups = len(scores) // GROUP_SIZE
    if k < groups:
        maxima = scores[: GROUP_SIZE * groups].reshape(GROUP_SIZE, groups).max(axis=0)
        scores = scores[scores >= np.partition(maxima, groups - k)[groups - k]]
    return np.float32(np.partition(scores, len(scores) - k)[len(scores) - k])


def _head(values: Floats, count: int, cut: np.float32) -> Ids:
    """The `count` first of the ranking, ascending, given the value `cut` of the last of them."""
    kept = np.flatnonzero(values >= cut)
    surplus = len(kept) - count
    if not surplus:
        return kept
    ties = np.flatnonzero(values[kept] == cut)
    return np.delete(kept, ties[len(ties) - surplus :])


def _first_above(cumulative: Doubles, target: float) -> int:
    """The first index above `target`; the last one that adds mass when rounding leaves none."""
    index = int(np.searchsorted(cumulative, target, side="right"))
    return min(index, int(np.searchsorted(cumulative, cumulative[-1])))
