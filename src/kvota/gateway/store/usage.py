"""What was used, summed per key, model and day.

Sums arrive in segments (gateway/usage.py), each merged in one transaction together with its name.
A name that is already there was merged before, so whoever dies between merging a segment and
deleting its file counts nothing twice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from operator import add, attrgetter
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from kvota.gateway.store.database import Database

SECONDS_PER_DAY: Final = 86_400
_EPOCH: Final = date(1970, 1, 1)

USAGE_TABLES: Final = sa.MetaData()
_merged: Final = sa.Table(
    "usage_segments", USAGE_TABLES, sa.Column("segment", sa.String(64), primary_key=True)
)
_usage: Final = sa.Table(
    "usage",
    USAGE_TABLES,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("day", sa.Integer, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("output_tokens", sa.BigInteger, nullable=False),
    sa.Column("refusals", sa.BigInteger, nullable=False),
    sa.Column("kv_block_seconds", sa.Double, nullable=False),
)
_SUMS: Final = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "refusals",
    "kv_block_seconds",
)
_amounts: Final = attrgetter(*_SUMS)


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one request used, or many of the same key, model and day together."""

    key_id: str
    tenant: str
    model: str
    day: int  # days since 1 January 1970, UTC
    requests: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, those found in the prefix cache
    output_tokens: int = 0
    refusals: int = 0  # of the requests, those that the service or a limit refused
    kv_block_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Which lines are wanted. None: all. Both days are included."""

    first_day: int | None = None
    last_day: int | None = None
    key_id: str | None = None
    tenant: str | None = None
    model: str | None = None


class UsageStore:
    """Sums in a database. Every call blocks and may raise StoreUnusable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def merge(self, segment: str, lines: Iterable[UsageLine]) -> bool:
        """Add a segment's lines to the sums; False, changing nothing, if that was done before."""
        # Always in the same order: two merges that lock the same rows must not wait crosswise.
        sums = sorted(
            summed(lines, lambda line: (line.key_id, line.model, line.day)),
            key=lambda line: (line.key_id, line.model, line.day),
        )
        named = self._database.insert(_merged).values(segment=segment).on_conflict_do_nothing()
        with self._database.transaction() as connection:
            if connection.execute(named.returning(_merged.c.segment)).first() is None:
                return False
            if sums:
                connection.execute(self._adding(), [_row(line) for line in sums])
        return True

    def forget(self, segment: str) -> None:
        """The segment is gone for good: nobody will try to merge it again."""
        with self._database.transaction() as connection:
            connection.execute(_merged.delete().where(_merged.c.segment == segment))

    def lines(self, wanted: UsageFilter) -> list[UsageLine]:
        """One line per key, model and day; by day, then tenant, key and model."""
        chosen = sa.select(_usage).order_by(
            _usage.c.day, _usage.c.tenant, _usage.c.key_id, _usage.c.model
        )
        for column, value in (
            (_usage.c.key_id, wanted.key_id),
            (_usage.c.tenant, wanted.tenant),
            (_usage.c.model, wanted.model),
        ):
            if value is not None:
                chosen = chosen.where(column == value)
        if wanted.first_day is not None:
            chosen = chosen.where(_usage.c.day >= wanted.first_day)
        if wanted.last_day is not None:
            chosen = chosen.where(_usage.c.day <= wanted.last_day)
        with self._database.reading() as connection:
            return [UsageLine(**row) for row in connection.execute(chosen).mappings()]

    def _adding(self) -> Any:
        """An insert that adds to the row where there is one."""
        insert = self._database.insert(_usage)
        return insert.on_conflict_do_update(
            index_elements=[_usage.c.key_id, _usage.c.model, _usage.c.day],
            set_={name: _usage.c[name] + insert.excluded[name] for name in _SUMS},
        )


def summed(lines: Iterable[UsageLine], by: Callable[[UsageLine], Any]) -> list[UsageLine]:
    """One line per value of `by`, in order of first sight, named like the first of its lines."""
    first: dict[Any, UsageLine] = {}
    sums: dict[Any, tuple[float, ...]] = {}
    for line in lines:
        group = by(line)
        if group in sums:
            sums[group] = tuple(map(add, sums[group], _amounts(line)))
        else:
            first[group], sums[group] = line, _amounts(line)
    return [_with_amounts(line, sums[group]) for group, line in first.items()]


def day_of(unix_s: float) -> int:
    return int(unix_s // SECONDS_PER_DAY)


def iso_day(day: int) -> str:
    """2026-11-29, for people and for JSON."""
    return (_EPOCH + timedelta(days=day)).isoformat()


def _with_amounts(line: UsageLine, amounts: Sequence[float]) -> UsageLine:
    return msgspec.structs.replace(line, **dict(zip(_SUMS, amounts, strict=True)))


def _row(line: UsageLine) -> dict[str, Any]:
    return msgspec.structs.asdict(line)
