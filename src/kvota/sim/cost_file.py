"""What `kvota calibrate --out` writes and `kvota simulate --cost` reads.

    {"base": 0.0114, …, "jitter": {"expected": [0.012, …], "taken": [0.0118, …]}}

`jitter` holds the recorded steps in their order, in seconds: what was expected of each and what it
took. It may be left out; then every step takes what it costs, and figures lack their slow tail.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvota.core.errors import ConfigError
from kvota.sim.calibration import Calibration
from kvota.sim.executor import StepCost
from kvota.sim.jitter import Jitter

STEPS_MAX: Final = 20_000  # in a file: the latest
_DIGITS: Final = 4
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class RecordedTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of the same steps."""

    expected: list[Seconds]
    taken: list[Seconds]


class _File(msgspec.Struct, frozen=True, kw_only=True):
    jitter: RecordedTurns | None = None


def write_cost(fit: Calibration, path: Path) -> None:
    """Raises ConfigError when it cannot be written."""
    kept = fit.turns[-STEPS_MAX:]
    jitter = {
        "expected": [_rounded(expected) for expected, _ in kept],
        "taken": [_rounded(taken) for _, taken in kept],
    }
    text = msgspec.json.encode({**asdict(fit.cost), "jitter": jitter})
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def read_cost(path: Path) -> tuple[StepCost, Jitter | None]:
    """Raises ConfigError, saying what is wrong with the file."""
    try:
        text = path.read_bytes()
        cost = msgspec.json.decode(text, type=StepCost)
        turns = msgspec.json.decode(text, type=_File).jitter
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no step cost: {error}.") from error
    if turns is None:
        return cost, None
    if not turns.expected or len(turns.expected) != len(turns.taken):
        raise ConfigError(
            f"{path} is no step cost: its jitter has {len(turns.expected)} steps expected and "
            f"{len(turns.taken)} taken; both are of the same steps."
        )
    return cost, Jitter.of(turns.expected, turns.taken)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")
