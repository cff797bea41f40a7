from pathlib import Path

import pytest

from kvota.core.errors import ConfigError
from kvota.tools.replay.tenants import keys_for, read_keys


def written(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(content)
    return path


def test_each_tenant_has_its_key_and_others_the_one_for_all(tmp_path: Path) -> None:
    keys = read_keys(written(tmp_path, 'team-a = "sk-a"\n"*" = "sk-rest"\n'))
    assert keys_for(["team-a", "team-b"], keys, None) == {"team-a": "sk-a", "team-b": "sk-rest"}


def test_without_a_file_all_use_the_one_key_or_none() -> None:
    assert keys_for(["a", "b"], {}, "sk") == {"a": "sk", "b": "sk"}
    assert keys_for(["a"], {}, None) == {"a": None}


def test_tenants_without_a_key_are_named() -> None:
    with pytest.raises(ConfigError, match=r"2 tenants of the trace have no key: b, c\."):
        keys_for(["c", "a", "b"], {"a": "sk-a"}, None)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a = sk-secret", "is not TOML"),
        ("a = 5", "key of a must be a text"),
        ('a = ""', "key of a"),
    ],
)
def test_a_wrong_file_is_told_without_its_keys(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as told:
        read_keys(written(tmp_path, content))
    assert "secret" not in told.value.message


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none.toml")
