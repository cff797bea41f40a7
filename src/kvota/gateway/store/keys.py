"""API keys at rest: who may come in, and as whom.

A key is `kv-<12 hex>-<64 hex>`. Its first two parts are its id, which is public; the last is a
secret of 256 random bits, shown once. Stored is its plain SHA-256: salts and slow hashes protect
secrets that people choose, and nobody can guess this one.

Every change raises a version in the same transaction, so a gateway that holds all keys in memory
needs to ask for one number to know that it is up to date. Rows are never deleted.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from kvota.core.errors import KvotaError
from kvota.core.request import Band
from kvota.gateway.caller import NO_LIMITS, Caller, KeyLimits
from kvota.gateway.store.database import Database

ID_BYTES: Final = 6
SECRET_BYTES: Final = 32
_ID_LENGTH: Final = len("kv-") + 2 * ID_BYTES
_KEY_LENGTH: Final = _ID_LENGTH + 1 + 2 * SECRET_BYTES
NAME_LENGTH_MAX: Final = 200

KEY_TABLES: Final = sa.MetaData()
_changes: Final = sa.Table(  # one row
    "key_changes",
    KEY_TABLES,
    sa.Column("row", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.BigInteger, nullable=False),
)
_keys: Final = sa.Table(
    "keys",
    KEY_TABLES,
    sa.Column("key_id", sa.String(32), primary_key=True),
    sa.Column("secret_hash", sa.LargeBinary(32), nullable=False),
    sa.Column("old_secret_hash", sa.LargeBinary(32)),
    sa.Column("old_secret_until_unix", sa.Double),
    sa.Column("tenant", sa.String(NAME_LENGTH_MAX), nullable=False),
    sa.Column("note", sa.String(NAME_LENGTH_MAX), nullable=False),
    sa.Column("models", sa.Text),  # JSON list; null: all
    sa.Column("weight", sa.Double, nullable=False),
    sa.Column("band_max", sa.Integer, nullable=False),
    sa.Column("is_admin", sa.Boolean, nullable=False),
    sa.Column("may_fall_back", sa.Boolean, nullable=False),
    sa.Column("limits", sa.Text, nullable=False),  # JSON object
    sa.Column("model_limits", sa.Text, nullable=False),  # JSON object of objects
    sa.Column("created_unix", sa.Double, nullable=False),
    sa.Column("expires_unix", sa.Double),
    sa.Column("revoked_unix", sa.Double),
)


class KeyNotFound(KvotaError):
    """No key has this id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """A key without its secret. Times are Unix seconds; None: never."""

    caller: Caller
    secret_hash: bytes = field(repr=False)
    old_secret_hash: bytes | None = field(
        default=None, repr=False
    )  # of the secret before the last rotation
    old_secret_until_unix: float | None = None
    note: str = ""  # for people
    created_unix: float
    expires_unix: float | None = None
    revoked_unix: float | None = None

    @property
    def key_id(self) -> str:
        return self.caller.key_id


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """What is to be made. See Caller for the meaning of the fields."""

    tenant: str
    note: str = ""
    models: frozenset[str] | None = None
    weight: float = 1.0
    band_max: Band = Band.INTERACTIVE
    is_admin: bool = False
    may_fall_back: bool = True
    limits: KeyLimits = NO_LIMITS
    model_limits: Mapping[str, KeyLimits] = field(default_factory=dict)
    expires_unix: float | None = None


class KeyStore:
    """Keys in a database. Every call blocks and may raise StoreUnusable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, new: NewKey, now_unix: float) -> tuple[KeyRecord, str]:
        """The new key's record, and the key itself: the only time that anybody sees it."""
        key_id, secret = f"kv-{secrets.token_hex(ID_BYTES)}", secrets.token_hex(SECRET_BYTES)
        record = KeyRecord(
            caller=Caller(
                key_id=key_id,
                tenant=new.tenant,
                models=new.models,
                weight=new.weight,
                band_max=new.band_max,
                is_admin=new.is_admin,
                may_fall_back=new.may_fall_back,
                limits=new.limits,
                model_limits=new.model_limits,
            ),
            secret_hash=hash_secret(secret.encode()),
            note=new.note,
            created_unix=now_unix,
            expires_unix=new.expires_unix,
        )
        with self._database.transaction() as connection:
            connection.execute(_keys.insert().values(_row(record)))
            self._raise_version(connection)
        return record, f"{key_id}-{secret}"

    def revoke(self, key_id: str, now_unix: float) -> KeyRecord:
        """From now on the key is worthless, its old secret too. A second time changes nothing."""
        with self._database.transaction() as connection:
            record = _locked(connection, key_id)
            if record.revoked_unix is None:
                record = replace(record, revoked_unix=now_unix)
                self._save(connection, record)
        return record

    def rotate(self, key_id: str, *, grace_s: float, now_unix: float) -> str:
        """A new secret for the same key; the one until now stays good for `grace_s` more.

        A still older one ends at once. Returns the whole new key.
        """
        secret = secrets.token_hex(SECRET_BYTES)
        with self._database.transaction() as connection:
            record = _locked(connection, key_id)
            self._save(
                connection,
                replace(
                    record,
                    secret_hash=hash_secret(secret.encode()),
                    old_secret_hash=record.secret_hash,
                    old_secret_until_unix=now_unix + grace_s,
                ),
            )
        return f"{key_id}-{secret}"

    def change_limits(
        self, key_id: str, changes: Mapping[str, int | None], *, model: str | None = None
    ) -> KeyRecord:
        """Change some limits of a key, or of a key on one model. Names are KeyLimits' fields."""
        with self._database.transaction() as connection:
            record = _locked(connection, key_id)
            caller = record.caller
            if model is None:
                caller = replace(caller, limits=replace(caller.limits, **changes))
            else:
                changed = replace(caller.model_limits.get(model, NO_LIMITS), **changes)
                kept = {**caller.model_limits, model: changed}
                limited = {name: set_ for name, set_ in kept.items() if not set_.is_unlimited}
                caller = replace(caller, model_limits=limited)
            record = replace(record, caller=caller)
            self._save(connection, record)
        return record

    def get(self, key_id: str) -> KeyRecord:
        """Raises KeyNotFound."""
        with self._database.reading() as connection:
            return _found(connection, sa.select(_keys), key_id)

    def all(self) -> list[KeyRecord]:
        """Every key ever made, oldest first."""
        order = sa.select(_keys).order_by(_keys.c.created_unix, _keys.c.key_id)
        with self._database.reading() as connection:
            return [_record(row) for row in connection.execute(order).mappings()]

    def version(self) -> int:
        """Grows with every change, whichever process made it. 0: no key was ever made."""
        with self._database.reading() as connection:
            return connection.execute(sa.select(_changes.c.version)).scalar_one_or_none() or 0

    def _save(self, connection: sa.Connection, record: KeyRecord) -> None:
        its_row = _keys.c.key_id == record.key_id
        connection.execute(_keys.update().where(its_row).values(_row(record)))
        self._raise_version(connection)

    def _raise_version(self, connection: sa.Connection) -> None:
        first = self._database.insert(_changes).values(row=1, version=1)
        connection.execute(
            first.on_conflict_do_update(
                index_elements=[_changes.c.row], set_={"version": _changes.c.version + 1}
            )
        )


def split_key(presented: bytes) -> tuple[str, bytes] | None:
    """The id and the secret of a key as a client sends it; None if it cannot be one."""
    if len(presented) != _KEY_LENGTH or presented[_ID_LENGTH : _ID_LENGTH + 1] != b"-":
        return None
    if not presented.isascii():
        return None
    return presented[:_ID_LENGTH].decode("ascii"), presented[_ID_LENGTH + 1 :]


def id_of(text: str) -> str:
    """The id in what somebody gives as one, who may have given the whole key."""
    parts = split_key(text.encode())
    return text if parts is None else parts[0]


def hash_secret(secret: bytes) -> bytes:
    """What is stored of a secret."""
    return hashlib.sha256(secret).digest()


def _locked(connection: sa.Connection, key_id: str) -> KeyRecord:
    """The record, kept from others until the transaction ends. Raises KeyNotFound."""
    return _found(connection, sa.select(_keys).with_for_update(), key_id)


def _found(connection: sa.Connection, wanted: sa.Select[Any], key_id: str) -> KeyRecord:
    row = connection.execute(wanted.where(_keys.c.key_id == key_id)).mappings().one_or_none()
    if row is None:
        raise KeyNotFound(f"No key has the id {key_id[:64]!r}; `kvota keys list` shows them.")
    return _record(row)


def _row(record: KeyRecord) -> dict[str, Any]:
    caller = record.caller
    models = None if caller.models is None else msgspec.json.encode(sorted(caller.models)).decode()
    return {
        "key_id": caller.key_id,
        "secret_hash": record.secret_hash,
        "old_secret_hash": record.old_secret_hash,
        "old_secret_until_unix": record.old_secret_until_unix,
        "tenant": caller.tenant,
        "note": record.note,
        "models": models,
        "weight": caller.weight,
        "band_max": int(caller.band_max),
        "is_admin": caller.is_admin,
        "may_fall_back": caller.may_fall_back,
        "limits": msgspec.json.encode(caller.limits).decode(),
        "model_limits": msgspec.json.encode(dict(caller.model_limits)).decode(),
        "created_unix": record.created_unix,
        "expires_unix": record.expires_unix,
        "revoked_unix": record.revoked_unix,
    }


def _record(row: sa.RowMapping) -> KeyRecord:
    models = None if row["models"] is None else msgspec.json.decode(row["models"], type=list[str])
    limits_of = dict[str, KeyLimits]
    return KeyRecord(
        caller=Caller(
            key_id=row["key_id"],
            tenant=row["tenant"],
            models=None if models is None else frozenset(models),
            weight=row["weight"],
            band_max=Band(row["band_max"]),
            is_admin=row["is_admin"],
            may_fall_back=row["may_fall_back"],
            limits=msgspec.json.decode(row["limits"], type=KeyLimits),
            model_limits=msgspec.json.decode(row["model_limits"], type=limits_of),
        ),
        secret_hash=bytes(row["secret_hash"]),
        old_secret_hash=None if row["old_secret_hash"] is None else bytes(row["old_secret_hash"]),
        old_secret_until_unix=row["old_secret_until_unix"],
        note=row["note"],
        created_unix=row["created_unix"],
        expires_unix=row["expires_unix"],
        revoked_unix=row["revoked_unix"],
    )
