import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvota.config import load
from kvota.core.errors import ConfigError
from kvota.gateway.settings import GatewaySettings, read_fleet
from kvota.gateway.settings_checks import check_fleet, check_gateway, check_tasks

TWO_BACKENDS = """
[[backends]]
name = "a"
url = "http://10.0.0.5:8000"
kind = "vllm"
[[backends]]
name = "b"
url = "http://10.0.0.6:8000"
"""


def check(text: str, *, has_own_node: bool = False) -> None:
    fleet = read_fleet(tomllib.loads(TWO_BACKENDS + text), "kvota.toml")
    check_fleet(fleet, has_own_node=has_own_node)


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "kvota.toml"
    file.write_text(
        TWO_BACKENDS
        + """
[gateway]
hide_models = true
block_lists = ["secrets"]
[[models]]
name = "chat"
aliases = ["gpt-4o-mini"]
fallback = "small"
fallback_kv_usage = 0.9
[[models.versions]]
name = "v1"
backends = ["a"]
weight = 0.9
[[models.versions]]
name = "v2"
backends = ["b"]
served_as = "chat-next"
weight = 0.1
[[models]]
name = "small"
backends = ["b", "node"]
"""
    )
    config = load(file=file, environment={"KVOTA_BLOCK_LISTS": "one,two"})
    assert config.gateway.block_lists == ("one", "two")
    assert config.gateway.hide_models
    chat, small = config.fleet.models
    assert [one.weight for one in chat.all_versions()] == [0.9, 0.1]
    assert small.all_versions()[0].backends == ("b", "node")
    check_fleet(config.fleet, has_own_node=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[models]]\nname = "m"\nbackend = ["a"]', "did you mean backends?"),
        ('[[models]]\nname = "m"\nbackends = ["aa"]', "did you mean a?"),
        (
            '[[models]]\nname = "m"\n[[models.versions]]\nname = "v"\nwieght = 1.0',
            "[[models]] m, version v: unknown setting wieght: did you mean weight?",
        ),
        ('[[models]]\nname = "m"', "needs either backends or versions"),
        ('[[models]]\nname = "auto"\nbackends = ["a"]', "the name auto is taken"),
        ('[[models]]\nname = "m"\nbackends = ["node"]', "there is no backend node"),
        (2 * '[[models]]\nname = "m"\nbackends = ["a"]\n', "Two models are called m"),
        ('[[backends]]\nname = "a"', "Two backends are called a"),
        ('[[backends]]\nname = "c"\nkv_share = 1.5', "kv_share is 1.5"),
        ('[[backends]]\nname = "c"\nkind = "vlm"', "[[backends]] c: Invalid enum value 'vlm'"),
        ('[[models]]\nname = "m"\nversions = [{name = "v", backends = []}]', "has no backends"),
        ('[[models]]\nname = "m"\nbackends = ["a", "a"]', "backend a is named twice"),
        (
            '[[models]]\nname = "m"\nversions = ['
            '{name = "v", backends = ["a"]}, {name = "v", backends = ["b"]}]',
            "Two versions of model m are called v",
        ),
        ('[[models]]\nname = "m\\n"\nbackends = ["a"]', "holds a control character"),
        ('[[backends]]\nname = "c\\r"', "name of a backend holds a control character"),
        ('[[backends]]\nname = "c"\nurl = "http://a b"', "the url holds a space"),
        ('[[backends]]\nname = "c"\nurl = "http://a\\r\\nb"', "or a control character"),
        ('[[backends]]\nname = "c"\nkv_tokens = -5', "kv_tokens is -5; it must be at least 1"),
        ('[[backends]]\nname = "c"\nmax_model_len = 0', "max_model_len is 0"),
        ('[[backends]]\nname = "c"\nidle_timeout_s = inf', "idle_timeout_s is inf"),
        ('[[backends]]\nname = "c"\nunix_socket = ""', "unix_socket is empty"),
        (
            '[[models]]\nname = "m"\nbackends = ["a"]\nfallback_waiting = 0',
            "model m: fallback_waiting is 0; it must be at least 1",
        ),
        (
            '[[models]]\nname = "m"\nbackends = ["a"]\nfallback_kv_usage = 90.0',
            "model m: fallback_kv_usage is 90.0; it must be above 0 and at most 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(text)
    assert said in refused.value.message


@pytest.mark.parametrize("changes", [
    {"probe_every_s": 0.0}, {"probe_every_s": math.nan}, {"abuse_block_s": math.inf},
    {"num_gateways": 0}, {"choices_max": -1}, {"output_tokens_max": 0}, {"abuse_failures_max": 0},
])  # fmt: skip
def test_numbers_that_make_no_sense_are_refused_by_name(changes: dict[str, Any]) -> None:
    check_gateway(GatewaySettings())
    [name] = changes
    with pytest.raises(ConfigError, match=rf"\[gateway\]: {name} is "):
        check_gateway(GatewaySettings(**changes))


def test_a_task_that_nobody_knows_is_refused_with_the_nearest() -> None:
    fleet = read_fleet(
        {"models": [{"name": "m", "backends": ["a"], "tasks": ["chat", "coding"]}]}, "kvota.toml"
    )
    check_tasks(fleet, {"chat", "coding"})
    with pytest.raises(ConfigError, match=r"no task coding: did you mean code\?"):
        check_tasks(fleet, {"chat", "code"})


def test_one_bracket_is_told_from_two() -> None:
    with pytest.raises(ConfigError, match="two brackets"):
        read_fleet({"models": {"name": "m"}}, "kvota.toml")


def test_the_own_node_is_a_backend_where_there_is_one() -> None:
    check('[[models]]\nname = "m"\nbackends = ["node", "a"]', has_own_node=True)
    with pytest.raises(ConfigError, match="Two backends are called node"):
        check('[[backends]]\nname = "node"', has_own_node=True)
