"""Rollouts in SQLite and PostgreSQL: kept whole, and never over a change that was not seen."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import sqlalchemy as sa

from kvota.gateway.policy.rollout import RolloutState
from kvota.gateway.store.database import Database, StoreUnusable, open_database
from kvota.gateway.store.rollouts import (
    ROLLOUT_TABLES,
    DeclaredVersion,
    RolloutStore,
    SavedRollout,
)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = open_database(database_url, ROLLOUT_TABLES)
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> RolloutStore:
    return RolloutStore(database)


ROW = SavedRollout(
    model="chat",
    revision=1,
    declared=(DeclaredVersion("v1", "Qwen/Qwen3-8B", 0.95), DeclaredVersion("v2", "new", 0.05)),
    state=RolloutState(
        stable="v1", weights={"v1": 0.95, "v2": 0.0}, rolled_back={"v2": "too slow: 'p95'"}
    ),
)


def test_what_was_saved_is_there_whole(store: RolloutStore) -> None:
    other = replace(ROW, model="模型 / other")
    assert store.save(ROW) is None
    assert store.save(other) is None
    assert sorted(store.all().rows, key=lambda one: one.model) == [ROW, other]


def test_a_change_goes_on_top_of_the_one_before(store: RolloutStore) -> None:
    second = replace(ROW, revision=2, state=replace(ROW.state, rolled_back={}))
    assert store.save(ROW) is None
    assert store.save(second) is None
    assert store.all().rows == [second]


@pytest.mark.parametrize("revision", [1, 2, 4])
def test_a_change_of_something_else_is_refused_and_shown_what_is_there(
    store: RolloutStore, revision: int
) -> None:
    there = replace(ROW, revision=2)
    store.save(ROW)
    store.save(there)
    late = replace(ROW, revision=revision, declared=ROW.declared[:1])
    assert store.save(late) == there
    assert store.all().rows == [there]


def test_of_many_at_once_one_is_first(store: RolloutStore) -> None:
    rows = [replace(ROW, state=replace(ROW.state, rolled_back={"v2": str(i)})) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(store.save, rows))
    [first] = [row for row, answer in zip(rows, answers, strict=True) if answer is None]
    assert all(answer == first for answer in answers if answer is not None)


def test_a_row_that_means_nothing_says_what_to_do_and_hides_no_other(
    store: RolloutStore, database: Database
) -> None:
    other = replace(ROW, model="other")
    store.save(ROW)
    store.save(other)
    with database.transaction() as connection:
        connection.execute(sa.text("UPDATE rollouts SET state = '{}' WHERE model = 'chat'"))
    stored = store.all()
    assert stored.rows == [other]
    assert list(stored.unreadable) == ["chat"]
    assert re.search(r"rollout of chat .* Delete its row", stored.unreadable["chat"])
    with pytest.raises(StoreUnusable, match=r"rollout of chat .* Delete its row"):
        store.save(ROW)
