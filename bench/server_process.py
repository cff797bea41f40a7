"""`kvota node`, desk and engine alone, as a child process on a free port of this machine.

It is the process that `kvota serve` puts behind its gateway, so that keys, a database and the
gateway's own use of the cores are no part of what is measured.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.client import BenchFailed

START_MAX_S = 180.0
STOP_MAX_S = 20.0
UNGUESSED = ("--speculative-tokens", "0")  # for figures in which what a prompt leads to has no part


class ServerFailed(Exception):
    """The server ended or did not become ready; the message holds the end of its output."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    port: int
    model: str  # the name that requests must use
    pid: int


@contextmanager
def kvota_server(model: Path, threads: int, flags: Sequence[str] = ()) -> Iterator[RunningServer]:
    """Start, wait until it accepts work, and stop it at the end."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "kvota"), "node", str(model)]
    command += ["--port", str(port), "--threads", str(threads), *flags]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVOTA_")}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            _wait_until_ready(child, port)
            model_name = _get(port, "/v1/models")["data"][0]["id"]
            yield RunningServer(port, model_name, child.pid)
        except (ServerFailed, OSError, BenchFailed) as error:
            output.seek(0)
            raise ServerFailed(f"{error}\n{output.read()[-2000:].decode()}") from error
        finally:
            _stop(child)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(child: "subprocess.Popen[bytes]", port: int) -> None:
    deadline_s = time.monotonic() + START_MAX_S
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            raise ServerFailed(f"kvota ended with code {child.returncode}")
        try:
            _get(port, "/ready")
        except (OSError, http.client.HTTPException, ServerFailed):
            time.sleep(0.2)
        else:
            return
    raise ServerFailed(f"kvota was not ready after {START_MAX_S:.0f} s")


def _get(port: int, path: str) -> dict[str, list[dict[str, str]]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise ServerFailed(f"GET {path}: {response.status}")
    content: dict[str, list[dict[str, str]]] = json.loads(body) if path.startswith("/v1") else {}
    return content


def _stop(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    try:
        child.wait(STOP_MAX_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
