"""`make test-vllm`: start real engine servers and hold the contract of foreign backends to them.

    python -m scripts.real_backends [--only vllm|llamacpp] [-- pytest arguments]

vLLM gets a tiny random Llama that is written for it, llama.cpp the default GGUF. Each server lives
in an environment of its own (.venv-vllm, .venv-llamacpp), on a free port of this machine, and ends
with this script. The exit status is pytest's; 3 when a server does not start, with its last words.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.server_process import free_port
from kvota.model.catalog import DEFAULT_MODEL, cache_dir_of, fetch
from tests.support.tiny_models import tiny_architecture, write_safetensors

START_MAX_S: Final = 900.0  # vLLM imports for minutes on a slow or busy machine
STOP_MAX_S: Final = 30.0
EXIT_NOT_STARTED: Final = 3
CONTRACT: Final = "tests/gateway/upstream/test_real_backends.py"
CONTEXT: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """How one engine's server is started. `python` is the interpreter of its environment."""

    kind: str
    python: Path
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class NotStarted(Exception):
    """The message has the end of what the server said."""


def vllm(folder: Path, port: int) -> EngineServer:
    """Its module, for the `vllm` command wants packages that break it on machines without a GPU."""
    model = folder / "tiny"
    model.mkdir()
    # Heads of 32: the smallest that vLLM's attention on CPUs knows.
    write_safetensors(
        model, architecture=tiny_architecture("llama", head_size=32, max_position=CONTEXT)
    )
    return EngineServer(
        kind="vllm",
        python=Path(".venv-vllm/bin/python"),
        arguments=(
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--max-model-len", str(CONTEXT), "--enforce-eager"),
        ),
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        },
    )


def llamacpp(folder: Path, port: int) -> EngineServer:
    model = fetch(DEFAULT_MODEL, cache_dir_of(os.environ))
    return EngineServer(
        kind="llamacpp",
        python=Path(".venv-llamacpp/bin/python"),
        arguments=("scripts/llamacpp_server.py", str(model), str(port)),
    )


KINDS: Final = {"vllm": vllm, "llamacpp": llamacpp}


@contextlib.contextmanager
def running(server: EngineServer, port: int, log: Path) -> Iterator[str]:
    """Yields its `kind=url` once it is well, and ends it after the block. Raises NotStarted."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            [server.python, *server.arguments],
            stdout=output,
            stderr=output,
            env={**os.environ, **server.environment},
        )
        try:
            _wait_until_well(child, server.kind, port, log)
            yield f"{server.kind}=http://127.0.0.1:{port}"
        finally:
            child.terminate()
            try:
                child.wait(STOP_MAX_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _wait_until_well(child: "subprocess.Popen[bytes]", kind: str, port: int, log: Path) -> None:
    end_s = time.monotonic() + START_MAX_S
    while not _is_well(port):
        is_over = child.poll() is not None
        if is_over or time.monotonic() > end_s:
            what = f"ended with {child.returncode}" if is_over else f"not up in {START_MAX_S:g} s"
            raise NotStarted(f"{kind}: {what}\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(1.0)


def _is_well(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=sorted(KINDS))
    parser.add_argument("pytest", nargs="*")
    flags = parser.parse_args()
    kinds = [flags.only] if flags.only else list(KINDS)
    with contextlib.ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="kvota-real-")))
        told = []
        for kind in kinds:
            port = free_port()
            server = KINDS[kind](folder, port)
            print(f"starting {kind}", flush=True)
            try:
                told.append(closing.enter_context(running(server, port, folder / f"{kind}.log")))
            except NotStarted as failed:
                print(failed, file=sys.stderr)
                return EXIT_NOT_STARTED
        environment = {**os.environ, "KVOTA_REAL_BACKENDS": " ".join(told)}
        command = [sys.executable, "-m", "pytest", "-n", "0", CONTRACT, *flags.pytest]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
