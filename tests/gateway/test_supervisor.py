"""The supervisor over real processes: a light node that dies, hangs and grows on demand."""

import asyncio
import errno
import io
import itertools
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from kvota.core.clock import SystemClock
from kvota.edge.supervision import NodeReady
from kvota.gateway.node_life import Bounds, Probe, Reason, State
from kvota.gateway.node_probe import NodeProbe
from kvota.gateway.supervisor import Child, NeverServed, Supervisor
from kvota.telemetry.log import new_log

BOUNDS = Bounds(stuck_patience_s=0.5, silent_patience_s=2.0, drain_timeout_s=5.0)
PATIENCE_S = 60.0


async def until(met: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not met():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.01)


class Watched:
    """A supervisor, its socket, and what it has reported."""

    def __init__(self, folder: Path, *flags: str, growth_bytes_max: int | None = None) -> None:
        self.socket = folder / "node.sock"
        self.log = io.StringIO()
        self.downs: list[Reason] = []
        self._probe = NodeProbe(self.socket, timeout_s=1.0)
        module = ("-m", "tests.support.light_node")
        child = Child(
            command=(sys.executable, *module, "--unix-socket", str(self.socket), *flags),
            environment=os.environ,
            probe=self._probe.look,
        )
        self.supervisor = Supervisor(
            child,
            BOUNDS,
            SystemClock(),
            new_log(self.log),
            growth_bytes_max=growth_bytes_max,
            on_down=self.downs.append,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Supervisor]:
        await self.supervisor.start()
        watching = asyncio.create_task(self.supervisor.watch())
        try:
            yield self.supervisor
            assert not watching.done(), watching
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self.supervisor.stop()
            await self._probe.close()

    async def behave(self, how: str) -> None:
        connector = aiohttp.UnixConnector(str(self.socket))
        async with aiohttp.ClientSession(connector=connector) as session:
            with suppress(aiohttp.ClientError):  # it may be silent before its answer is out
                async with asyncio.timeout(PATIENCE_S):
                    await (await session.post("http://node/behave", data=how)).read()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")  # short: a socket's path has a limit of its own


async def test_a_killed_process_is_replaced_at_once(folder: Path) -> None:
    watched = Watched(folder)
    async with watched.running() as supervisor:
        first = supervisor.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.num_starts == 2 and supervisor.state is State.UP, "another")
        assert supervisor.pid != first
        assert watched.downs == [Reason.EXITED]
    assert '"status": -9' in watched.log.getvalue()


async def test_while_it_is_away_requests_are_told_when_to_come_back(folder: Path) -> None:
    watched = Watched(folder, "--behave", "slow-load")
    async with watched.running() as supervisor:
        assert supervisor.is_up
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: not supervisor.is_up, "it to be missed")
        refusal = supervisor.refusal()
        assert refusal.reason.value == "engine_restarting"
        assert 0.5 <= refusal.retry_after_s <= max(supervisor.load_s or 0, 1.0) + 0.01


@pytest.mark.parametrize(("how", "why"), [("stuck", Reason.STUCK), ("mute", Reason.SILENT)])
async def test_a_process_that_hangs_is_killed_and_replaced(
    folder: Path, how: str, why: Reason
) -> None:
    watched = Watched(folder)
    async with watched.running() as supervisor:
        await watched.behave(how)
        await until(lambda: supervisor.num_starts == 2 and supervisor.state is State.UP, "another")
        assert watched.downs == [why]


READY = NodeReady(model="m", max_model_len=1, kv_tokens=1, planned_bytes=1)


def python(code: str, *looks: Probe, announces: bool) -> Supervisor:
    """Over a process that runs `code`. Looks at it show `looks`, the last of them for ever."""
    seen = itertools.chain(looks, itertools.repeat(looks[-1]))

    async def look() -> Probe:
        return next(seen)

    announce = f"from kvota.edge.supervision import *; announce(NodeReady(**{_fields(READY)!r}))"
    command = (sys.executable, "-c", code.replace("ANNOUNCE", announce))
    child = Child(command=command, environment=os.environ, probe=look, announces=announces)
    bounds = Bounds(silent_patience_s=1.0, drain_timeout_s=0.1, kill_grace_s=0.1)
    return Supervisor(child, bounds, SystemClock(), new_log(io.StringIO()))


def _fields(ready: NodeReady) -> dict[str, object]:
    return msgspec.structs.asdict(ready)


@pytest.mark.parametrize("own_session", [False, True])
async def test_workers_that_hold_the_pipes_of_a_killed_process_do_not_keep_it_from_being_replaced(
    tmp_path: Path, own_session: bool
) -> None:
    """As those of vLLM may: waiting for the process waited for them as well."""
    workers, num_fds = tmp_path / "workers", psutil.Process().num_fds()
    workers.touch()
    start = f"Popen(['sleep', '3600'], start_new_session={own_session})"
    note = f"print({start}.pid, file=open({str(workers)!r}, 'a'))"
    code = f"import time; from subprocess import Popen; {note}; ANNOUNCE; time.sleep(3600)"
    supervisor = python(code, Probe.SILENT, announces=True)
    await supervisor.start()
    watching = asyncio.create_task(supervisor.watch())
    try:
        await until(lambda: supervisor.num_starts == 2, "another")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await supervisor.stop()
        for pid in workers.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        await until(lambda: psutil.Process().num_fds() <= num_fds, "all pipes to be closed")


async def test_what_a_foreign_engine_writes_is_seen(capfd: pytest.CaptureFixture[str]) -> None:
    """vLLM logs to standard output, also why it cannot start."""
    code = "import time; print('CUDA out of memory', flush=True); time.sleep(3600)"
    supervisor = python(code, Probe.FINE, announces=False)
    await supervisor.start()
    seen: list[str] = []

    def has_come() -> bool:
        seen.append(capfd.readouterr().err)
        return "CUDA out of memory" in "".join(seen)

    await until(has_come, "its words")
    await supervisor.stop()


async def test_a_process_that_writes_much_without_a_line_break_is_heard_and_not_held_up(
    tmp_path: Path,
) -> None:
    wrote = tmp_path / "wrote"
    much = "import sys, time; sys.stdout.write('x' * 500_000 + chr(10)); sys.stdout.flush()"
    code = f"{much}; ANNOUNCE; {much}; open({str(wrote)!r}, 'w'); time.sleep(3600)"
    supervisor = python(code, Probe.FINE, announces=True)
    await supervisor.start()
    assert supervisor.ready == READY
    await until(wrote.exists, "all to be written")
    await supervisor.stop()


async def test_a_process_that_cannot_be_started_just_now_is_started_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor died of it, and the whole gateway with it."""
    watched, tries = Watched(folder), []
    start = asyncio.create_subprocess_exec

    async def start_or_fail(*command: str, **how: Any) -> Process:
        tries.append(command)
        if len(tries) in (2, 3):
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start(*command, **how)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_or_fail)
    async with watched.running() as supervisor:
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: len(tries) == 4 and supervisor.is_up, "another")
    assert watched.log.getvalue().count("Resource temporarily unavailable") == 2


async def test_the_first_start_may_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: str, **__: Any) -> Process:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    supervisor = python("", Probe.FINE, announces=True)
    with pytest.raises(NeverServed) as failed:
        await supervisor.start()
    assert failed.value.status == 1


async def test_a_process_that_grows_past_its_bound_drains_and_is_replaced(folder: Path) -> None:
    watched = Watched(folder, growth_bytes_max=20_000_000)
    async with watched.running() as supervisor:
        await watched.behave("fat")
        await until(lambda: supervisor.num_starts == 2 and supervisor.state is State.UP, "another")
        assert watched.downs == [Reason.TOO_FAT]
    assert '"status": 0' in watched.log.getvalue(), "it went by itself"


async def test_one_that_never_serves_is_told_with_its_status(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(folder, "--behave", "exit-3")
    with pytest.raises(NeverServed) as failed:
        await watched.supervisor.start()
    assert failed.value.status == 3
    assert "It was told to fail" in capfd.readouterr().err
    assert "engine has ended" not in watched.log.getvalue()


async def test_stopping_leaves_no_process(folder: Path) -> None:
    watched = Watched(folder)
    async with watched.running() as supervisor:
        pid = supervisor.pid
        assert pid is not None
    assert supervisor.state is State.STOPPED
    assert not psutil.pid_exists(pid)


async def test_a_process_does_not_outlive_its_supervisor(folder: Path) -> None:
    """kill -9 of the gateway closes the lifeline."""
    watched = Watched(folder)
    async with watched.running() as supervisor:
        process = supervisor._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        assert process.returncode == 0
