"""The leash over real processes: whoever holds it is killed, and what is on it goes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

import psutil
import pytest

from kvota.edge.leash import EXIT_NOT_FOUND, leashed

PATIENCE_S = 60.0
LONG_S = 3600.0

# Starts what is in its arguments on a leash, says so, and does nothing more.
HOLDER = """
import subprocess, sys, time
held = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
print(held.pid, flush=True)
time.sleep(3600)
"""
READS = "import sys; sys.stdin.read()"  # as our node does
SLEEPS = "import time; time.sleep(3600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
# As uvloop does with what it reads.
UNBLOCKS = "import os, time; os.set_blocking(0, False); print('set', flush=True); time.sleep(3600)"
WITH_WORKER = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {DEAF!r}])
sys.stdin.read()
"""


class Held:
    """A process that holds another one on a leash. Kill it."""

    def __init__(
        self, code: str, *, linger_s: float = LONG_S, kill_after_s: float = LONG_S
    ) -> None:
        command = leashed((sys.executable, "-c", code), linger_s, kill_after_s)
        self.holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *command], stdout=subprocess.PIPE, text=True
        )
        assert self.holder.stdout is not None
        self.pid = int(self.holder.stdout.readline())

    @property
    def group(self) -> list[int]:
        return [one.pid for one in psutil.process_iter() if _group_of(one.pid) == self.pid]

    def kill_holder(self) -> None:
        self.holder.kill()
        self.holder.wait()

    def wait_gone(self) -> None:
        wait_until(lambda: not self.group, f"{self.group} to go")

    def close(self) -> None:
        self.kill_holder()
        assert self.holder.stdout is not None
        self.holder.stdout.close()
        if self.group:
            os.killpg(self.pid, signal.SIGKILL)


def _group_of(pid: int) -> int | None:
    try:
        is_zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return None if is_zombie else os.getpgid(pid)
    except (ProcessLookupError, psutil.Error):
        return None


def wait_until(met: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.02)


@pytest.fixture
def held(request: pytest.FixtureRequest) -> Iterator[Held]:
    code, times = request.param
    made = Held(code, **times)
    yield made
    made.close()


_Case = tuple[str, dict[str, float]]
GOES_BY_ITSELF: Final[_Case] = (READS, {})
MUST_BE_TOLD: Final[_Case] = (SLEEPS, {"linger_s": 0.0})
MUST_BE_KILLED: Final[_Case] = (DEAF, {"linger_s": 0.0, "kill_after_s": 0.3})
LEAVES_A_WORKER: Final[_Case] = (WITH_WORKER, {})
MAKES_THE_PIPE_NON_BLOCKING: Final[_Case] = (UNBLOCKS, {"linger_s": 0.0})


@pytest.mark.parametrize(
    "held", [GOES_BY_ITSELF, MUST_BE_TOLD, MUST_BE_KILLED, LEAVES_A_WORKER], indirect=True
)
def test_it_goes_when_its_holder_is_killed(held: Held) -> None:
    num = 3 if "worker" in _command(held.pid) else 2
    wait_until(lambda: len(held.group) == num, "engine, watcher and worker to be there")
    held.kill_holder()
    held.wait_gone()


@pytest.mark.parametrize("held", [MUST_BE_KILLED], indirect=True)
def test_it_goes_also_when_it_is_stopped(held: Held) -> None:
    wait_until(lambda: len(held.group) == 2, "engine and watcher to be there")
    os.kill(held.pid, signal.SIGSTOP)
    held.kill_holder()
    held.wait_gone()


@pytest.mark.parametrize("held", [MAKES_THE_PIPE_NON_BLOCKING], indirect=True)
def test_the_watcher_goes_on_when_it_was_stopped(held: Held) -> None:
    """Its read is then begun again, on a pipe that no longer waits: the leash was cut."""
    assert held.holder.stdout is not None
    assert held.holder.stdout.readline() == "set\n"
    [watcher] = [pid for pid in held.group if pid != held.pid]
    os.kill(watcher, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(watcher).status() == psutil.STATUS_STOPPED, "it to stop")
    os.kill(watcher, signal.SIGCONT)
    time.sleep(0.2)
    assert watcher in held.group
    held.kill_holder()
    held.wait_gone()


@pytest.mark.parametrize("held", [GOES_BY_ITSELF], indirect=True)
def test_it_goes_also_when_its_holder_is_killed_at_once(held: Held) -> None:
    held.kill_holder()
    held.wait_gone()


@pytest.mark.parametrize("held", [MUST_BE_TOLD], indirect=True)
def test_as_long_as_it_is_held_it_runs_under_the_id_that_was_started(held: Held) -> None:
    wait_until(lambda: "leash" not in _command(held.pid), "the engine to be what was asked for")
    [watcher] = [pid for pid in held.group if pid != held.pid]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(watcher, number)
    time.sleep(0.2)
    assert sorted(held.group) == sorted([held.pid, watcher])


def test_status_and_output_are_the_engines_own() -> None:
    code = "print('said'); raise SystemExit(7)"
    process = subprocess.Popen(
        leashed((sys.executable, "-c", code)),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.read() == "said\n", "the watcher keeps no pipe open"
        assert process.wait(PATIENCE_S) == 7
    os.killpg(process.pid, signal.SIGKILL)  # as a supervisor does, when it sees that it ended


def test_what_cannot_be_started_is_named() -> None:
    process = subprocess.run(
        leashed(("no-such-engine", "serve"), 0.0, 0.0),
        input="", capture_output=True, start_new_session=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert process.returncode == EXIT_NOT_FOUND
    assert process.stderr == "Cannot start no-such-engine: No such file or directory.\n"


def _command(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline())
