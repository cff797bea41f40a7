"""Tokens per second while a load lasts: with N at once all N are busy, and not all just beginning.

A run begins with N prompts together, and at its end fewer and fewer are left: the slowest. Both are
no part of what N at once means, and how long they are hangs on how many requests a run has. So
tokens count from when two requests for each client have been sent until the last has been. Whose
requests all take equally many steps goes round in waves; for them this is a whole number of waves.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """How many tokens there are at a moment."""

    num_tokens: int
    at_s: float


def wanted_marks(at_once: int, num_requests: int) -> tuple[int, int]:
    """When to look: once so many requests are sent. Raises ValueError when those are too few."""
    if num_requests <= 2 * at_once:
        raise ValueError(
            f"{num_requests} requests are too few for {at_once} at once: more than 2 each"
        )
    return 2 * at_once, num_requests


def rate(start: Mark, end: Mark) -> float:
    """Tokens per second in between."""
    return (end.num_tokens - start.num_tokens) / (end.at_s - start.at_s)
