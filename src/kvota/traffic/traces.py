"""Request traces as arrivals, one reader for each format. Which one a file is: `opening.py`.

    format     one line                                             times        prefixes
    Azure      TIMESTAMP,ContextTokens,GeneratedTokens              yes          no
    Mooncake   {timestamp ms, input_length, output_length, hash_ids}  yes        512 tokens an id
    Bailian    the same in s, with chat_id, parent_chat_id, turn    yes          16 tokens an id
    BurstGPT   Timestamp,[Session ID,Elapsed time,]Model,…          whole s      no
    ShareGPT   num_prefill_tokens,num_decode_tokens,…               no           no
    journal    of kvota                                             yes          256 tokens an id

Files may be packed with gzip. `max_tokens` is in no trace, so it is the caller's: what
clients of such a service would allow. An output over it is cut to it; None: each client allows
exactly what its answer had.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, TextIO

from kvota.core.errors import ConfigError, Outcome
from kvota.core.request import Band
from kvota.telemetry.journal import JournalError, JournalLine, read_journal
from kvota.traffic.arrival import MOONCAKE_BLOCK, Arrival

JOURNAL_PREFIX_TOKENS = 256  # under one prefix number: its 1,024 bytes at four bytes a token
JOURNAL_ALLOWED = 1024  # tokens, where neither line nor caller says what a client allows
BAILIAN_BLOCK = 16
_GZIP = b"\x1f\x8b"
_NEVER_WORK = frozenset({Outcome.INVALID, Outcome.DENIED})
_GENERATING = frozenset({"chat.completions", "completions"})  # embeddings have no answer to time
MOONCAKE_BUCKET_S = 3.0  # the conversation trace's times are whole multiples of this


class TraceError(ConfigError):
    """A line of a trace is not what its format says. The message names file and line."""


@dataclass(slots=True)
class PassedOver:
    """Rows that say nothing of how long an answer would have been, counted while reading."""

    num: int = 0


def read_azure(path: Path, *, max_tokens: int | None = 1024) -> Iterator[Arrival]:
    """Azure LLM inference traces of 2023 to 2025: TIMESTAMP, ContextTokens, GeneratedTokens."""
    with open_trace(path) as file:
        first: datetime | None = None
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                moment = datetime.fromisoformat(row["TIMESTAMP"])
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                first = first or moment
                at_s = (moment - first).total_seconds()
                arrival = _arrival(at_s, prompt, output, max_tokens)
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: not a row of an Azure trace: {error}") from None
            yield arrival


def read_mooncake(path: Path, *, max_tokens: int | None = 2048) -> Iterator[Arrival]:
    """Mooncake JSONL: `hash_ids` become prefixes that requests really share."""
    with open_trace(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _hashed(json.loads(line), 1000, MOONCAKE_BLOCK, max_tokens)
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: not a Mooncake request: {error}") from None


def read_bailian(path: Path, *, max_tokens: int | None = 2048) -> Iterator[Arrival]:
    """Qwen-Bailian JSONL. A request names the one it follows; the first one names the session."""
    sessions: dict[int, str] = {}
    with open_trace(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                own, parent = int(row["chat_id"]), int(row["parent_chat_id"])
                sessions[own] = str(own) if parent < 0 else sessions.get(parent, str(parent))
                arrival = _hashed(row, 1, BAILIAN_BLOCK, max_tokens)
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: not a Bailian request: {error}") from None
            yield replace(arrival, session=sessions[own])


def _hashed(row: dict[str, Any], ticks_per_s: int, block: int, max_tokens: int | None) -> Arrival:
    at_s, prompt = row["timestamp"] / ticks_per_s, int(row["input_length"])
    arrival = _arrival(at_s, prompt, int(row["output_length"]), max_tokens)
    return replace(arrival, prefix=tuple(row["hash_ids"]), prefix_block=block)


def read_burstgpt(
    path: Path, *, max_tokens: int | None = 1024, passed_over: PassedOver | None = None
) -> Iterator[Arrival]:
    """BurstGPT CSV with 6 or 8 columns. Requests that failed there (response 0) are passed over."""
    with open_trace(path) as file:
        first_s: float | None = None
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                moment_s = float(row["Timestamp"])
                prompt, output = int(row["Request tokens"]), int(row["Response tokens"])
                arrival = _arrival(moment_s, prompt, output, max_tokens)
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: not a row of BurstGPT: {error}") from None
            if output == 0:
                if passed_over is not None:
                    passed_over.num += 1
                continue
            first_s = moment_s if first_s is None else first_s
            session = row.get("Session ID") or None
            yield replace(arrival, at_s=moment_s - first_s, session=session)


def read_sharegpt(
    path: Path, *, rate_rps: float, rng: Random, max_tokens: int | None = 1024
) -> Iterator[Arrival]:
    """ShareGPT length pairs, in file order, at the times of a Poisson process."""
    at_s = 0.0
    with open_trace(path) as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                prompt, output = int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])
                arrival = _arrival(0.0, prompt, output, max_tokens)
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: not a row of lengths: {error}") from None
            at_s += rng.expovariate(rate_rps)
            yield replace(arrival, at_s=at_s)


def read_own_journal(
    path: Path, *, max_tokens: int | None = JOURNAL_ALLOWED, passed_over: PassedOver | None = None
) -> Iterator[Arrival]:
    """kvota's journal, in order of arrival; what could never have generated is passed over.

    How long the answer of a request would have been that did not get it, nobody knows: it counts
    with all that its client allowed.
    """
    try:
        with open_trace(path) as file:
            everything = list(read_journal(file))
    except JournalError as error:
        raise TraceError(f"{path}: {error}") from error
    lines = [
        line
        for line in everything
        if line.outcome not in _NEVER_WORK and line.endpoint in _GENERATING
    ]
    if passed_over is not None:
        passed_over.num += len(everything) - len(lines)
    lines.sort(key=lambda line: line.at)
    for line in lines:
        yield _journal_arrival(line, line.at - lines[0].at, max_tokens)


def _journal_arrival(line: JournalLine, at_s: float, default_max: int | None) -> Arrival:
    allowed = max(line.max_tokens or default_max or JOURNAL_ALLOWED, 1)
    is_whole = line.outcome == Outcome.COMPLETED
    output = -(-line.output_tokens // line.n) if is_whole else allowed
    num_blocks = -(-line.prompt_tokens // JOURNAL_PREFIX_TOKENS)
    return Arrival(
        at_s=at_s,
        prompt_tokens=max(line.prompt_tokens, 1),
        output_tokens=min(max(output, 1), allowed),
        max_tokens=allowed,
        n=line.n,
        tenant=line.tenant,
        band=Band.BATCH if line.band == Band.BATCH.name.lower() else Band.INTERACTIVE,
        prefix=line.prefix[:num_blocks],
        prefix_block=JOURNAL_PREFIX_TOKENS,
    )


def spread(arrivals: Iterable[Arrival], bucket_s: float, rng: Random) -> Iterator[Arrival]:
    """Scatter times that were rounded down to `bucket_s` uniformly over their bucket.

    The order of requests stays, so prefix hits do too.
    """
    bucket: list[Arrival] = []
    for arrival in arrivals:
        if bucket and arrival.at_s // bucket_s != bucket[0].at_s // bucket_s:
            yield from _scattered(bucket, bucket_s, rng)
            bucket = []
        bucket.append(arrival)
    yield from _scattered(bucket, bucket_s, rng)


def _scattered(bucket: list[Arrival], bucket_s: float, rng: Random) -> Iterator[Arrival]:
    offsets = sorted(rng.uniform(0, bucket_s) for _ in bucket)
    for arrival, offset in zip(bucket, offsets, strict=True):
        yield replace(arrival, at_s=arrival.at_s // bucket_s * bucket_s + offset)


def _arrival(at_s: float, prompt: int, output: int, max_tokens: int | None) -> Arrival:
    """Raises ValueError for what is no length; none at all counts as one token."""
    if min(prompt, output) < 0:
        raise ValueError(f"a length is {min(prompt, output)}")
    output = max(output, 1)
    allowed = output if max_tokens is None else max_tokens
    return Arrival(
        at_s=at_s,
        prompt_tokens=max(prompt, 1),
        output_tokens=min(output, allowed),
        max_tokens=allowed,
    )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises TraceError where the file is no text, or damaged, or ends in the middle."""
    try:
        yield
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(f"{path} cannot be read as traffic: {reason.rstrip('.')}.") from None


def open_trace(path: Path) -> TextIO:
    """A trace file as text, unpacked if it begins as gzip does."""
    with path.open("rb") as file:
        is_packed = file.read(2) == _GZIP
    if is_packed:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")
