from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvota.config import SECTIONS, Config, load
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
        ("[server]\nprt = 1", ": unknown setting prt in [server]: did you mean port?"),
        (
            "[engine]\nmax_runing_requests = 1",
            ": unknown setting max_runing_requests in [engine]: did you mean max_running_requests?",
        ),
        ("[server]\nxyzzy = 1", ": unknown setting xyzzy in [server]."),
        ("[sever]\nport = 1", ": unknown section [sever]: did you mean server?"),
        ("[engine]\nport = 1", ": port is in [engine]; it belongs into [server]."),
        ("port = 1", ": port stands in no section; it belongs into [server]."),
        ("prot = 1", ": unknown setting prot: did you mean port?"),
        ("server = 1", ": server is a section: write [server] and its settings below."),
        ("[server]\nport = 'x'", ': port in [server] is "x"; it must be a whole number.'),
        ("[server]\nport = 1.5", ": port in [server] is 1.5; it must be a whole number."),
        ("[model]\nthreads = true", ": threads in [model] is true; it must be a whole number."),
        ("[server]\nhost = 7", ": host in [server] is 7; it must be text."),
        (
            "[engine]\nprefix_cache = 'perhaps'",
            ': prefix_cache in [engine] is "perhaps"; it must be true or false.',
        ),
        (
            "[model]\nweights = 'int3'",
            ': weights in [model] is "int3"; it must be auto, f32, f16, int8 or int4.',
        ),
        (
            "[desk]\nadmission = 'guess'",
            ': admission in [desk] is "guess"; it must be '
            "forecast, reserve, optimistic, quantile or running_length.",
        ),
        (
            "[engine]\nkv_budget_ratio = 1.5",
            ": kv_budget_ratio in [engine] is 1.5; it must be more than 0 and at most 1.",
        ),
        (
            "[engine]\nkv_memory = 'much'",
            ': kv_memory in [engine] is "much", which is no size: write it like 800MB or 2GiB.',
        ),
        (
            "[engine]\nmax_num_batched_tokens = 64",
            ": max_num_batched_tokens in [engine] is 64; it must be more than "
            "max_running_requests, which is 64: every running request takes one token of each "
            "step, and prompts need the rest.",
        ),
        (
            "[desk]\nlong_kv_share = 2",
            ": long_kv_share in [desk] must be above 0 and at most 1, got 2.0.",
        ),
        (
            "[engine]\nspeculative_tokens = -1",
            ": speculative_tokens in [engine] is -1; it must not be negative. 0 guesses nothing.",
        ),
        ("[model]\nthreads = 0", ": threads in [model] is 0; it must be more than 0."),
        (
            "[server]\nport = 70000",
            ": port in [server] is 70000; it must be 0 (any free one) to 65535.",
        ),
        (
            "[server]\nheartbeat_s = nan",
            ": heartbeat_s in [server] is nan; it must be more than 0.",
        ),
        (
            "[server]\nsend_timeout_s = 0",
            ": send_timeout_s in [server] is 0.0; it must be more than 0.",
        ),
        (
            "[server]\ndrain_timeout_s = nan",
            ": drain_timeout_s in [server] is nan; it must not be negative.",
        ),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_name_and_what_to_change(
    tmp_path: Path, text: str, said: str
) -> None:
    file = written(tmp_path, text)
    assert refusal(file=file, environment={}) == f"{file}{said}"


def test_a_file_that_is_no_toml_is_refused_with_the_place(tmp_path: Path) -> None:
    file = written(tmp_path, "[server\n")
    said = refusal(file=file)
    assert said.startswith(f"{file} is not valid TOML: ")
    assert "line 1" in said


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "nowhere.toml"
    assert refusal(file=file) == f"Cannot read {file}: No such file or directory."


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("KVOTA_PORT", "x", 'KVOTA_PORT is "x"; it must be a whole number.'),
        ("KVOTA_PORT", "", 'KVOTA_PORT is ""; it must be a whole number.'),
        ("KVOTA_PORT", "-1", "KVOTA_PORT is -1; it must be 0 (any free one) to 65535."),
        ("KVOTA_RISK", "high", 'KVOTA_RISK is "high"; it must be a number.'),
        ("KVOTA_RISK", "-1", "KVOTA_RISK must not be negative, got -1.0."),
        ("KVOTA_PREFIX_CACHE", "yes", 'KVOTA_PREFIX_CACHE is "yes"; it must be true or false.'),
        (
            "KVOTA_KV_MEMORY",
            "2 elephants",
            'KVOTA_KV_MEMORY is "2 elephants", which is no size: write it like 800MB or 2GiB.',
        ),
        (
            "KVOTA_TENANT_WEIGHTS",
            "a=2",
            'KVOTA_TENANT_WEIGHTS is "a=2"; it must be a table of numbers, '
            "which only a file can hold.",
        ),
        (
            "KVOTA_MAX_RUNNING_REQUESTS",
            "600",
            "max_num_batched_tokens is 512; it must be more than KVOTA_MAX_RUNNING_REQUESTS, "
            "which is 600: every running request takes one token of each step, and prompts need "
            "the rest.",
        ),
        ("KVOTA_PROT", "1", "Unknown variable KVOTA_PROT: did you mean KVOTA_PORT?"),
        ("KVOTA_PORT", "x" * 999, f'KVOTA_PORT is "{"x" * 80}…"; it must be a whole number.'),
    ],
)
def test_a_wrong_variable_is_refused_by_its_own_name(variable: str, value: str, said: str) -> None:
    assert refusal(environment={variable: value}) == said


@pytest.mark.parametrize(
    ("variable", "value"),
    [("KVOTA_PORT", "tcp://10.0.0.7:8000"), ("KVOTA_SERVICE_HOST", "10.0.0.7")],
)
def test_what_kubernetes_sets_for_a_service_is_told_from_a_setting(
    variable: str, value: str
) -> None:
    said = refusal(environment={variable: value})
    assert said == (
        f'{variable} is "{value}", no setting. Kubernetes sets it for a Service called kvota: '
        "put `enableServiceLinks: false` into the pod."
    )


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("port", 70000, "--port is 70000; it must be 0 (any free one) to 65535."),
        ("max_running_requests", 0, "--max-running-requests is 0; it must be more than 0."),
        (
            "long_request_concurrency",
            0,
            "--long-request-concurrency must be at least 1, got 0.",
        ),
        ("weights", "int3", '--weights is "int3"; it must be auto, f32, f16, int8 or int4.'),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_refused_by_its_own_name(setting: str, value: object, said: str) -> None:
    assert refusal(flags={setting: value}) == said


def test_the_source_that_won_is_the_one_that_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, "[server]\nport = 70001")
    environment = {"KVOTA_PORT": "70002"}
    assert refusal(file=file, environment=environment).startswith("KVOTA_PORT is 70002")
    said = refusal(file=file, environment=environment, flags={"port": 70003})
    assert said.startswith("--port is 70003")


def test_every_setting_has_words_for_what_it_must_be(tmp_path: Path) -> None:
    for section, struct in SECTIONS.items():
        for field in msgspec.structs.fields(struct):
            file = written(tmp_path, f"[{section}]\n{field.name} = [1979-05-27]")
            said = refusal(file=file)
            assert said.startswith(f"{file}: {field.name} in [{section}] is "), said
            assert "; it must be " in said


def refusal(**sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**sources)
    return caught.value.message
