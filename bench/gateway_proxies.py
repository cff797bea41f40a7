"""The proxies of `make bench-gateway`, each in a process of its own, and the backend behind them.

load ─▶ pass-through | LiteLLM | kvota gateway ─▶ the same fake backend
"""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from bench.server_process import free_port
from kvota.gateway.caller import KeyLimits
from kvota.gateway.store.database import open_database, sqlite_url
from kvota.gateway.store.keys import KEY_TABLES, KeyStore, NewKey
from tests.support.fake_backend import MODEL

START_MAX_S: Final = 300.0  # LiteLLM imports for a minute where the machine is busy
STOP_MAX_S: Final = 20.0
LITELLM: Final = Path(".venv-litellm/bin/litellm")
SHORT_TOKENS: Final = 8  # of an answer that is asked for as a whole
MANY: Final = 10**9
NUM_KEYS: Final = 100
PASS_THROUGH: Final = "pass-through"
OURS: Final = "kvota gateway"
LITELLMS: Final = "LiteLLM"


class ProxyFailed(Exception):
    """It did not start; the message has the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A running proxy. `key` is what its clients have to show."""

    name: str
    port: int
    key: str | None
    process: psutil.Process

    def cpu_s(self) -> float:
        """CPU seconds so far, with its children."""
        every = [self.process, *self.process.children(recursive=True)]
        return sum(sum(one.cpu_times()[:2]) for one in every)

    def resident_bytes(self) -> int:
        every = [self.process, *self.process.children(recursive=True)]
        return sum(one.memory_info().rss for one in every)


@contextlib.contextmanager
def fake_backend(num_tokens: int, delay_s: float = 0.0) -> Iterator[int]:
    """Its port. `delay_s` before each of `num_tokens` tokens; short answers come at once."""
    port = free_port()
    command = [sys.executable, "-m", "tests.support.fake_backend", "--port", str(port)]
    command += ["--tokens", str(num_tokens), "--delay-s", str(delay_s)]
    command += ["--at-once", str(SHORT_TOKENS)]
    with _running(command, port, {}):
        yield port


@contextlib.contextmanager
def pass_through(backend: int) -> Iterator[Proxy]:
    port = free_port()
    command = [sys.executable, "-m", "bench.gateway_passthrough", "--port", str(port)]
    command += ["--backend", f"http://127.0.0.1:{backend}"]
    with _running(command, port, {}) as process:
        yield Proxy(name=PASS_THROUGH, port=port, key=None, process=process)


@contextlib.contextmanager
def kvota_gateway(backend: int, wrapper: Sequence[str] = ()) -> Iterator[Proxy]:
    """With everything on. `wrapper` comes before the command: a profiler, say."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvota-bench-") as name:
        folder = Path(name)
        key = _keys(folder)
        config = folder / "kvota.toml"
        config.write_text(_settings(folder, backend), "utf-8")
        command = [*wrapper, sys.executable, "-m", "kvota", "gateway", "--config", str(config)]
        command += ["--port", str(port)]
        with _running(command, port, {"XDG_STATE_HOME": name}) as process:
            yield Proxy(name=OURS, port=port, key=key, process=process)


@contextlib.contextmanager
def litellm(backend: int) -> Iterator[Proxy]:
    """As its documentation says for production, with one worker, one key and its log quiet."""
    port, key = free_port(), f"sk-{secrets.token_hex(32)}"
    with tempfile.TemporaryDirectory(prefix="kvota-bench-") as name:
        config = Path(name) / "config.yaml"
        config.write_text(
            f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n"
            f"      model: openai/{MODEL}\n      api_base: http://127.0.0.1:{backend}/v1\n"
            f"      api_key: none\n"
            f"litellm_settings:\n  request_timeout: 600\n  telemetry: false\n"
            f"general_settings:\n  master_key: {key}\n",
            "utf-8",
        )
        command = [str(LITELLM.absolute()), "--config", str(config), "--port", str(port)]
        command += ["--host", "127.0.0.1", "--num_workers", "1"]
        quiet = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "DO_NOT_TRACK": "1"}
        quiet["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        with _running(command, port, quiet, "/health/liveliness") as process:
            yield Proxy(name=LITELLMS, port=port, key=key, process=process)


def _settings(folder: Path, backend: int) -> str:
    """Keys, limits, filters, desk, usage, journal, metrics: as an operator would have them."""
    return "\n".join(
        [
            "[gateway]",
            f'state_dir = "{folder}"',
            f'journal = "{folder / "journal"}"',
            "[[backends]]",
            'name = "fake"',
            f'url = "http://127.0.0.1:{backend}"',
            'kind = "openai"',
            "kv_tokens = 10000000",
            "max_running_requests = 4096",
            "connections_max = 4096",
            "[[models]]",
            f'name = "{MODEL}"',
            'backends = ["fake"]',
            "",
        ]
    )


def _keys(folder: Path) -> str:
    """A database of keys; one of them, with all three limits, none of which is reached."""
    limits = KeyLimits(requests_per_minute=MANY, tokens_per_minute=MANY, concurrent_requests=MANY)
    database = open_database(sqlite_url(folder / "kvota.db"), KEY_TABLES)
    store = KeyStore(database)
    new = NewKey(tenant="bench", limits=limits)
    key = [store.create(new, time.time())[1] for _ in range(NUM_KEYS)][-1]
    database.close()
    return key


@contextlib.contextmanager
def _running(
    command: Sequence[str], port: int, environment: Mapping[str, str], path: str = "/health"
) -> Iterator[psutil.Process]:
    """The process once it answers. Raises ProxyFailed."""
    with ExitStack() as closing:
        output = closing.enter_context(tempfile.TemporaryFile())
        own = {name: text for name, text in os.environ.items() if not name.startswith("KVOTA_")}
        child = subprocess.Popen(command, stdout=output, stderr=output, env={**own, **environment})
        closing.callback(_stop, child)
        end_s = time.monotonic() + START_MAX_S
        while not _answers(port, path):
            if child.poll() is not None or time.monotonic() > end_s:
                output.seek(0)
                raise ProxyFailed(output.read()[-2000:].decode(errors="replace"))
            time.sleep(0.1)
        yield psutil.Process(child.pid)


def _answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """With whatever it has started itself."""
    family = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
    child.terminate()
    try:
        child.wait(STOP_MAX_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
