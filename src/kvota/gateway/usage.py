"""Counting what every request used, so that nothing acknowledged is lost and nothing is slow.

    add ──os.write──▶ <random>.usage (appended)  ──flush, now and then──▶  database, exactly once

`add` returns when the kernel has the line. Pages that the kernel has outlive the process, so
kill -9 loses nothing (a power failure may lose the last seconds). No database is touched there.

A segment is one file of lines. Its writer holds a lock on it; the lock ends with the process, and
whoever gets it finds a segment that nobody will write to any more, its own sealed one or one that
a dead gateway left, and merges it: into the database together with the segment's name, then the
file is deleted, then the name. Dying anywhere in between is repaired by the next flush.

Several gateways may share a directory on one machine, and a database everywhere.
"""

import asyncio
import fcntl
import os
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvota.core.errors import ConfigError
from kvota.gateway.store.database import StoreUnusable
from kvota.gateway.store.usage import UsageFilter, UsageLine, UsageStore, day_of, iso_day, summed

__all__ = ["UsageBook", "UsageFilter", "UsageLine", "day_of", "iso_day", "summed"]

FLUSH_EVERY_S: Final = 10.0
HELD_MAX: Final = 100_000  # lines for which the disk had no room: some 20 MB
_SEALED_SUFFIX: Final = ".usage"
_UNBORN_SUFFIX: Final = ".new"  # not locked yet, so not to be seen yet
_DAMAGED_SUFFIX: Final = ".damaged"


class UsageBook:
    """One per gateway. `add` from any thread; run `keep_flushing` beside; `close` at the end."""

    def __init__(
        self,
        directory: Path,
        store: UsageStore,
        *,
        on_failed: Callable[[StoreUnusable], None] = lambda _: None,
    ) -> None:
        """Makes the directory and the first segment. Raises ConfigError when it may not.

        `on_failed` hears of flushes that failed, and of lines that cannot be read.
        """
        self._directory = directory
        self._store = store
        self._on_failed = on_failed
        self._encode = msgspec.json.Encoder().encode
        self._writing = threading.Lock()
        self._flushing = threading.Lock()
        self._num_pending = 0
        self._held: list[bytes] = []  # which the disk has not taken
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = _new_segment(directory)
        except OSError as error:
            raise ConfigError(
                f"Usage cannot be written to {directory}: {error.strerror}."
            ) from error

    @property
    def num_pending(self) -> int:
        """Lines of this process that are not sealed for the database yet."""
        return self._num_pending

    def add(self, line: UsageLine) -> None:
        """Keep a line, for good when this returns.

        StoreUnusable when the disk takes no more: then it is held in memory, if that is not too
        much, and written with the next line or flush that the disk takes.
        """
        content = self._encode(line)
        record = b"%08x %b\n" % (zlib.crc32(content), content)
        with self._writing:
            if len(self._held) >= HELD_MAX:
                self._write_held()  # or raise: there is no room for another
            self._held.append(record)
            self._write_held()

    def flush(self) -> None:
        """Bring everything up to now into the database. Blocks. Raises StoreUnusable.

        Segments of the dead come first: while they cannot be merged, no new ones are made.
        """
        with self._flushing:
            self._merge_unlocked()
            with self._writing:
                self._write_held()
            if self._num_pending:
                self._seal()
                self._merge_unlocked()

    async def keep_flushing(self, every_s: float = FLUSH_EVERY_S) -> None:
        """Flush now and then until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await asyncio.to_thread(self.flush)
            except StoreUnusable as error:
                self._on_failed(error)

    async def lines(self, wanted: UsageFilter) -> list[UsageLine]:
        """What was used, this moment included. Raises StoreUnusable."""
        await asyncio.to_thread(self.flush)
        return await asyncio.to_thread(self._store.lines, wanted)

    def close(self) -> None:
        """Flush if the database is there; if not, the lines wait for the next start. Blocks."""
        with self._flushing:
            try:
                with self._writing:
                    self._write_held()
            except StoreUnusable as error:
                self._on_failed(error)
            os.close(self._file)
            try:
                self._merge_unlocked()
            except StoreUnusable as error:
                self._on_failed(error)

    def _write_held(self) -> None:
        held = self._held
        if not held:
            return
        self._append(held[0] if len(held) == 1 else b"".join(held))
        self._num_pending += len(held)
        held.clear()

    def _append(self, record: bytes) -> None:
        """All of it or none: half a line would spoil the next one."""
        try:
            written = os.write(self._file, record)
            if written != len(record):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError(0, "the disk is full")
        except OSError as error:
            raise StoreUnusable(
                f"Usage cannot be written to {self._directory}: {error.strerror}."
            ) from error

    def _seal(self) -> None:
        """Go on in a new segment. The old one is from now on anybody's to merge."""
        try:
            fresh = _new_segment(self._directory)
        except OSError as error:
            raise StoreUnusable(
                f"Usage cannot be written to {self._directory}: {error.strerror}."
            ) from error
        with self._writing:
            sealed, self._file, self._num_pending = self._file, fresh, 0
        os.close(sealed)

    def _merge_unlocked(self) -> None:
        """Raises StoreUnusable, also for what the disk or the process's limits do not allow."""
        try:
            for path in sorted(self._directory.glob(f"*{_SEALED_SUFFIX}")):
                self._merge_if_unlocked(path)
        except OSError as error:
            raise StoreUnusable(
                f"Usage in {self._directory} cannot be merged: {error.strerror}."
            ) from error

    def _merge_if_unlocked(self, path: Path) -> None:
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return  # somebody else has merged it
        try:
            if _has_lock(file):
                self._merge(path, file)
        finally:
            os.close(file)

    def _merge(self, path: Path, file: int) -> None:
        with os.fdopen(os.dup(file), "rb") as lines:
            reader = _Reader(lines.read())
        self._store.merge(path.stem, reader)
        if reader.num_damaged:
            path.rename(path.with_suffix(_DAMAGED_SUFFIX))
            self._on_failed(
                StoreUnusable(
                    f"{reader.num_damaged} lines of usage in {path} are damaged and not counted."
                )
            )
        else:
            path.unlink()
        _sync(self._directory)  # only then may the name be forgotten
        self._store.forget(path.stem)


class _Reader:
    """The lines of a segment, in order. A last line without its end was never acknowledged."""

    def __init__(self, content: bytes) -> None:
        self._records = content.split(b"\n")[:-1]
        self.num_damaged = 0

    def __iter__(self) -> Iterator[UsageLine]:
        decoder = msgspec.json.Decoder(UsageLine)
        for record in self._records:
            line = _line(decoder, record)
            if line is None:
                self.num_damaged += 1
            else:
                yield line


def _line(decoder: "msgspec.json.Decoder[UsageLine]", record: bytes) -> UsageLine | None:
    checksum, _, content = record.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(content):
        return None
    try:
        line = decoder.decode(content)
    except msgspec.DecodeError:
        return None
    counts = (line.requests, line.prompt_tokens, line.cached_tokens, line.output_tokens)
    return line if max(map(abs, counts)) < 2**62 else None  # what no database's integer holds


def _new_segment(directory: Path) -> int:
    """A fresh segment, locked before anybody can see it; returns its open file."""
    name = uuid.uuid4().hex
    unborn = directory / f"{name}{_UNBORN_SUFFIX}"
    file = os.open(unborn, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    unborn.rename(directory / f"{name}{_SEALED_SUFFIX}")
    return file


def _has_lock(file: int) -> bool:
    """Take the lock of a segment whose writer is gone, unless it was merged while we looked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(file).st_nlink > 0


def _sync(directory: Path) -> None:
    """Make what was done to the directory's names survive a power failure."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
