"""Traffic in a format that other tools read: our journal, Mooncake's JSONL, Azure's CSV.

    format     keeps times, lengths and                   loses
    journal    tenants, bands, choices, prefixes, limits  sessions
    mooncake   prefixes                                   tenants, bands, choices, limits, sessions
    azure                                                 all but times and lengths

Prefixes are counted anew in the blocks of the format. A trace tells how long an answer was and
nothing of how it was served, so a journal made of one has 0 for all that a server measures.
"""

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import count
from typing import BinaryIO

import msgspec

from kvota.core.errors import Outcome
from kvota.telemetry.journal import VERSION, JournalLine
from kvota.traffic.arrival import MOONCAKE_BLOCK, Arrival
from kvota.traffic.prefixes import names_of
from kvota.traffic.traces import JOURNAL_PREFIX_TOKENS

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # where the first request of a converted trace is


class Target(StrEnum):
    """A format that can be written."""

    JOURNAL = "journal"
    MOONCAKE = "mooncake"
    AZURE = "azure"


def write_traffic(arrivals: Iterable[Arrival], target: Target, file: BinaryIO) -> int:
    """Write all of them, one line each, and return how many. Raises OSError."""
    return _WRITERS[target](arrivals, file)


def _write_journal(arrivals: Iterable[Arrival], file: BinaryIO) -> int:
    encoder = msgspec.json.Encoder()
    num = 0
    for num, one in enumerate(arrivals, start=1):
        file.write(encoder.encode(_journal_line(one, num)) + b"\n")
    return num


def _journal_line(one: Arrival, number: int) -> JournalLine:
    num_whole = one.prompt_tokens // JOURNAL_PREFIX_TOKENS
    return JournalLine(
        v=VERSION,
        at=round(one.at_s, 6),
        id=f"trace-{number}",
        model="trace",
        outcome=Outcome.COMPLETED,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens * one.n,
        total_s=0.0,
        tenant=one.tenant,
        band=one.band.name.lower(),
        n=one.n,
        max_tokens=one.max_tokens,
        prefix=names_of(one, JOURNAL_PREFIX_TOKENS)[:num_whole],
    )


def _write_mooncake(arrivals: Iterable[Arrival], file: BinaryIO) -> int:
    ids: dict[int, int] = {}  # by name of a block
    fresh = count()
    num = 0
    for num, one in enumerate(arrivals, start=1):  # noqa: B007
        file.write(json.dumps(_mooncake_row(one, ids, fresh)).encode() + b"\n")
    return num


def _mooncake_row(one: Arrival, ids: dict[int, int], fresh: "count[int]") -> dict[str, object]:
    """Blocks of which nothing is known get ids that nobody else has."""
    hash_ids = []
    for name in names_of(one, MOONCAKE_BLOCK):
        known = ids.get(name)
        if known is None:
            known = ids[name] = next(fresh)
        hash_ids.append(known)
    num_blocks = -(-one.prompt_tokens // MOONCAKE_BLOCK)
    hash_ids += [next(fresh) for _ in range(num_blocks - len(hash_ids))]
    milliseconds = round(one.at_s * 1000, 3)
    return {
        "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
        "input_length": one.prompt_tokens,
        "output_length": one.output_tokens,
        "hash_ids": hash_ids,
    }


def _write_azure(arrivals: Iterable[Arrival], file: BinaryIO) -> int:
    file.write(b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
    num = 0
    for num, one in enumerate(arrivals, start=1):  # noqa: B007
        moment = _EPOCH + timedelta(seconds=one.at_s)
        stamp = f"{moment:%Y-%m-%d %H:%M:%S.%f}0"  # seven decimals, as the originals have
        file.write(f"{stamp},{one.prompt_tokens},{one.output_tokens}\r\n".encode())
    return num


_WRITERS: dict[Target, Callable[[Iterable[Arrival], BinaryIO], int]] = {
    Target.JOURNAL: _write_journal,
    Target.MOONCAKE: _write_mooncake,
    Target.AZURE: _write_azure,
}
