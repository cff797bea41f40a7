"""What operators and the watch have changed about versions of models, so that it outlives us.

One row per model. Its revision grows by one with every change, and a change is stored only on top
of the one that its maker knew: of two gateways that change a rollout at once, the second is shown
what the first has stored, and decides again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from kvota.gateway.policy.rollout import RolloutState
from kvota.gateway.store.database import Database, StoreUnusable

ROLLOUT_TABLES: Final = sa.MetaData()
_rollouts: Final = sa.Table(
    "rollouts",
    ROLLOUT_TABLES,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("versions", sa.Text, nullable=False),  # JSON: what the file said
    sa.Column("state", sa.Text, nullable=False),  # JSON: what has become of it
)


class DeclaredVersion(msgspec.Struct, frozen=True, array_like=True):
    """A version as kvota.toml has it: what its changed weight is a change of."""

    name: str
    model: str  # the name its backends know it by
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRollout:
    model: str
    revision: int  # 1 for the first change
    declared: tuple[DeclaredVersion, ...]  # in the file's order
    state: RolloutState


@dataclass(frozen=True, slots=True)
class StoredRollouts:
    """`unreadable`: models whose row makes no sense, and why."""

    rows: list[SavedRollout]
    unreadable: Mapping[str, str]


class RolloutStore:
    """Rollouts in a database. Every call blocks and may raise StoreUnusable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> StoredRollouts:
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_rollouts)).mappings().all()
        stored, unreadable = [], dict[str, str]()
        for row in rows:
            try:
                stored.append(_saved(row))
            except StoreUnusable as error:
                unreadable[row["model"]] = error.message
        return StoredRollouts(stored, unreadable)

    def save(self, row: SavedRollout) -> SavedRollout | None:
        """Store it on top of the revision before it. None when that was done.

        Otherwise nothing has changed, and what is returned is there instead.
        """
        insert = self._database.insert(_rollouts).values(
            model=row.model,
            revision=row.revision,
            versions=msgspec.json.encode(row.declared).decode(),
            state=msgspec.json.encode(row.state).decode(),
        )
        on_top = insert.on_conflict_do_update(
            index_elements=[_rollouts.c.model],
            set_={name: insert.excluded[name] for name in ("revision", "versions", "state")},
            where=_rollouts.c.revision == row.revision - 1,
        ).returning(_rollouts.c.model)
        here = sa.select(_rollouts).where(_rollouts.c.model == row.model)
        with self._database.transaction() as connection:
            if connection.execute(on_top).first() is not None:
                return None
            return _saved(connection.execute(here).mappings().one())


def _saved(row: Any) -> SavedRollout:
    try:
        return SavedRollout(
            model=row["model"],
            revision=row["revision"],
            declared=msgspec.json.decode(row["versions"], type=tuple[DeclaredVersion, ...]),
            state=msgspec.json.decode(row["state"], type=RolloutState),
        )
    except msgspec.MsgspecError as error:
        raise StoreUnusable(
            f"The rollout of {row['model']} in the database cannot be read: {error}. Delete its "
            "row in the table rollouts; the weights of kvota.toml then count."
        ) from error
