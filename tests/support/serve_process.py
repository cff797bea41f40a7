"""`kvota serve` as an operator runs it: a process of its own, a real model, real signals."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tests.support.http_client import Client
from tests.support.live_node import until
from tests.support.tiny_models import tiny_architecture, write_safetensors

START_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 60.0
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
_COMMAND = (sys.executable, "-m", "kvota", "serve")


class ServeProcess(Client):
    """Ready when made. `flags` are command-line flags; standard error is kept in `errors`."""

    def __init__(self, model: Path, *flags: str) -> None:
        self._process = subprocess.Popen(
            [*_COMMAND, str(model), "--port", "0", "--threads", "1", *flags],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=self._environment(),
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            until(self._is_over_or_listening, "its address", START_TIMEOUT_S)
            address = _ADDRESS.search(self.errors)
            assert address, self.errors
            super().__init__(address[0], model.name)
            until(self._is_ready, "the server to be ready", START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def _environment(self) -> dict[str, str]:
        """A state directory of its own, so that nobody's keys are found there."""
        self._state = TemporaryDirectory(prefix="kvota-state-")
        return {**os.environ, "XDG_STATE_HOME": self._state.name}

    @property
    def errors(self) -> str:
        """All that it has written to standard error."""
        return "".join(self._lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def wait_exit(self) -> int:
        """The exit status; negative for a signal."""
        status = self._process.wait(EXIT_TIMEOUT_S)
        self._reader.join()
        return status

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it, however it is."""
        self._process.kill()
        self.wait_exit()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._state.cleanup()

    def wait_idle(self) -> None:
        """Return when nothing runs or waits and no block is held."""
        names = ("kvota_requests_running", "kvota_requests_waiting", "kvota_kv_blocks{state=used}")
        until(lambda: sum(map(self.metric, names)) == 0, "the server to be idle")

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)

    def _is_over_or_listening(self) -> bool:
        return not self.is_running or _ADDRESS.search(self.errors) is not None

    def _is_ready(self) -> bool:
        try:
            return self.get("/ready").status == 200
        except httpx.TransportError:
            return False


@contextmanager
def serve_process(model: Path, *flags: str) -> Iterator[ServeProcess]:
    process = ServeProcess(model, *flags)
    try:
        yield process
    finally:
        process.close()
        process.kill()


def write_long_model(folder: Path) -> Path:
    """A tiny model whose context is long enough for answers that take a while."""
    write_safetensors(folder, architecture=tiny_architecture("llama", max_position=16384))
    return folder
