"""Listening: an address taken before there is anything to say, and a server with limits."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from kvota.core.errors import ConfigError
from kvota.edge.connection import BoundedConnection
from kvota.edge.liveness import GONE_AFTER_S, notice_vanished

KEEP_ALIVE_S = 75
BACKLOG = 1024
FLUSH_TIMEOUT_S = 2
EXIT_FORCED = 130


def bind(host: str, port: int, *, gone_after_s: float = GONE_AFTER_S) -> socket.socket:
    """Take the address, without listening on it yet. Raises ConfigError when it cannot be had.

    Clients that vanish from its connections are noticed (`liveness.py`).
    """
    with _told_as_config_error(host, port):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            notice_vanished(taken, gone_after_s)
            taken.bind(address)
        except OSError:
            taken.close()
            raise
    return taken


def bind_unix(path: Path) -> socket.socket:
    """Take a path as the address, which its owner alone may connect to. Raises ConfigError.

    A socket that a dead process left there is replaced; one that is alive is not.
    """
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear(path)
        taken.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        taken.close()
        raise ConfigError(
            f"Cannot listen on {path}: {error.strerror or error}. Choose another --unix-socket."
        ) from error
    return taken


def _clear(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # nobody listens any more


def listen(taken: socket.socket) -> None:
    """Let clients in: from here on they are answered. Raises ConfigError.

    Two processes may bind one address while neither listens; the second to listen is told.
    """
    if taken.family == socket.AF_UNIX:
        taken.listen(BACKLOG)
        return
    with _told_as_config_error(*taken.getsockname()[:2]):
        taken.listen(BACKLOG)


@contextlib.contextmanager
def _told_as_config_error(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}. "
            "Choose another with --host and --port."
        ) from error


def http_server(app: Any) -> uvicorn.Server:
    """A server of `app` that leaves signals alone; `serve(sockets=[…])` runs it."""
    return _Server(
        uvicorn.Config(
            app,
            http=BoundedConnection,
            loop="none",
            lifespan="on",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
            backlog=BACKLOG,
        )
    )


class _Server(uvicorn.Server):
    """uvicorn's server without its own idea of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def stop_signals() -> asyncio.Event:
    """An event that the first signal sets; the second one ends the process on the spot."""
    told = asyncio.Event()

    def on_signal() -> None:
        if told.is_set():
            os._exit(EXIT_FORCED)
        told.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return told
