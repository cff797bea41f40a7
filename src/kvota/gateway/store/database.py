"""The database: SQLite in one file by default, PostgreSQL by URL when that is outgrown.

    sqlite:////var/lib/kvota/kvota.db       postgresql://user:password@host/kvota

Everything here blocks, so a gateway calls it from a thread. Several processes may use one
database at once: SQLite runs with a write-ahead log and waits for a lock instead of failing.
"""

import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from kvota.core.errors import ConfigError, KvotaError

SCHEMA_VERSION: Final = 1
LOCK_TIMEOUT_S: Final = 5
CONNECT_TIMEOUT_S: Final = 5
_SCHEMA_LOCK: Final = int.from_bytes(b"kvota")
_READS_ONLY: Final = "kvota_reads_only"


class StoreUnusable(KvotaError):
    """The database cannot be reached or does not do what it is asked."""


class Database:
    """An engine and the tables of this program in it. `close` when done.

    `name` is made up once and kept in the database, whatever URL it is reached by: files that wait
    to be brought into it are kept apart by it.
    """

    def __init__(self, engine: sa.Engine, name: str) -> None:
        self.name = name
        self._engine = engine
        self._reader = engine.execution_options(**{_READS_ONLY: True})

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """One transaction: committed at the end, rolled back by an exception. StoreUnusable."""
        with told_as_unusable(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A transaction that writes nothing and waits for no writer. StoreUnusable."""
        with told_as_unusable(), self._reader.begin() as connection:
            yield connection

    def insert(self, table: sa.Table) -> Any:
        """An insert that knows `on_conflict_do_update`, in this database's dialect.

        Both dialects spell it alike but share no type for it.
        """
        if self._engine.dialect.name == "postgresql":
            return postgresql.insert(table)
        return sqlite.insert(table)

    def close(self) -> None:
        self._engine.dispose()


def open_database(url: str, *metadata: sa.MetaData) -> Database:
    """Connect and create the tables that are not there yet.

    Raises ConfigError for a URL that means nothing here, StoreUnusable when nobody answers, and
    ConfigError for tables of a newer kvota.
    """
    engine = _engine(url)
    try:
        with told_as_unusable(), engine.begin() as connection:
            _lock_schema(connection)
            for tables in (_schema, *metadata):
                tables.create_all(connection)
            _check_version(connection)
            name = _name_of(connection)
    except BaseException:  # interrupted as well: nobody gets the engine, so it is closed here
        engine.dispose()
        raise
    return Database(engine, name)


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


def state_dir_of(chosen: str | None, environment: Mapping[str, str]) -> Path:
    """Where keys and usage are kept: `chosen`, else XDG_STATE_HOME, else ~/.local/state.

    Raises ConfigError for a user who has no home, as in a container that knows no such user.
    """
    if chosen is not None:
        return Path(os.path.expanduser(chosen))
    base = Path(environment.get("XDG_STATE_HOME", ""))  # a relative one counts as unset
    if base.is_absolute():
        return base / "kvota"
    try:
        return Path.home() / ".local" / "state" / "kvota"
    except RuntimeError:
        raise ConfigError(
            "This user has no home directory to keep API keys and usage in. Name a place: "
            "state_dir in [gateway], or KVOTA_STATE_DIR, XDG_STATE_HOME or HOME."
        ) from None


def database_url(chosen: str | None, state_dir: Path) -> str:
    """The URL that was set, else that of a file in the state directory."""
    return chosen if chosen is not None else sqlite_url(state_dir / "kvota.db")


@contextmanager
def told_as_unusable() -> Iterator[None]:
    """Turn the driver's errors into ours: their first line, for the rest may hold values."""
    try:
        yield
    except SQLAlchemyError as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        first = str(cause).partition("\n")[0]
        raise StoreUnusable(f"The database does not answer as it should: {first}") from error


_schema: Final = sa.MetaData()
_versions: Final = sa.Table(
    "kvota_schema", _schema, sa.Column("version", sa.Integer, nullable=False)
)
_names: Final = sa.Table("kvota_name", _schema, sa.Column("name", sa.String(32), nullable=False))


def _engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
        build = _BUILDERS[parsed.get_backend_name()]
    except (ArgumentError, KeyError):
        raise ConfigError(
            f"{_masked(url)} is no database kvota knows. Use sqlite:///<file> or "
            "postgresql://<user>:<password>@<host>/<database>."
        ) from None
    try:
        return build(parsed)
    except (NoSuchModuleError, ModuleNotFoundError):
        raise ConfigError(
            "PostgreSQL needs a driver that is not installed: pip install 'kvota[postgres]'."
        ) from None


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    if url.database in (None, "", ":memory:"):
        raise ConfigError("A database in memory is gone with its process. Name a file.")
    directory = Path(str(url.database)).expanduser().parent
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror}.") from error
    engine = sa.create_engine(
        url.set(database=str(Path(str(url.database)).expanduser())),
        connect_args={"timeout": LOCK_TIMEOUT_S},
    )
    sa.event.listen(engine, "connect", _set_up_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver leaves BEGIN to us
    cursor = connection.cursor()
    _use_wal(cursor)
    cursor.execute("PRAGMA synchronous=FULL")  # what is committed survives a power failure
    cursor.close()


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """Whoever opens a new file first turns it over, and SQLite does not always let others wait."""
    end_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            is_locked = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_locked or time.monotonic() >= end_s:
                raise
        time.sleep(0.01)


def _begin_sqlite(connection: sa.Connection) -> None:
    # A writer takes its lock at once: if it only read first, somebody else could write meanwhile,
    # and no waiting repairs that.
    reads_only = connection.get_execution_options().get(_READS_ONLY, False)
    connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")


def _postgres_engine(url: sa.URL) -> sa.Engine:
    if url.get_driver_name() == "psycopg2":  # what SQLAlchemy assumes when none is named
        url = url.set(drivername="postgresql+psycopg")
    return sa.create_engine(
        url, pool_pre_ping=True, connect_args={"connect_timeout": CONNECT_TIMEOUT_S}
    )


_BUILDERS: Final[dict[str, Callable[[sa.URL], sa.Engine]]] = {
    "sqlite": _sqlite_engine,
    "postgresql": _postgres_engine,
}


def _lock_schema(connection: sa.Connection) -> None:
    """Let only one process create tables. SQLite's transaction has the lock already."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SCHEMA_LOCK)))


def _check_version(connection: sa.Connection) -> None:
    found = connection.execute(sa.select(_versions.c.version)).scalar_one_or_none()
    if found is None:
        connection.execute(_versions.insert().values(version=SCHEMA_VERSION))
    elif found != SCHEMA_VERSION:
        raise ConfigError(
            f"The database was made by another kvota (its version is {found}, this one knows "
            f"{SCHEMA_VERSION}). Use that kvota, or another database."
        )


def _name_of(connection: sa.Connection) -> str:
    found: str | None = connection.execute(sa.select(_names.c.name)).scalar_one_or_none()
    if found is None:
        found = uuid.uuid4().hex
        connection.execute(_names.insert().values(name=found))
    return found


def _masked(url: str) -> str:
    """A URL without what may be a password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url
