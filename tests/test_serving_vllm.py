import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from kvota.config import Config
from kvota.core.errors import ConfigError, InsufficientMemory
from kvota.gateway.settings import GatewaySettings
from kvota.node.options import DeskOptions, EngineSettings, ModelSettings
from kvota.serving_vllm import Gpu, computed_flags, require_command, vllm_plan
from tests.support.fake_backend import MODEL
from tests.support.http_client import Client
from tests.support.live_node import until

GIB = 2**30
QWEN_7B = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return folder


def flags_of(model: Path, gpu: Gpu | None, *, max_model_len: int | None = None) -> dict[str, str]:
    settings = Config(model=ModelSettings(model=str(model), max_model_len=max_model_len))
    return {flag.name: flag.value for flag in computed_flags(settings, gpu)}


def test_flags_follow_from_the_bill(model: Path) -> None:
    roomy = flags_of(model, Gpu(80 * GIB, 0, 9.0))
    assert roomy["--max-model-len"] == "32768"
    assert roomy["--kv-cache-dtype"] == "auto"
    # 0.95 × 80 − 14.2 of weights − about 2 of activations: 59 GiB of KV at 56 KiB a token.
    assert 400 <= int(roomy["--max-num-seqs"]) <= 620
    tight = flags_of(model, Gpu(24 * GIB, 0, 8.9), max_model_len=8192)
    assert tight["--max-model-len"] == "8192"
    assert int(tight["--max-num-seqs"]) < int(roomy["--max-num-seqs"])


def test_what_does_not_fit_is_refused_and_what_is_unknown_is_left_to_vllm(model: Path) -> None:
    with pytest.raises(InsufficientMemory):
        flags_of(model, Gpu(12 * GIB, 0, 9.0))
    with pytest.raises(ConfigError, match="no GPU"):
        flags_of(model, None)
    with pytest.raises(ConfigError):
        flags_of(Path("nobody/nothing"), Gpu(80 * GIB, 0, 9.0))


class Serving:
    """`kvota serve --engine vllm` as a process, with the stand-in for vLLM behind it."""

    def __init__(self, state: Path, **environment: str) -> None:
        command = ",".join((sys.executable, "-m", "tests.support.fake_vllm"))
        settings = {"XDG_STATE_HOME": str(state), "KVOTA_VLLM_COMMAND": command}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvota", "serve", "a/model", "--engine", "vllm", "--port", "0"],
            env={**os.environ, **settings, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        until(lambda: any("Listening on" in line for line in self.lines), "an address", 60.0)
        [address] = [line.split()[2] for line in self.lines if line.startswith("Listening on")]
        self.client = Client(address, MODEL)
        [self.told] = [line for line in self.lines if line.startswith("fake vllm")]

    @property
    def engines(self) -> list[psutil.Process]:
        """The stand-in that was told to listen on this port."""
        port = self.told.split()[self.told.split().index("--port") + 1]
        return [
            one
            for one in psutil.process_iter(["cmdline"])
            if {port, "tests.support.fake_vllm"} <= set(one.info["cmdline"] or ())
        ]

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def close(self) -> None:
        self.client.close()
        self.stop(signal.SIGTERM)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)


def test_a_command_that_is_not_here_is_refused_with_what_would_help() -> None:
    require_command((sys.executable, "-m", "vllm"))
    with pytest.raises(ConfigError, match=r"no-such-vllm.*vllm_command"):
        require_command(("no-such-vllm", "serve"))


def test_the_model_is_named_as_each_command_wants_it() -> None:
    def command_of(*base: str) -> list[str]:
        settings = Config(
            model=ModelSettings(model="a/model"), gateway=GatewaySettings(vllm_command=base)
        )
        return list(vllm_plan(settings).command(Path(), Path()))

    assert command_of("vllm", "serve")[:4] == ["vllm", "serve", "a/model", "--host"]
    module = ("python", "-m", "vllm.entrypoints.openai.api_server")
    assert command_of(*module)[3:6] == ["--model", "a/model", "--host"]


def test_the_desk_lets_as_many_run_as_vllm_does(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(*given: str, wanted: int | None = None) -> int:
        engine = EngineSettings() if wanted is None else EngineSettings(max_running_requests=wanted)
        settings = Config(
            model=ModelSettings(model=str(model)), engine=engine,
            gateway=GatewaySettings(vllm_arguments=given), desk=DeskOptions(max_waiting_queue=7),
        )  # fmt: skip
        plan = vllm_plan(settings)
        assert plan.max_waiting_queue == 7
        return plan.max_running_requests

    monkeypatch.setattr("kvota.serving_vllm.this_gpu", lambda: None)
    assert at_once() == 64
    monkeypatch.setattr("kvota.serving_vllm.this_gpu", lambda: Gpu(80 * GIB, 0, 9.0))
    assert 400 <= at_once() <= 620
    assert at_once("--max-num-seqs", "300") == at_once("--max-num-seqs=300") == 300
    assert at_once(wanted=8) == 8


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    made = Serving(tmp_path)
    yield made
    made.close()


def test_vllm_is_started_watched_and_answered_for(serving: Serving) -> None:
    client = serving.client
    assert serving.told.startswith("fake vllm --model a/model --host 127.0.0.1 --port ")
    assert "--enable-prompt-tokens-details" in serving.told
    assert client.chat().text() == "w0 w1 w2 w3 w4 w5 w6 w7"
    reply = client.chat(stream=True)
    assert reply.finish() == "stop"
    assert reply.headers["x-kvota-backend"] == "node"
    assert client.get("/ready").status == 200
    assert client.metric("kvota_gateway_node_up") == 1
    assert client.metric("kvota_time_to_first_token_seconds_count") == 2, "at the desk for it"
    [engine] = serving.engines
    engine.kill()
    until(lambda: client.metric("kvota_gateway_node_starts") == 2, "another vLLM", 60.0)
    until(lambda: client.chat().status == 200, "an answer", 60.0)
    assert serving.stop(signal.SIGTERM) == 0
    assert not serving.engines


def test_vllm_does_not_outlive_a_gateway_that_is_killed(serving: Serving) -> None:
    assert serving.engines
    serving.stop(signal.SIGKILL)
    until(lambda: not serving.engines, "vLLM to be ended", 60.0)


def test_a_drain_lets_vllm_finish_what_it_would_cut(tmp_path: Path) -> None:
    serving = Serving(tmp_path, FAKE_VLLM_DELAY_S="0.2")
    try:
        with ThreadPoolExecutor() as pool:
            running = pool.submit(serving.client.chat, stream=True)
            open_now = "kvota_gateway_requests_open"
            until(lambda: serving.client.metric(open_now) == 1, "the stream to run")
            serving.process.send_signal(signal.SIGTERM)
            assert running.result().finish() == "stop"
        assert serving.process.wait(30) == 0
    finally:
        serving.close()
    assert not serving.engines
