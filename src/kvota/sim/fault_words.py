"""Faults as an operator writes them, and as a report tells them.

    executor_error@120         the first step after 120 s fails as a whole, and is repeated
    executor_error@120:0.5     and half of its requests fail again alone
    slow_step@60:2.0           the first step after 60 s takes 2 s longer
    abort_storm@30:0.5         at 30 s half of all open requests are cancelled
    clock_jump@90:30           at 90 s the machine stands still for 30 s

Moments are seconds of the simulated clock, which begins with the trace.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvota.core.errors import ConfigError
from kvota.sim.faults import Fault, FaultPlan, Jump, SlowStep, StepError, Storm, Strike

_SHAPE = re.compile(r"(?P<kind>\w+)@(?P<at>[^:]+)(:(?P<value>.+))?")
_EXAMPLES = (
    "executor_error@120, executor_error@120:0.5, slow_step@60:2.0, abort_storm@30:0.5 or "
    "clock_jump@90:30"
)
_NEW: Mapping[str, Callable[[float, float], Fault]] = {
    "executor_error": StepError,
    "slow_step": SlowStep,
    "abort_storm": Storm,
    "clock_jump": Jump,
}
_SHARES = frozenset({"executor_error", "abort_storm"})


def plan_of(words: Iterable[str]) -> FaultPlan:
    """Raises ConfigError, naming the word, when one says no fault."""
    faults = [_fault_of(word) for word in words]
    return FaultPlan(
        storms=tuple(one for one in faults if isinstance(one, Storm)),
        jumps=tuple(one for one in faults if isinstance(one, Jump)),
        errors=tuple(one for one in faults if isinstance(one, StepError)),
        slow_steps=tuple(one for one in faults if isinstance(one, SlowStep)),
    )


def planned(plan: FaultPlan) -> Sequence[Fault]:
    """All faults that have a moment, in its order."""
    faults: list[Fault] = [*plan.storms, *plan.jumps, *plan.of_steps]
    return sorted(faults, key=lambda fault: fault.at_s)


def word_of(fault: Fault) -> str:
    """The word that `plan_of` reads as this fault."""
    match fault:
        case StepError(at_s, share):
            return f"executor_error@{at_s:g}:{share:g}"
        case SlowStep(at_s, seconds):
            return f"slow_step@{at_s:g}:{seconds:g}"
        case Storm(at_s, share):
            return f"abort_storm@{at_s:g}:{share:g}"
        case Jump(at_s, seconds):
            return f"clock_jump@{at_s:g}:{seconds:g}"


def told(plan: FaultPlan, struck: Sequence[Strike]) -> list[str]:
    """One line for every fault that was planned for a moment: what it did, or that it did not."""
    lines = [f"{word_of(one.fault)}: at {one.at_s:.3f} s {one.effect}" for one in struck]
    missed = [fault for fault in planned(plan) if all(one.fault is not fault for one in struck)]
    return lines + [f"{word_of(fault)}: no step came after it" for fault in missed]


def _fault_of(word: str) -> Fault:
    shape = _SHAPE.fullmatch(word)
    if shape is None or shape["kind"] not in _NEW:
        raise ConfigError(f"--fault {word}: write {_EXAMPLES}.")
    kind, at_s = shape["kind"], _number(word, shape["at"])
    if shape["value"] is None and kind != "executor_error":
        raise ConfigError(f"--fault {word}: it needs a number after a colon, as in {_EXAMPLES}.")
    value = _number(word, shape["value"] or "0")
    if kind in _SHARES and value > 1:
        raise ConfigError(f"--fault {word}: the share must be in 0 to 1, got {value:g}.")
    return _NEW[kind](at_s, value)


def _number(word: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"--fault {word}: {text!r} is no number.") from None
    if not 0 <= value < math.inf:
        reason = " The node's clock is monotonic: it can stand still, but never goes back."
        raise ConfigError(
            f"--fault {word}: {value:g} must be 0 or more, and finite."
            + (reason if word.startswith("clock_jump") and value < 0 else "")
        )
    return value
