"""Good, worse or undecided: the rule of the gate, which chance alone must not fail.

Every measure is an estimate with an error, written so that more is worse. With its one-sided
bounds at 95 %:

    worse        the lower bound is above what is allowed: chance does not explain it
    good         the upper bound is within what is allowed
    undecided    what is allowed lies between the two: more text or questions would decide

Whatever is measured in several parts (texts, tasks) is judged as a whole by this rule, and each
part only for being worse, at a confidence of 1 − 5 %/parts, so that many parts do not make a false
alarm likely. One check that is worse makes the whole worse; else one undecided makes it undecided.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import expm1

from kvota.tools.evaluate.agreement import Agreement
from kvota.tools.evaluate.estimate import Estimate
from kvota.tools.evaluate.likelihood import Likelihood
from kvota.tools.evaluate.tasks import TaskScore, pooled

CONFIDENCE = 0.95
PIECES_MIN = 8  # of a whole: with fewer, an error says little
PART_PIECES_MIN = 4


class Verdict(StrEnum):
    GOOD = "good"
    WORSE = "worse"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Rules:
    """What is allowed. `max_drop` is relative: 0.05 is a perplexity 5 % higher, or 5 % fewer right
    answers. `max_kl` in nats per token. None: not judged."""

    max_drop: float = 0.05
    max_kl: float | None = None
    min_agreement: float | None = None  # of greedy tokens before the first difference


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, applied. `low` and `high` are the bounds of what was measured."""

    name: str
    allowed: float
    measured: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    reason: str


Scale = Callable[[float], float]  # monotonic, from what was estimated to what is allowed


def judge(
    name: str, estimate: Estimate | None, allowed: float, absent: str, scale: Scale = float
) -> Check:
    """A whole by the rule above. `estimate` None: not measured, for the reason `absent`."""
    if estimate is None or estimate.num_pieces < PIECES_MIN:
        few = absent if estimate is None else f"only {estimate.num_pieces} independent pieces"
        return Check(name, allowed, None, None, None, Verdict.UNDECIDED, few)
    low, high = scale(estimate.low(CONFIDENCE)), scale(estimate.high(CONFIDENCE))
    if low > allowed:
        verdict, reason = Verdict.WORSE, "even its lower bound is above what is allowed"
    elif high <= allowed:
        verdict, reason = Verdict.GOOD, "its upper bound is within what is allowed"
    else:
        verdict, reason = Verdict.UNDECIDED, "what is allowed lies within its error"
    return Check(name, allowed, scale(estimate.mean), low, high, verdict, reason)


def judge_parts(
    what: str,
    parts: Sequence[tuple[str, Estimate, float]],
    scale: Scale = float,
) -> list[Check]:
    """Of (name, estimate, allowed), those shown to be worse, by a bound fit for their number."""
    found = []
    for name, estimate, allowed in parts:
        confidence = 1 - (1 - CONFIDENCE) / len(parts)
        low, high = scale(estimate.low(confidence)), scale(estimate.high(confidence))
        if estimate.num_pieces < PART_PIECES_MIN or low <= allowed:
            continue
        reason = f"worse on its own, at a confidence of {confidence:.1%}"
        mean = scale(estimate.mean)
        found.append(Check(f"{what}, {name}", allowed, mean, low, high, Verdict.WORSE, reason))
    return found


def likelihood_checks(rules: Rules, found: Sequence[Likelihood], absent: str) -> list[Check]:
    """Perplexity, of all texts and of each; KL where a limit is given."""
    whole = found[0] if found else None
    difference = whole.difference if whole else None
    parts = [(one.name, one.difference, rules.max_drop) for one in found[1:]]
    checks = [
        judge("perplexity", difference, rules.max_drop, absent, expm1),
        *judge_parts("perplexity", parts, expm1),
    ]
    if rules.max_kl is not None:
        kl = whole.divergence if whole else None
        checks.append(judge("KL divergence, lower bound", kl, rules.max_kl, absent))
    return checks


def agreement_checks(rules: Rules, found: Agreement | None, own: Agreement | None) -> list[Check]:
    """Where a limit is given. A baseline that does not reach it itself cannot ask for it."""
    if rules.min_agreement is None:
        return []
    name, allowed = "greedy disagreement", 1 - rules.min_agreement
    if own is not None and own.until_first.mean < rules.min_agreement:
        reason = f"the baseline agrees with itself only to {own.until_first.mean:.1%}"
        return [Check(name, allowed, None, None, None, Verdict.UNDECIDED, reason)]
    return [judge(name, _rest(found.until_first) if found else None, allowed, "nothing was said")]


def task_checks(rules: Rules, found: Sequence[TaskScore], absent: str | None) -> list[Check]:
    """Right answers, of all tasks and of each. `absent`: tasks were asked for and not run."""
    if not found:
        return [judge("tasks", None, rules.max_drop, absent)] if absent else []
    whole = pooled(found)
    parts = [(one.task, one.drop, rules.max_drop * one.baseline) for one in found]
    return [
        judge("right answers", whole.drop, rules.max_drop * whole.baseline, ""),
        *judge_parts("right answers", parts if len(parts) > 1 else []),
    ]


def verdict_of(checks: Sequence[Check]) -> Verdict:
    verdicts = {one.verdict for one in checks}
    for verdict in (Verdict.WORSE, Verdict.UNDECIDED):
        if verdict in verdicts:
            return verdict
    return Verdict.GOOD


def _rest(estimate: Estimate) -> Estimate:
    return Estimate(1 - estimate.mean, estimate.error, estimate.num_pieces)
