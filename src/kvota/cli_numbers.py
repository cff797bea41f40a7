"""Numbers on the command line that must mean something."""

import math

import typer


def positive(value: float) -> float:
    """A number above 0 that is finite; typer's own bounds let NaN through."""
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"must be more than 0 and finite, got {value:g}.")
    return value
