import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from kvota.core.request import Band
from kvota.gateway.caller import KeyLimits
from kvota.gateway.store.database import Database, open_database
from kvota.gateway.store.keys import KEY_TABLES, KeyNotFound, KeyStore, NewKey, id_of, split_key

FULL = NewKey(
    tenant="team 甲",
    note="the night batch",
    models=frozenset({"b", "a"}),
    weight=2.5,
    band_max=Band.BATCH,
    is_admin=True,
    may_fall_back=False,
    limits=KeyLimits(requests_per_minute=60, tokens_per_minute=1000, concurrent_requests=2),
    model_limits={"a": KeyLimits(tokens_per_minute=500)},
    expires_unix=2e9 + 0.25,
)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = open_database(database_url, KEY_TABLES)
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> KeyStore:
    return KeyStore(database)


def test_a_key_comes_back_as_it_was_made(store: KeyStore) -> None:
    made, key = store.create(FULL, now_unix=1e9 + 0.125)
    assert store.get(made.key_id) == made
    assert store.all() == [made]
    caller = made.caller
    assert re.fullmatch(r"kv-[0-9a-f]{12}-[0-9a-f]{64}", key)
    assert caller.key_id == key[:15]
    assert (caller.tenant, caller.models, caller.weight) == ("team 甲", frozenset("ab"), 2.5)
    assert (caller.band_max, caller.is_admin, caller.may_fall_back) == (Band.BATCH, True, False)
    assert caller.limits == FULL.limits
    assert caller.model_limits == FULL.model_limits
    assert (made.note, made.expires_unix) == (FULL.note, FULL.expires_unix)


def test_an_empty_list_of_models_is_not_all_models(store: KeyStore) -> None:
    none, _ = store.create(NewKey(tenant="t", models=frozenset()), 1.0)
    every, _ = store.create(NewKey(tenant="t"), 2.0)
    assert not store.get(none.key_id).caller.may_use("m")
    assert store.get(every.key_id).caller.may_use("m")


def test_the_secret_is_nowhere_in_the_database(store: KeyStore, database: Database) -> None:
    _, key = store.create(FULL, 1.0)
    secret = key.rpartition("-")[2]
    with database.reading() as connection:
        row = connection.execute(sa.text("SELECT * FROM keys")).mappings().one()
    assert secret not in str(dict(row))
    assert bytes(row["secret_hash"]) == sha256(secret.encode()).digest()
    assert secret not in repr(store.all())
    assert str(bytes(row["secret_hash"])) not in repr(store.all())


def test_every_change_raises_the_version_and_reading_does_not(store: KeyStore) -> None:
    assert store.version() == 0
    made, _ = store.create(NewKey(tenant="t"), 1.0)
    assert store.version() == 1
    store.get(made.key_id)
    store.all()
    assert store.version() == 1
    store.rotate(made.key_id, grace_s=1, now_unix=2.0)
    store.change_limits(made.key_id, {"concurrent_requests": 1})
    store.revoke(made.key_id, 3.0)
    assert store.version() == 4


def test_changes_of_several_processes_are_all_counted(database_url: str) -> None:
    def make(number: int) -> None:
        database = open_database(database_url, KEY_TABLES)
        KeyStore(database).create(NewKey(tenant=f"t{number}"), float(number))
        database.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(16)))
    database = open_database(database_url, KEY_TABLES)
    store = KeyStore(database)
    assert store.version() == 16
    assert [record.caller.tenant for record in store.all()] == [f"t{n}" for n in range(16)]
    database.close()


def test_a_revoked_key_stays_in_the_list(store: KeyStore) -> None:
    made, _ = store.create(NewKey(tenant="t"), 1.0)
    assert store.revoke(made.key_id, 5.0).revoked_unix == 5.0
    assert store.revoke(made.key_id, 9.0).revoked_unix == 5.0
    assert [record.revoked_unix for record in store.all()] == [5.0]


def test_rotation_keeps_the_last_secret_for_its_grace_and_no_older_one(store: KeyStore) -> None:
    made, _ = store.create(NewKey(tenant="t"), 1.0)
    second = store.rotate(made.key_id, grace_s=60, now_unix=100.0)
    once = store.get(made.key_id)
    assert once.old_secret_hash == made.secret_hash
    assert once.old_secret_until_unix == 160.0
    assert second.startswith(made.key_id)
    store.rotate(made.key_id, grace_s=60, now_unix=110.0)
    twice = store.get(made.key_id)
    assert twice.old_secret_hash == once.secret_hash
    assert twice.secret_hash not in (once.secret_hash, made.secret_hash)


def test_limits_of_a_key_and_of_a_model_are_changed_apart(store: KeyStore) -> None:
    made, _ = store.create(FULL, 1.0)
    store.change_limits(made.key_id, {"requests_per_minute": 5, "concurrent_requests": None})
    store.change_limits(made.key_id, {"tokens_per_minute": 7}, model="b")
    caller = store.get(made.key_id).caller
    assert caller.limits == KeyLimits(requests_per_minute=5, tokens_per_minute=1000)
    assert caller.model_limits == {
        "a": KeyLimits(tokens_per_minute=500),
        "b": KeyLimits(tokens_per_minute=7),
    }
    changed = store.change_limits(made.key_id, {"tokens_per_minute": None}, model="a")
    assert store.get(made.key_id) == changed
    assert set(changed.caller.model_limits) == {"b"}


def test_the_id_is_taken_from_a_whole_key() -> None:
    key = "kv-0123456789ab-" + "f" * 64
    assert [id_of(text) for text in (key, key[:15], "x")] == [key[:15], key[:15], "x"]


def test_an_unknown_id_is_named(store: KeyStore) -> None:
    for change in (
        lambda: store.revoke("kv-nobody", 1.0),
        lambda: store.rotate("kv-nobody", grace_s=1, now_unix=1.0),
        lambda: store.change_limits("kv-nobody", {"tokens_per_minute": 1}),
        lambda: store.get("kv-nobody"),
    ):
        with pytest.raises(KeyNotFound, match="kv-nobody"):
            change()
    assert store.version() == 0


@given(st.binary(max_size=120))
def test_what_cannot_be_a_key_is_not_split(presented: bytes) -> None:
    parts = split_key(presented)
    assert parts is None or parts[0].encode() + b"-" + parts[1] == presented


def test_a_key_is_split_at_its_second_dash() -> None:
    key = b"kv-0123456789ab-" + b"f" * 64
    assert split_key(key) == ("kv-0123456789ab", b"f" * 64)
    assert split_key(key + b"f") is None
    assert split_key(key[:-1] + "é".encode()) is None
