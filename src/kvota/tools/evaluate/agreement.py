"""How far two greedy continuations of the same prompt are the same.

After the first different token the two texts go their own ways, so a single close call early costs
most of an answer, and a good version may agree little. The baseline's agreement with itself, asked
twice, is the yardstick: what lies below it is not noise of the server.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvota.tools.evaluate.answers import Continuation
from kvota.tools.evaluate.estimate import Estimate, ratio


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one prompt: tokens in the longer answer, equal ones before the first difference, and
    equal ones at the same place anywhere."""

    length: int
    until_first: int
    overall: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of tokens over all prompts; `whole` the share of answers that are equal."""

    num_prompts: int
    until_first: Estimate
    overall: Estimate
    whole: Estimate
    is_tokens: bool  # else characters


def overlap(left: Sequence[Hashable], right: Sequence[Hashable]) -> Overlap:
    same = [one == other for one, other in zip(left, right, strict=False)]
    first = same.index(False) if False in same else len(same)
    return Overlap(max(len(left), len(right)), first, sum(same))


def agreement(
    left: Sequence[Continuation], right: Sequence[Continuation], *, has_same_tokens: bool
) -> Agreement | None:
    """Over all prompts; None when neither side said anything to any of them.

    Tokens are compared where both sides tell them in the same way and, as `has_same_tokens` says,
    mean the same by them; else characters.
    """
    unit = _unit([*left, *right]) if has_same_tokens else "text"
    overlaps = [
        overlap(getattr(one, unit), getattr(other, unit))
        for one, other in zip(left, right, strict=True)
    ]
    overlaps = [one for one in overlaps if one.length > 0]
    if not overlaps:
        return None
    sizes = [one.length for one in overlaps]
    whole = [float(one.until_first == one.length) for one in overlaps]
    return Agreement(
        num_prompts=len(overlaps),
        until_first=ratio([one.until_first for one in overlaps], sizes),
        overall=ratio([one.overall for one in overlaps], sizes),
        whole=ratio(whole, [1.0] * len(whole)),
        is_tokens=unit != "text",
    )


def _unit(answers: Sequence[Continuation]) -> Literal["ids", "names", "text"]:
    if all(one.ids is not None for one in answers):
        return "ids"
    return "names" if all(one.names is not None for one in answers) else "text"
