import asyncio
from collections.abc import Callable, Iterator

import pytest

from kvota.core.errors import (
    ConfigError,
    Forbidden,
    KeyProblem,
    KvotaError,
    ModelNotAllowed,
    ModelNotFound,
    Unauthorized,
)
from kvota.core.request import Band
from kvota.gateway.auth import (
    Denial,
    Denied,
    Door,
    is_loopback,
    model_not_found,
    refuse_open_door,
)
from kvota.gateway.caller import Caller, anonymous
from kvota.gateway.store.database import StoreUnusable, open_database
from kvota.gateway.store.keys import KEY_TABLES, KeyRecord, KeyStore, NewKey

NOW = 1_000_000.0


@pytest.fixture
def store(database_url: str) -> Iterator[KeyStore]:
    database = open_database(database_url, KEY_TABLES)
    yield KeyStore(database)
    database.close()


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def opened(store: KeyStore, *, may_be_open: bool = False, hides_models: bool = False) -> Door:
    door = Door(store, may_be_open=may_be_open, hides_models=hides_models)
    door.refresh()
    return door


def denial(door: Door, headers: dict[bytes, bytes], now: float = NOW) -> Denied:
    with pytest.raises(Unauthorized) as refused:
        door.admit(headers, now)
    assert isinstance(refused.value, Denied)
    return refused.value


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "127.8.9.1", "localhost", "LOCALHOST:80", "[::1]:8000", "a.localhost:1", ""],
)
def test_an_open_door_answers_to_the_names_of_loopback(store: KeyStore, host: str) -> None:
    door = opened(store, may_be_open=True)
    assert door.admit({b"host": host.encode()}, NOW) == anonymous()
    assert door.admit({}, NOW) == anonymous()  # HTTP/1.0


@pytest.mark.parametrize(
    "host",
    ["evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.5", "[::2]:1",
     "notlocalhost", "\xff"],
)  # fmt: skip
def test_an_open_door_does_not_answer_to_names_that_others_gave_it(
    store: KeyStore, host: str
) -> None:
    door = opened(store, may_be_open=True)
    with pytest.raises(Forbidden, match="answers only to localhost, not to"):
        door.admit({b"host": host.encode("latin-1")}, NOW)


def test_hosts_that_the_operator_names_are_this_server_too(store: KeyStore) -> None:
    door = opened(store, may_be_open=True)
    door.allowed_hosts = ("Chat.example.org",)
    assert door.admit({b"host": b"chat.Example.org"}, NOW) == anonymous()
    with pytest.raises(Forbidden):
        door.admit({b"host": b"example.org"}, NOW)
    door.allowed_hosts = ("*",)
    assert door.admit({b"host": b"example.org"}, NOW) == anonymous()


def test_who_has_a_key_may_call_the_server_what_they_like(store: KeyStore) -> None:
    made, key = store.create(NewKey(tenant="red"), NOW)
    door = opened(store, may_be_open=True)
    assert door.admit(bearer(key) | {b"host": b"example.org"}, NOW) == made.caller


def test_a_good_key_gives_its_caller_in_either_header(store: KeyStore) -> None:
    made, key = store.create(NewKey(tenant="red", weight=3.0, models=frozenset({"m"})), NOW)
    door = opened(store)
    assert door.admit(bearer(key), NOW) == made.caller
    assert door.admit({b"authorization": b"bEARER  " + key.encode() + b" "}, NOW) == made.caller
    assert door.admit({b"x-api-key": key.encode()}, NOW) == made.caller
    both = {b"authorization": b"Bearer ", b"x-api-key": key.encode()}
    assert door.admit(both, NOW) == made.caller


def test_without_a_key_the_client_is_told_how_to_send_one(store: KeyStore) -> None:
    store.create(NewKey(tenant="t"), NOW)
    door = opened(store, may_be_open=True)
    for headers in ({}, {b"authorization": b"Bearer "}, {b"authorization": b"Basic eA=="}):
        refused = denial(door, headers)
        assert (refused.problem, refused.reason) == (KeyProblem.MISSING, Denial.MISSING)
        assert "Authorization: Bearer" in refused.message


def test_a_wrong_key_is_the_same_to_its_client_whatever_is_wrong(store: KeyStore) -> None:
    _, good = store.create(NewKey(tenant="t"), NOW)
    gone, revoked = store.create(NewKey(tenant="t"), NOW)
    store.revoke(gone.key_id, NOW)
    door = opened(store)
    cases = {
        "sk-something": Denial.MALFORMED,
        "kv-": Denial.MALFORMED,
        good[:-1]: Denial.MALFORMED,
        "kv-000000000000" + good[15:]: Denial.UNKNOWN_ID,
        good[:-1] + ("0" if good[-1] != "0" else "1"): Denial.WRONG_SECRET,
        revoked: Denial.REVOKED,
    }
    refusals = {key: denial(door, bearer(key)) for key in cases}
    assert {key: refused.reason for key, refused in refusals.items()} == cases
    assert {(r.problem, r.message) for r in refusals.values()} == {
        (KeyProblem.INVALID, "The API key is not valid.")
    }
    assert refusals[revoked].key_id == gone.key_id


def test_no_secret_is_in_what_may_be_logged(store: KeyStore) -> None:
    made, key = store.create(NewKey(tenant="t", expires_unix=NOW), NOW - 1)
    secret = key.rpartition("-")[2]
    door = opened(store)
    expired = denial(door, bearer(key))
    wrong = denial(door, bearer(key[:15] + "-" + secret[::-1]))
    for refused in (expired, wrong):
        assert refused.key_id == made.key_id
        for shown in (secret, secret[::-1]):
            assert shown not in f"{refused!r} {refused.message} {refused.__dict__}"


def test_a_key_expires_to_the_second(store: KeyStore) -> None:
    _, key = store.create(NewKey(tenant="t", expires_unix=NOW + 10), NOW)
    door = opened(store)
    door.admit(bearer(key), NOW + 9.999)
    refused = denial(door, bearer(key), NOW + 10)
    assert (refused.problem, refused.reason) == (KeyProblem.EXPIRED, Denial.EXPIRED)


def test_an_expired_key_is_named_only_to_who_has_its_secret(store: KeyStore) -> None:
    _, key = store.create(NewKey(tenant="t", expires_unix=NOW), NOW)
    other = key[:-1] + ("0" if key[-1] != "0" else "1")
    assert denial(opened(store), bearer(other)).problem is KeyProblem.INVALID


def test_after_a_rotation_both_secrets_are_good_until_the_grace_is_over(store: KeyStore) -> None:
    made, old = store.create(NewKey(tenant="t"), NOW)
    new = store.rotate(made.key_id, grace_s=60, now_unix=NOW)
    door = opened(store)
    assert door.admit(bearer(old), NOW + 59.9) == door.admit(bearer(new), NOW + 59.9)
    assert denial(door, bearer(old), NOW + 60).reason is Denial.WRONG_SECRET
    assert door.admit(bearer(new), NOW + 60).key_id == made.key_id


def test_a_rotation_without_grace_ends_the_old_secret_at_once(store: KeyStore) -> None:
    made, old = store.create(NewKey(tenant="t"), NOW)
    store.rotate(made.key_id, grace_s=0, now_unix=NOW)
    assert denial(opened(store), bearer(old)).reason is Denial.WRONG_SECRET


def test_a_revoked_key_is_worthless_within_its_grace_too(store: KeyStore) -> None:
    made, old = store.create(NewKey(tenant="t"), NOW)
    store.rotate(made.key_id, grace_s=60, now_unix=NOW)
    store.revoke(made.key_id, NOW)
    assert denial(opened(store), bearer(old)).reason is Denial.REVOKED


def test_without_any_key_the_door_is_open_where_it_may_be(store: KeyStore) -> None:
    door = opened(store, may_be_open=True)
    assert door.is_open
    assert door.admit({}, NOW) == anonymous()
    assert door.admit(bearer("sk-whatever"), NOW).is_admin
    closed = opened(store, may_be_open=False)
    assert not closed.is_open
    assert denial(closed, {}).reason is Denial.MISSING


def test_the_first_key_shuts_an_open_door_and_revoking_it_does_not_open_it(
    store: KeyStore,
) -> None:
    door = opened(store, may_be_open=True)
    made, key = store.create(NewKey(tenant="t"), NOW)
    assert door.refresh()
    assert denial(door, {}).reason is Denial.MISSING
    store.revoke(made.key_id, NOW)
    assert door.refresh()
    assert not door.is_open
    assert denial(door, bearer(key)).reason is Denial.REVOKED


async def test_what_another_process_changes_is_seen_by_watching(database_url: str) -> None:
    ours, theirs = (open_database(database_url, KEY_TABLES) for _ in range(2))
    door = Door(KeyStore(ours), may_be_open=True)
    door.refresh()
    watching = asyncio.create_task(door.watch(every_s=0.01))
    made, key = await asyncio.to_thread(KeyStore(theirs).create, NewKey(tenant="t"), NOW)
    await until(lambda: not door.is_open)
    assert door.admit(bearer(key), NOW) == made.caller
    await asyncio.to_thread(KeyStore(theirs).revoke, made.key_id, NOW)
    await until(lambda: not _is_admitted(door, key))
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    ours.close()
    theirs.close()


async def test_a_store_out_of_reach_leaves_the_known_keys_in_force() -> None:
    failures: list[KvotaError] = []
    source = FailingSource()
    door = Door(source, may_be_open=True, on_stale=failures.append)
    door.refresh()
    source.is_down = True
    watching = asyncio.create_task(door.watch(every_s=0.001))
    await until(lambda: len(failures) >= 2)
    assert not door.is_open
    assert door.num_keys == 1
    source.is_down = False
    source.records = []
    source.number = 2
    await until(lambda: not door.num_keys)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


def test_an_unchanged_store_is_not_read_again(store: KeyStore) -> None:
    store.create(NewKey(tenant="t"), NOW)
    door = Door(store, may_be_open=False)
    assert door.refresh()
    assert not door.refresh()


def test_a_model_that_is_not_allowed_is_403_or_looks_like_no_model(store: KeyStore) -> None:
    caller = Caller(key_id="kv-1", tenant="t", models=frozenset({"mine"}))
    shown, hidden = opened(store), opened(store, hides_models=True)
    for door in (shown, hidden):
        door.check_model(caller, "mine")
    with pytest.raises(ModelNotAllowed, match="theirs") as forbidden:
        shown.check_model(caller, "theirs")
    assert (forbidden.value.status, forbidden.value.param) == (403, "model")
    with pytest.raises(ModelNotFound) as absent:
        hidden.check_model(caller, "theirs")
    assert (absent.value.status, absent.value.message) == (404, model_not_found("theirs").message)


def test_a_caller_is_clamped_to_its_band() -> None:
    free, clamped = anonymous(), Caller(key_id="k", tenant="t", band_max=Band.BATCH)
    assert [free.band(band) for band in Band] == [Band.INTERACTIVE, Band.BATCH]
    assert [clamped.band(band) for band in Band] == [Band.BATCH, Band.BATCH]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_may_be_open(host: str) -> None:
    assert is_loopback(host)
    refuse_open_door(host, has_keys=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "::ffff:1.2.3.4"])
def test_elsewhere_a_server_without_keys_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="kvota keys create"):
        refuse_open_door(host, has_keys=False)
    refuse_open_door(host, has_keys=True)


class FailingSource:
    """One key, until told otherwise."""

    def __init__(self) -> None:
        self.is_down = False
        self.number = 1
        self.records = [
            KeyRecord(
                caller=Caller(key_id="kv-1", tenant="t"), secret_hash=b"\0" * 32, created_unix=NOW
            )
        ]

    def version(self) -> int:
        if self.is_down:
            raise StoreUnusable("down")
        return self.number

    def all(self) -> list[KeyRecord]:
        return self.records


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not met():  # noqa: ASYNC110 - the condition is another thread's
            await asyncio.sleep(0.001)


def _is_admitted(door: Door, key: str) -> bool:
    try:
        door.admit(bearer(key), NOW)
    except Unauthorized:
        return False
    return True
