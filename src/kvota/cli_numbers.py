"""Numbers on the command line that must mean something."""

import math

import typer


def positive(value: float | None) -> float | None:
    """A number above 0 that is finite, or none; typer's own bounds let infinity through."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"must be more than 0 and finite, got {value:g}.")
    return value
