from pathlib import Path

import pytest

from kvota.config import Config, load
from kvota.core.errors import ConfigError


def written(folder: Path, text: str) -> Path:
    file = folder / "kvota.toml"
    file.write_text(text)
    return file


def test_without_anything_the_defaults_hold() -> None:
    assert load() == Config()


def test_later_sources_win(tmp_path: Path) -> None:
    file = written(tmp_path, "[server]\nport=1\nheartbeat_s=1.5\n[engine]\nprefix_cache=false")
    environment = {"KVOTA_PORT": "2", "KVOTA_MAX_RUNNING_REQUESTS": "9", "HOME": "/x"}
    config = load(file=file, environment=environment, flags={"port": 3, "host": None})
    assert config.server.port == 3
    assert config.server.host == "127.0.0.1"
    assert config.server.heartbeat_s == 1.5
    assert config.engine.max_running_requests == 9
    assert config.engine.prefix_cache is False


def test_the_environment_can_hold_a_list() -> None:
    config = load(environment={"KVOTA_CORS_ORIGINS": "http://a,http://b"})
    assert config.server.cors_origins == ("http://a", "http://b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprt = 1", "prt: did you mean port?"),
        ("[sever]\nport = 1", "[sever]: did you mean server?"),
        ("[engine]\nport = 1", "port belongs into [server]"),
        ("[server]\nport = 'x'", "port"),
        ("[server\n", "not valid TOML"),
        ("port = 1", "unknown section [port]"),
        ("[engine]\nkv_budget_ratio = 1.5", "kv_budget_ratio is 1.5"),
        ("[engine]\nkv_memory = 'much'", 'kv_memory is "much"'),
        ("[engine]\nmax_num_batched_tokens = 64", "must be more than max_running_requests (64)"),
        ("[model]\nweights = 'int3'", "weights"),
        ("[desk]\nlong_kv_share = 2", "long_kv_share"),
        ("[desk]\nadmission = 'guess'", "admission"),
        ("[model]\nthreads = 0", "threads is 0"),
        ("[server]\nport = 70000", "port is 70000"),
        ("[server]\nheartbeat_s = nan", "heartbeat_s is nan"),
    ],
)
def test_a_wrong_file_is_refused_with_what_to_change(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file=written(tmp_path, text), environment={})
    assert said in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load(file=tmp_path / "nowhere.toml")


def test_an_unknown_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"KVOTA_PROT.*did you mean port"):
        load(environment={"KVOTA_PROT": "1"})
