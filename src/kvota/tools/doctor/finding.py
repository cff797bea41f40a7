"""What the doctor says: one thing found, what it means, what to change, and where it was read."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How bad. PROBLEM: requests fail or wait because of it. NOTE: worth knowing."""

    PROBLEM = "problem"
    NOTE = "note"
    OK = "ok"


_ORDER = tuple(Level)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`name` is short and stays the same; `said` holds the numbers; the rest may be empty."""

    name: str
    level: Level
    said: str
    means: str = ""
    change: str = ""  # the setting, or what else to do
    source: str = ""  # the metrics, files or paths that the numbers come from


def ok(name: str, said: str, source: str = "") -> Finding:
    return Finding(name=name, level=Level.OK, said=said, source=source)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """By level; findings of one level stay in their order."""
    return sorted(findings, key=lambda one: _ORDER.index(one.level))


def has_problem(findings: Iterable[Finding]) -> bool:
    return any(one.level is Level.PROBLEM for one in findings)
