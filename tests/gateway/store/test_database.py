import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from kvota.core.errors import ConfigError
from kvota.gateway.store.database import (
    StoreUnusable,
    open_database,
    sqlite_url,
    state_dir_of,
)
from kvota.gateway.store.keys import KEY_TABLES


def test_tables_are_made_once_and_found_again(database_url: str) -> None:
    for _ in range(2):
        database = open_database(database_url, KEY_TABLES)
        with database.reading() as connection:
            assert connection.execute(sa.text("SELECT count(*) FROM keys")).scalar_one() == 0
        database.close()


def test_several_processes_may_open_an_empty_database_at_once(database_url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: open_database(database_url, KEY_TABLES), range(8)))
    with opened[0].reading() as connection:
        versions = connection.execute(sa.text("SELECT version FROM kvota_schema")).scalars().all()
    assert versions == [1]
    for database in opened:
        database.close()


def test_who_opens_a_new_file_waits_for_another_that_is_at_it(tmp_path: Path) -> None:
    """SQLite itself would not, where the other is about to write."""
    file = tmp_path / "new.db"
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    leaving = threading.Timer(0.05, other.close)
    leaving.start()
    open_database(sqlite_url(file)).close()
    leaving.join()


def test_a_database_keeps_a_name_of_its_own_for_everybody(
    database_url: str, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: open_database(database_url), range(4)))
    other = open_database(sqlite_url(tmp_path / "other.db"))
    assert len({one.name for one in opened}) == 1
    assert opened[0].name != other.name
    for database in (*opened, other):
        database.close()


def test_an_exception_undoes_the_transaction(database_url: str) -> None:
    database = open_database(database_url, KEY_TABLES)

    def change_and_fail() -> None:
        with database.transaction() as connection:
            connection.execute(sa.text("UPDATE kvota_schema SET version = 9"))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        change_and_fail()
    with database.reading() as connection:
        assert connection.execute(sa.text("SELECT version FROM kvota_schema")).scalar_one() == 1
    database.close()


def test_a_database_of_another_version_is_refused(database_url: str) -> None:
    database = open_database(database_url)
    with database.transaction() as connection:
        connection.execute(sa.text("UPDATE kvota_schema SET version = 7"))
    database.close()
    with pytest.raises(ConfigError, match="its version is 7"):
        open_database(database_url)


def test_a_reader_does_not_wait_for_a_writer(database_url: str) -> None:
    database = open_database(database_url, KEY_TABLES)
    with database.transaction() as writer:
        writer.execute(sa.text("UPDATE kvota_schema SET version = 2"))
        with database.reading() as reader:
            assert reader.execute(sa.text("SELECT version FROM kvota_schema")).scalar_one() == 1
    database.close()


@pytest.mark.parametrize("url", ["mysql://u:secret@h/d", "not a url", "postgres"])
def test_an_unknown_kind_of_database_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="postgresql://") as refused:
        open_database(url)
    assert "secret" not in refused.value.message


def test_sqlite_in_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="Name a file"):
        open_database("sqlite://")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        open_database(sqlite_url(tmp_path / "file" / "kvota.db"))


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="does not answer"):
        open_database(f"postgresql://kvota@/kvota?host={tmp_path}")


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "kvota.db").write_text("hello" * 1000)
    with pytest.raises(StoreUnusable, match="not a database"):
        open_database(sqlite_url(tmp_path / "kvota.db"))


def test_a_user_without_a_home_is_asked_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run under a number that no user has."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert state_dir_of("/s", {}) == Path("/s")
    assert state_dir_of(None, {"XDG_STATE_HOME": "/x"}) == Path("/x/kvota")
    with pytest.raises(ConfigError, match=r"no home directory.*state_dir in \[gateway\]"):
        state_dir_of(None, {})
