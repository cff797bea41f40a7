"""The sampler's oracle: every rule in plain Python and float64, as its documentation says it.

It works on whole distributions and knows nothing of partitions, spans or candidates.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvota.core.plan import Draw

FORBIDDEN = -math.inf


@dataclass(frozen=True)
class Distribution:
    """What a draw chooses from: probabilities by id (absent: cannot be drawn), and the draw."""

    probabilities: dict[int, float]
    point: float
    # Distance of the nearest cut-off decision from its threshold, in probability. Below the
    # precision of float32 the two sides may decide differently and both be right.
    margin: float

    def interval(self, token: int) -> tuple[float, float]:
        """The part of [0, 1) that belongs to `token`, in order of ids."""
        low = math.fsum(p for other, p in self.probabilities.items() if other < token)
        return low, low + self.probabilities[token]


def expected_scores(
    logits: Sequence[float], draw: Draw, allowed: Collection[int] | None = None
) -> list[float]:
    """Everything before the temperature."""
    params, output = draw.params, draw.tokens[draw.num_prompt :]
    scores = [score + params.logit_bias.get(token, 0.0) for token, score in enumerate(logits)]
    for token in set(draw.tokens):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids:
            scores[token] = FORBIDDEN
    if allowed is not None:
        scores = [s if token in allowed else FORBIDDEN for token, s in enumerate(scores)]
    return scores


def expected_greedy(scores: Sequence[float]) -> int:
    return min(range(len(scores)), key=lambda token: (-scores[token], token))


def expected_distribution(scores: Sequence[float], draw: Draw) -> Distribution:
    """Temperature, top_k, top_p, min_p, each on the normalised result of the one before."""
    params = draw.params
    ranking = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    ranking = [token for token in ranking if scores[token] > FORBIDDEN][: params.top_k]
    mass = _softmax([scores[token] / params.temperature for token in ranking])
    margins, kept, before = [1.0], [], 0.0
    for token, probability in zip(ranking, mass, strict=True):
        margins.append(abs(before - params.top_p) if params.top_p < 1 else 1.0)
        if before < params.top_p:
            kept.append((token, probability))
        before += probability
    line = params.min_p * max(p for _, p in kept)
    margins += [abs(p - line) / kept[0][1] for _, p in kept if params.min_p > 0]
    kept = [(token, p) for token, p in kept if p >= line]
    total = math.fsum(p for _, p in kept)
    digest = blake2b(
        f"{params.seed}:{draw.choice}:{len(draw.tokens)}".encode(), digest_size=8
    ).digest()
    point = (int.from_bytes(digest, "little") >> 11) / 2**53
    return Distribution({token: p / total for token, p in kept}, point, min(margins))


def expected_logprobs(logits: Sequence[float]) -> list[float]:
    return [math.log(p) for p in _softmax(logits)]


def _softmax(scores: Sequence[float]) -> list[float]:
    peak = max(scores)
    weights = [math.exp(score - peak) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
