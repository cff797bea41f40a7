import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvota import cli_gateway
from kvota.core.errors import ConfigError
from kvota.gateway.upstream.kinds import BackendKind
from kvota.tools.evaluate.page import FORMAT
from tests.support.gateway_node import GatewayNode, gateway_node


@pytest.fixture(scope="module")
def node() -> Iterator[GatewayNode]:
    with gateway_node() as made:
        yield made


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["kvota", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli_gateway.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["rollout", "status"], 0, "tiny             1        node  stable"),
        (["rollout", "set", "tiny", "tiny=0.5"], 0, "tiny             0.5      node  stable"),
        (["rollout", "promote", "tiny", "tiny"], 0, "tiny             1        node  stable"),
        (["rollout", "promote", "tiny", "v9"], 2, "tiny has no version 'v9'"),
        (["rollout", "rollback", "tiny", "tiny"], 2, "is the stable version"),
        (["rollout", "set", "none", "v1=1"], 2, "There is no model none here"),
        (["rollout", "set", "tiny", "v1"], 2, "not VERSION=WEIGHT"),
        (["reload"], 0, "as the file says now"),
    ],
)
def test_a_running_gateway_is_told_and_asked(
    node: GatewayNode,
    arguments: list[str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KVOTA_URL", node.url)
    monkeypatch.delenv("KVOTA_API_KEY", raising=False)
    assert run(arguments, monkeypatch) == status
    out, err = capsys.readouterr()
    assert said in " ".join((out + err).split()) or said in out + err


@pytest.mark.parametrize(
    ("candidate", "verdict", "status", "said"),
    [
        ("tiny", "good", 0, "stable"),
        ("tiny", "worse", 2, "does not say that tiny is good"),
        ("other", "good", 2, "is other, not tiny (version tiny)"),
    ],
)
def test_a_version_can_be_promoted_only_with_a_good_evaluation(
    node: GatewayNode,
    candidate: str,
    verdict: str,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "evaluate.json"
    side = {"url": node.url, "model": "old"}
    found = {
        "format": FORMAT, "verdict": verdict, "reason": "It was measured.",
        "written_at_s": time.time(), "baseline": side,
        "candidate": {**side, "model": candidate},
    }  # fmt: skip
    file.write_text(json.dumps(found))
    arguments = ["rollout", "promote", "tiny", "tiny", "--require", str(file), "--url", node.url]
    assert run(arguments, monkeypatch) == status
    out, err = capsys.readouterr()
    assert said in " ".join((out + err).split())


def test_a_gateway_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reload", "--url", "http://127.0.0.1:1"], monkeypatch) == 2
    assert "No answer from http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gateway"], "nothing to stand in front of"),
        (["gateway", "--backend", "vlm=http://a"], "vlm is none of kvota, vllm"),
        (["gateway", "--backend", "ftp://a"], "must begin with http"),
        (["gateway", "--backend", "http://a", "--host", "0.0.0.0"], "No API key exists"),
        (["serve", "--host", "0.0.0.0"], "No API key exists"),
        (["serve", "--unix-socket", "/tmp/x"], "unix_socket is for `kvota node`"),
    ],
)
def test_what_cannot_be_served_is_one_message(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run([*arguments, "--port", "0"], monkeypatch) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert said in err
    assert err.startswith("kvota cannot start.")


def test_backends_are_named_on_the_command_line() -> None:
    entry = cli_gateway._backend("vllm=http://10.0.0.5:8000/x?a=b", 2)
    assert (entry.name, entry.kind) == ("backend-2", BackendKind.VLLM)
    assert entry.url == "http://10.0.0.5:8000/x?a=b"
    assert cli_gateway._backend("http://a/?b=c", 1).kind is BackendKind.OPENAI
    with pytest.raises(ConfigError):
        cli_gateway._backend("x=http://a", 1)


def test_a_server_loads_nothing_of_the_other_commands() -> None:
    code = (
        "import sys, runpy; sys.argv = ['kvota', 'gateway', '--help']\n"
        "try: runpy.run_module('kvota', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'kvota.sim', 'kvota.tools.load', 'openvino', 'textual', 'kvota.tools.plan'}\n"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ended.returncode == 0, ended
