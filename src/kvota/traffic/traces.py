"""Public request traces as arrivals. Formats, statistics and licences: the traces' own README.

Files ending in `.gz` are read as such. `max_tokens` is in no trace, so it is the caller's: what
clients of such a service would allow. An output over it is cut to it.
"""

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import TextIO

from kvota.core.errors import Outcome
from kvota.core.request import Band
from kvota.telemetry.journal import JournalError, JournalLine, read_journal
from kvota.traffic.arrival import MOONCAKE_BLOCK, Arrival

JOURNAL_PREFIX_TOKENS = 256  # under one prefix number: its 1,024 bytes at four bytes a token
_NEVER_WORK = frozenset({Outcome.INVALID, Outcome.DENIED})
MOONCAKE_BUCKET_S = 3.0  # the conversation trace's times are whole multiples of this


class TraceError(ValueError):
    """A line of a trace is not what its format says. The message names file and line."""


def read_azure(path: Path, *, max_tokens: int = 1024) -> Iterator[Arrival]:
    """Azure LLM inference trace 2023: TIMESTAMP, ContextTokens, GeneratedTokens."""
    with open_trace(path) as file:
        first: datetime | None = None
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                moment = datetime.fromisoformat(row["TIMESTAMP"])
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: not a row of an Azure trace: {error}") from None
            first = first or moment
            at_s = (moment - first).total_seconds()
            yield _arrival(at_s, prompt, output, max_tokens)


def read_mooncake(path: Path, *, max_tokens: int = 2048) -> Iterator[Arrival]:
    """Mooncake JSONL: `hash_ids` become prefixes that requests really share."""
    with open_trace(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                yield replace(
                    _arrival(
                        row["timestamp"] / 1000, row["input_length"], row["output_length"],
                        max_tokens,
                    ),
                    prefix=tuple(row["hash_ids"]),
                    prefix_block=MOONCAKE_BLOCK,
                )  # fmt: skip
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: not a Mooncake request: {error}") from None


def read_sharegpt(
    path: Path, *, rate_rps: float, rng: Random, max_tokens: int = 1024
) -> Iterator[Arrival]:
    """ShareGPT length pairs, in file order, at the times of a Poisson process."""
    at_s = 0.0
    with open_trace(path) as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                prompt, output = int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: not a row of lengths: {error}") from None
            at_s += rng.expovariate(rate_rps)
            yield _arrival(at_s, prompt, output, max_tokens)


def read_own_journal(path: Path, *, max_tokens: int = 1024) -> Iterator[Arrival]:
    """kvota's journal, in order of arrival; what could never have been work is passed over.

    How long the answer of a request would have been that did not get it, nobody knows: it counts
    with all that its client allowed.
    """
    try:
        with open_trace(path) as file:
            lines = [line for line in read_journal(file) if line.outcome not in _NEVER_WORK]
    except JournalError as error:
        raise TraceError(f"{path}: {error}") from error
    lines.sort(key=lambda line: line.at)
    for line in lines:
        yield _journal_arrival(line, line.at - lines[0].at, max_tokens)


def _journal_arrival(line: JournalLine, at_s: float, default_max: int) -> Arrival:
    allowed = max(line.max_tokens or default_max, 1)
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


def _arrival(at_s: float, prompt: int, output: int, max_tokens: int) -> Arrival:
    return Arrival(
        at_s=at_s,
        prompt_tokens=max(prompt, 1),
        output_tokens=min(max(output, 1), max_tokens),
        max_tokens=max_tokens,
    )


def open_trace(path: Path) -> TextIO:
    """A trace file as text, unpacked if its name ends in `.gz`."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")
