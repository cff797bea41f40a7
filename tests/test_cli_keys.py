import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvota import cli_keys
from kvota.core.request import Band
from kvota.gateway.caller import KeyLimits
from kvota.gateway.store.database import Database, open_database, sqlite_url
from kvota.gateway.store.keys import KEY_TABLES, KeyStore, hash_secret, split_key
from kvota.gateway.store.usage import USAGE_TABLES, UsageLine, UsageStore, day_of


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVOTA_CONFIG", "KVOTA_DATABASE", "KVOTA_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database that the commands find in their environment."""
    url = sqlite_url(tmp_path / "kvota.db")
    monkeypatch.setenv("KVOTA_DATABASE", url)
    monkeypatch.setenv("COLUMNS", "200")
    return url


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = open_database(url, KEY_TABLES, USAGE_TABLES)
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> KeyStore:
    return KeyStore(database)


def run(*arguments: str) -> Result:
    app = typer.Typer()
    cli_keys.register(app)
    return CliRunner().invoke(app, list(arguments))


def created(*arguments: str) -> str:
    """A fresh key, as it is shown."""
    result = run("keys", "create", "--tenant", "red", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.removesuffix("\n")


def test_a_key_alone_is_on_standard_output(store: KeyStore) -> None:
    result = run("keys", "create", "--tenant", "red")
    parts = split_key(result.stdout.removesuffix("\n").encode())
    assert parts is not None
    (record,) = store.all()
    assert (record.key_id, record.secret_hash) == (parts[0], hash_secret(parts[1]))
    assert parts[0] in result.stderr
    assert parts[1].decode() not in result.stderr


def test_every_option_of_a_new_key_is_kept(store: KeyStore) -> None:
    before = time.time()
    created(
        *("--note", "night batch", "--model", "a", "--model", "b", "--expires", "30d"),
        *("--requests-per-minute", "60", "--tokens-per-minute", "1000"),
        *("--concurrent-requests", "2", "--weight", "2.5", "--batch-only", "--admin"),
        "--no-fallback",
    )
    (record,) = store.all()
    caller = record.caller
    assert (caller.tenant, record.note, caller.models) == ("red", "night batch", frozenset("ab"))
    assert caller.limits == KeyLimits(
        requests_per_minute=60, tokens_per_minute=1000, concurrent_requests=2
    )
    assert (caller.weight, caller.band_max) == (2.5, Band.BATCH)
    assert (caller.is_admin, caller.may_fall_back) == (True, False)
    assert record.expires_unix is not None
    assert before <= record.expires_unix - 30 * 86400 <= time.time()


def test_what_is_not_said_is_not_limited(store: KeyStore) -> None:
    created()
    (record,) = store.all()
    assert record.caller.limits.is_unlimited
    assert (record.caller.models, record.expires_unix, record.note) == (None, None, "")
    assert (record.caller.band_max, record.caller.is_admin) == (Band.INTERACTIVE, False)


def test_the_list_shows_everything_but_the_secrets(store: KeyStore) -> None:
    keys = [
        created("--model", "m[b]", "--requests-per-minute", "5", "--expires", "90s"),
        created("--admin"),
    ]
    run("keys", "limits", keys[1][:15], "--model", "m", "--tokens-per-minute", "7")
    run("keys", "revoke", keys[1])
    result = run("keys", "list")
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()[1:]
    assert [text in first for text in (keys[0][:15], "m[b]", "5 req/min", "good until")] == [
        True
    ] * 4
    assert [text in second for text in ("revoked 2", "m: 7 tokens/min", "admin")] == [True] * 3
    for key in keys:
        assert key.rpartition("-")[2] not in result.stdout


def test_revoking_takes_the_id_or_the_whole_key(store: KeyStore) -> None:
    for key in (created()[:15], created()):
        result = run("keys", "revoke", key)
        assert result.exit_code == 0
        assert "revoked" in result.stdout
    assert all(record.revoked_unix is not None for record in store.all())


def test_rotating_shows_a_new_key_and_how_long_the_old_one_is_good(store: KeyStore) -> None:
    old, before = created(), time.time()
    result = run("keys", "rotate", old[:15], "--grace", "2h")
    (record,) = store.all()
    parts = split_key(result.stdout.removesuffix("\n").encode())
    assert parts is not None
    assert record.secret_hash == hash_secret(parts[1])
    assert record.old_secret_hash == hash_secret(old[16:].encode())
    assert record.old_secret_until_unix is not None
    assert before + 7200 <= record.old_secret_until_unix <= time.time() + 7200
    assert "good until" in result.stderr


def test_the_grace_is_an_hour_if_nothing_is_said(store: KeyStore) -> None:
    run("keys", "rotate", created())
    (record,) = store.all()
    assert record.old_secret_until_unix is not None
    assert 3500 < record.old_secret_until_unix - time.time() <= 3600


def test_limits_change_only_where_they_are_given(store: KeyStore) -> None:
    key = created("--requests-per-minute", "60", "--concurrent-requests", "2")
    arguments = ("--tokens-per-minute", "1000", "--concurrent-requests", "none")
    result = run("keys", "limits", key, *arguments)
    assert "1000" in result.stdout
    (record,) = store.all()
    assert record.caller.limits == KeyLimits(requests_per_minute=60, tokens_per_minute=1000)
    version = store.version()
    shown = run("keys", "limits", key)
    assert shown.stdout == result.stdout
    assert store.version() == version


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("revoke", "kv-nobody"), "No key has the id 'kv-nobody'"),
        (("rotate", "kv-nobody"), "kvota keys list"),
        (("limits", "kv-nobody"), "No key has the id"),
        (("rotate", "k", "--grace", "1 hour"), "write 90s, 15m, 12h or 30d"),
        (("create", "--tenant", "a", "--expires", "soon"), "is no time span"),
        (("create", "--tenant", " "), "1 to 200 printable"),
        (("create", "--tenant", "a\nb"), "1 to 200 printable"),
        (("create", "--tenant", "a", "--requests-per-minute", "0"), "greater than or equal to 1"),
        (("create", "--tenant", "a", "--weight", "0"), "0.001"),
        (("create",), "--tenant"),
        (("limits", "k", "--tokens-per-minute", "0"), "a number from 1, or none"),
    ],
)
def test_mistakes_are_told_in_words(url: str, arguments: tuple[str, ...], problem: str) -> None:
    result = run("keys", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    said = " ".join(result.stderr.replace("│", " ").split())
    assert problem in said
    assert "Traceback" not in said


def test_a_database_that_cannot_be_had_is_told_in_one_line() -> None:
    result = run("keys", "list", "--database", "mysql://me:hidden@there/kvota")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "is no database kvota knows" in result.stderr
    assert "hidden" not in result.stderr


def test_without_a_url_the_state_directory_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    created()
    assert (tmp_path / "kvota" / "kvota.db").is_file()
    assert (tmp_path / "kvota").stat().st_mode & 0o077 == 0


def test_the_settings_of_the_server_say_where_its_keys_are(tmp_path: Path) -> None:
    config = tmp_path / "kvota.toml"
    config.write_text(f'[gateway]\nstate_dir = "{tmp_path / "here"}"\n')
    created("--config", str(config))
    assert (tmp_path / "here" / "kvota.db").is_file()
    config.write_text(f'[gateway]\ndatabase = "{sqlite_url(tmp_path / "there.db")}"\n')
    created("--config", str(config))
    assert (tmp_path / "there.db").is_file()
    created("--config", str(config), "--database", sqlite_url(tmp_path / "third.db"))
    assert (tmp_path / "third.db").is_file()


def test_settings_that_are_not_right_are_told_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "kvota.toml"
    config.write_text("[gateway]\ndatabse = 'x'\n")
    result = run("keys", "list", "--config", str(config))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "databse" in result.stderr


def rows(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.stdout.splitlines()[1:] if line.strip()]


def test_usage_is_summed_as_asked_with_a_total(database: Database) -> None:
    today = day_of(time.time())
    UsageStore(database).merge(
        "one",
        [
            _line("kv-1", "red", "a", today, 10),
            _line("kv-1", "red", "b", today - 1, 20),
            _line("kv-2", "blue", "a", today, 40),
            _line("kv-2", "blue", "a", today - 40, 80),
        ],
    )
    total = ["total", "3", "1", "70", "0", "0", "1.5"]
    by_key = rows(run("usage"))
    assert [row[:6] for row in by_key[:-1]] == [
        ["kv-1", "red", "2", "1", "30", "0"],
        ["kv-2", "blue", "1", "0", "40", "0"],
    ]
    assert by_key[-1] == total
    assert [row[0] for row in rows(run("usage", "--by", "model"))] == ["b", "a", "total"]
    assert [row[3] for row in rows(run("usage", "--by", "tenant"))] == ["30", "40", "70"]
    assert len(rows(run("usage", "--by", "all", "--days", "60"))) == 5
    assert rows(run("usage", "--tenant", "blue", "--days", "60"))[-1][3] == "120"
    assert rows(run("usage", "--key", "kv-1", "--model", "a"))[-1][3] == "10"
    assert rows(run("usage", "--by", "day", "--days", "1"))[-1][3] == "50"
    assert rows(run("usage", "--tenant", "nobody")) == []


def _line(key_id: str, tenant: str, model: str, day: int, tokens: int) -> UsageLine:
    return UsageLine(
        key_id=key_id,
        tenant=tenant,
        model=model,
        day=day,
        prompt_tokens=tokens,
        refusals=int(tokens == 20),
        kv_block_seconds=0.5,
    )
