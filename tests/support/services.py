"""Real servers for tests: a PostgreSQL and a Redis of one's own, where their programs are there.

Both listen on a socket file in a fresh directory, so nothing outside can reach them and no port
can be taken. Whoever has not installed them gets skipped tests and the reason.
"""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

START_TIMEOUT_S = 120
SOCKET = "redis.sock"


@contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL until the end; yields the directory of its socket, which trusts everybody."""
    programs = _postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL's initdb is not installed (/usr/lib/postgresql/*/bin)")
    with _directory() as directory:
        owner = _unprivileged(directory)
        place, log = directory / "data", directory / "log"
        options = f"-c listen_addresses='' -c unix_socket_directories={directory} -c fsync=off"

        def run(program: str, *arguments: str) -> None:
            told = subprocess.run(
                [str(programs / program), *arguments],
                user=owner,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if program == "initdb" else subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                timeout=START_TIMEOUT_S,
                check=False,
            )
            assert told.returncode == 0, (program, told.stdout, log.exists() and log.read_text())

        run("initdb", "-D", str(place), "-U", "kvota", "-A", "trust", "-N", "-E", "UTF8")
        run("pg_ctl", "-D", str(place), "-w", "-o", options, "-l", str(log), "start")
        try:
            yield str(directory)
        finally:
            run("pg_ctl", "-D", str(place), "-w", "-m", "immediate", "stop")


def new_database(directory: str, name: str) -> str:
    """A fresh, empty database; returns its URL."""
    with psycopg.connect(f"host={directory} user=kvota dbname=postgres", autocommit=True) as admin:
        admin.execute(f'CREATE DATABASE "{name}"'.encode())
    return f"postgresql://kvota@/{name}?host={directory}"


@contextmanager
def redis() -> Iterator[str]:
    """A Redis until the end; yields its URL."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    with _directory() as directory:
        path = directory / SOCKET
        process = subprocess.Popen(
            [program, "--port", "0", "--unixsocket", str(path), "--save", ""],
            cwd=directory,
            stdout=subprocess.DEVNULL,
        )
        try:
            _wait_for(path, process)
            yield f"unix://{path}"
        finally:
            process.terminate()
            process.wait(START_TIMEOUT_S)


def _wait_for(path: Path, process: "subprocess.Popen[bytes]") -> None:
    """Until it takes connections: the file is there a moment before that."""
    give_up = time.monotonic() + START_TIMEOUT_S
    while not _is_listening(path):
        assert process.poll() is None, "redis-server ended at once"
        assert time.monotonic() < give_up, "redis-server does not listen"
        time.sleep(0.01)


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def _postgres_programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return None if on_path is None else Path(on_path).parent


@contextmanager
def _directory() -> Iterator[Path]:
    # Not pytest's: a socket's path may have at most 107 characters, and another user must reach it.
    with tempfile.TemporaryDirectory(prefix="kvota-", dir="/tmp") as name:
        yield Path(name)


def _unprivileged(directory: Path) -> str | None:
    """A user that PostgreSQL agrees to run as, made the directory's owner; None: we are one."""
    if os.geteuid() != 0:
        return None
    user = pwd.getpwnam("nobody")
    os.chown(directory, user.pw_uid, user.pw_gid)
    return user.pw_name
