"""The journal: what a server was asked and how it went, without a word of what was said.

One JSON object a line, written when a request has ended:

    {"v":1,"at":1764439200.123,"id":"…","model":"smollm2","tenant":"team-a","prompt_tokens":812, …}

`kvota replay` asks it again of another server, and the simulator serves it under a manual clock.
For both, lengths and times are enough; prompts and answers are written only where an operator
wants them (`texts`). What prompts had in common is kept as `prefix`: one number for each leading
block, equal exactly where all text up to the block's end was equal. The numbers come from a keyed
hash whose key is made anew for each writer and never stored, so no text can be guessed from them.

A line is handed to the operating system in one piece when `write` returns: it survives the death of
the process. A full disk costs lines, never requests; lost lines are counted.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

VERSION: Final = 1
PREFIX_BYTES: Final = 1024  # of text under each prefix number
_KEY_BYTES: Final = 32
_ENDING: Final = b"\n"


class JournalLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Counts are tokens, times seconds; `at` is seconds since 1970."""

    v: int
    at: float
    id: str
    model: str
    outcome: str
    prompt_tokens: int
    output_tokens: int
    total_s: float
    endpoint: str = "chat.completions"
    backend: str | None = None
    tenant: str = "default"
    lane: str = "short"
    band: str = "interactive"
    streamed: bool = False
    n: int = 1
    max_tokens: int | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    kv_block_seconds: float | None = None
    prefix: tuple[int, ...] = ()
    texts: tuple[str, ...] | None = None  # prompt and answers, only where the operator wants them


class JournalError(ValueError):
    """A file is not a journal. The message names the line."""


class JournalWriter:
    """Appends to `path`; at `bytes_max` the file is moved to `path.1`, and so on, `keep` of them.

    Where the path comes to name another file or none, as when logrotate has moved it, the next line
    goes to the one it names then, made anew. Several processes may append to one path as long as
    none of them turns it over. Raises OSError from the constructor when the file cannot be opened;
    later failures cost lines and are counted.
    """

    def __init__(self, path: Path, *, bytes_max: int = 256 * 2**20, keep: int = 8) -> None:
        assert bytes_max > 0, bytes_max
        assert keep >= 1, keep
        self._path = path
        self._bytes_max = bytes_max
        self._keep = keep
        self._encoder = msgspec.json.Encoder()
        self.num_lost = 0
        self._file = self._open()
        self._took()

    def write(self, line: JournalLine) -> None:
        content = self._encoder.encode(line) + _ENDING
        try:
            if not self._is_at_path():
                self._reopen()
            if self._size_bytes + len(content) > self._bytes_max and self._size_bytes:
                self._turn_over()
            num_written = os.write(self._file, content)
        except OSError:
            self.num_lost += 1
            return
        self._size_bytes += num_written
        if num_written < len(content):  # the disk is full: the torn line must not spoil the next
            self.num_lost += 1
            self._end_torn_line()

    def close(self) -> None:
        os.close(self._file)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _is_at_path(self) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == self._identity

    def _reopen(self) -> None:
        """Go on in the file that the path names, made anew where there is none."""
        fresh = self._open()
        os.close(self._file)
        self._file = fresh
        self._took()

    def _took(self) -> None:
        here = os.fstat(self._file)
        self._identity, self._size_bytes = (here.st_dev, here.st_ino), here.st_size

    def _end_torn_line(self) -> None:
        try:
            self._size_bytes += os.write(self._file, _ENDING)
        except OSError:
            self._size_bytes = self._bytes_max  # the next line goes to a new file, if there is room

    def _turn_over(self) -> None:
        """Move the files one number up, the oldest away; begin a new one."""
        for number in range(self._keep - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self._path.replace(self._numbered(1))
        self._reopen()
        self._numbered(self._keep + 1).unlink(missing_ok=True)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


class PrefixNumbers:
    """Numbers for what prompts have in common; comparable within one writer's life."""

    def __init__(self, key: bytes) -> None:
        assert len(key) == _KEY_BYTES, len(key)
        self._key = key

    def of(self, texts: Sequence[str]) -> tuple[int, ...]:
        """One number for each whole block of `PREFIX_BYTES` bytes of the texts in a row.

        Chained: each depends on all that comes before it. 53 bits, so that JSON keeps them exact.
        """
        content = "\0".join(texts).encode("utf-8", "surrogatepass")
        if len(content) < PREFIX_BYTES:
            return ()
        chained = blake2b(key=self._key, digest_size=8)
        numbers: list[int] = []
        for begin in range(0, len(content) - PREFIX_BYTES + 1, PREFIX_BYTES):
            chained.update(content[begin : begin + PREFIX_BYTES])
            numbers.append(int.from_bytes(chained.digest(), "big") >> 11)
        return tuple(numbers)


def new_prefix_numbers() -> PrefixNumbers:
    return PrefixNumbers(os.urandom(_KEY_BYTES))


def read_journal(lines: Iterable[str | bytes]) -> Iterator[JournalLine]:
    """The lines in file order, which is the order of endings.

    A torn last line, as a killed process leaves it, is passed over; any other line that is not a
    journal's raises JournalError.
    """
    decoder = msgspec.json.Decoder(JournalLine)
    broken: str | None = None
    for number, line in enumerate(lines, start=1):
        if broken is not None:
            raise JournalError(broken)
        if not line.strip():
            continue
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError as error:
            broken = f"line {number} is not of a kvota journal: {error}"
            continue
        if entry.v != VERSION:
            raise JournalError(f"line {number} has version {entry.v}; this reads {VERSION}")
        yield entry
