"""`kvota serve` with a light node instead of a model: a real gateway process, real signals.

python -m tests.support.light_serve [--config kvota.toml] [--behave …]
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvota.config import load
from kvota.edge.settings import EdgeSettings
from kvota.gateway.control import Settings
from kvota.gateway.node_life import Bounds
from kvota.gateway.own_node import NodePlan
from kvota.gateway.plan import ServePlan
from kvota.gateway.serve import run
from tests.support.http_client import Client
from tests.support.light_node import MODEL
from tests.support.live_node import until

_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
EXIT_TIMEOUT_S = 60.0


class LightServe(Client):
    """A gateway process and its light node. Ready when made; `node_pid` is the child's."""

    def __init__(self, *flags: str) -> None:
        self._state = TemporaryDirectory(prefix="kvota-state-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.light_serve", *flags],
            stderr=subprocess.PIPE,
            env={**os.environ, "XDG_STATE_HOME": self._state.name},
            text=True,
        )
        self._lines: list[str] = []
        self._node_pids: set[int] = set()  # that have answered
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            until(lambda: not self.is_running or bool(_ADDRESS.search(self.errors)), "an address")
            address = _ADDRESS.search(self.errors)
            assert address, self.errors
        except BaseException:
            self._end()
            raise
        super().__init__(address[0], MODEL)

    @property
    def errors(self) -> str:
        return "".join(self._lines)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def node_pid(self) -> int:
        """Of the node that answers now."""
        pid = int(self.chat(max_tokens=1).text())
        self._node_pids.add(pid)
        return pid

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_exit(self) -> int:
        status = self._process.wait(EXIT_TIMEOUT_S)
        self._reader.join(EXIT_TIMEOUT_S)
        assert not self._reader.is_alive(), "a process that it has started goes on"
        return status

    def stop(self) -> None:
        self.close()
        self._end()

    def _end(self) -> None:
        """Kill it and what it may have left behind, which would hold its standard error open."""
        self._process.kill()
        for pid in self._node_pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.wait_exit()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._state.cleanup()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)


@contextmanager
def light_serve(*flags: str) -> Iterator[LightServe]:
    process = LightServe(*flags)
    try:
        yield process
    finally:
        process.stop()


def plan(config: Path | None, behave: str, drain_timeout_s: float) -> ServePlan:
    def read() -> Settings:
        settings = load(file=config)
        return settings.gateway, settings.fleet

    def command(directory: Path, socket: Path) -> Sequence[str]:
        node = (sys.executable, "-m", "tests.support.light_node", "--unix-socket", str(socket))
        return (*node, "--behave", behave) if behave else node

    gateway, fleet = read()
    bounds: dict[str, Any] = {"stuck_patience_s": 0.5, "silent_patience_s": 2.0}
    return ServePlan(
        host="127.0.0.1", port=0, drain_timeout_s=drain_timeout_s, edge=EdgeSettings(),
        gateway=gateway, fleet=fleet, read=read, environment=os.environ,
        node=NodePlan(
            command=command,
            environment=os.environ,
            bounds=Bounds(drain_timeout_s=drain_timeout_s, **bounds),
            growth_bytes_max=20_000_000,
            answer_timeout_s=60.0,
            silence_max_s=60.0,
        ),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--behave", default="")
    parser.add_argument("--drain-timeout-s", type=float, default=10.0)
    flags = parser.parse_args()
    sys.exit(run(plan(flags.config, flags.behave, flags.drain_timeout_s)))


if __name__ == "__main__":
    main()
