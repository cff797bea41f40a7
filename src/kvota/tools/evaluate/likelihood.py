"""What the log probabilities of windows say: perplexity on both sides, divergence, same top token.

Perplexity is exp of the mean surprise −ln p(token | before) over all scored tokens: exact, since
servers tell the log probability of every prompt token. The rise of the candidate is measured as
the mean of the paired differences d = ln p_baseline − ln p_candidate in nats per token, so that

    perplexity(candidate) / perplexity(baseline) = exp(mean d)

and its error comes from windows as the independent pieces (`estimate.py`). Where tokenizers differ,
the candidate's surprise is taken over the same bytes of text and counted per token of the baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from kvota.tools.evaluate.answers import Scored
from kvota.tools.evaluate.divergence import divergence, has_same_top
from kvota.tools.evaluate.estimate import Estimate, ratio
from kvota.tools.evaluate.windows import Window

ALL = "all texts"


@dataclass(frozen=True, slots=True)
class WindowScore:
    """Sums over the scored tokens of one window, in nats. None: tokens cannot be compared."""

    text: str
    num_tokens: int  # of the baseline
    baseline: float
    candidate: float
    divergence: float | None = None
    covered: float | None = None
    num_same_top: int | None = None


@dataclass(frozen=True, slots=True)
class Likelihood:
    """One text, or all of them."""

    name: str
    num_windows: int
    num_tokens: int
    perplexity_baseline: float
    perplexity_candidate: float
    difference: Estimate  # nats per token; positive is worse
    divergence: Estimate | None  # nats per token, a lower bound of the mean KL
    covered: float | None  # of the baseline's probability, by the tokens that both named
    same_top: Estimate | None


def compare_tokens(window: Window, baseline: Scored, candidate: Scored) -> WindowScore:
    """The same token ids on both sides: all places that both know, after the prefix."""
    pairs = [
        (p, q)
        for p, q in zip(
            baseline.positions[window.num_prefix :],
            candidate.positions[window.num_prefix :],
            strict=True,
        )
        if p is not None and q is not None
    ]
    apart = [divergence(p, q) for p, q in pairs]
    return WindowScore(
        text=window.text,
        num_tokens=len(pairs),
        baseline=-sum(p.logprob for p, _ in pairs),
        candidate=-sum(q.logprob for _, q in pairs),
        divergence=sum(one.nats for one in apart),
        covered=sum(one.covered for one in apart),
        num_same_top=sum(has_same_top(p, q) for p, q in pairs),
    )


def compare_text(window: Window, baseline: Scored, candidate: Scored) -> WindowScore:
    """The same text under two tokenizers."""
    assert isinstance(window.prompt, str)
    surprises = [-sum(place.logprob for place in one.known) for one in (baseline, candidate)]
    sizes = [_scored_bytes(window.prompt, one) for one in (baseline, candidate)]
    return WindowScore(
        text=window.text,
        num_tokens=len(baseline.known),
        baseline=surprises[0],
        candidate=surprises[1] * sizes[0] / sizes[1],
    )


def _scored_bytes(text: str, scored: Scored) -> int:
    """Bytes of the text whose tokens have a log probability: all, but for a first token of text."""
    first = scored.names[0] if scored.names and scored.positions[0] is None else ""
    is_of_text = bool(first) and text.startswith(first)
    return max(1, len(text.encode()) - (len(first.encode()) if is_of_text else 0))


def summarize(scores: Sequence[WindowScore]) -> list[Likelihood]:
    """All texts together first, then each. There must be one scored token at least."""
    scores = [one for one in scores if one.num_tokens > 0]
    names = dict.fromkeys(one.text for one in scores)
    return [_likelihood(ALL, scores)] + [
        _likelihood(name, [one for one in scores if one.text == name]) for name in names
    ]


def _likelihood(name: str, scores: Sequence[WindowScore]) -> Likelihood:
    sizes = [one.num_tokens for one in scores]
    num = sum(sizes)
    covered = [one.covered for one in scores if one.covered is not None]
    return Likelihood(
        name=name,
        num_windows=len(scores),
        num_tokens=num,
        perplexity_baseline=exp(sum(one.baseline for one in scores) / num),
        perplexity_candidate=exp(sum(one.candidate for one in scores) / num),
        difference=ratio([one.candidate - one.baseline for one in scores], sizes),
        divergence=_ratio([one.divergence for one in scores], sizes),
        covered=sum(covered) / num if len(covered) == len(scores) else None,
        same_top=_ratio([one.num_same_top for one in scores], sizes),
    )


def _ratio(totals: Sequence[float | None], sizes: Sequence[int]) -> Estimate | None:
    known = [one for one in totals if one is not None]
    return ratio(known, sizes) if len(known) == len(totals) else None
