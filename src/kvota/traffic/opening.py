"""Which format a file of traffic has, by what is in it, and its requests whatever the format.

    traffic = open_traffic(Path("requests.csv.gz"))
    traffic.format, list(traffic.arrivals)

The first line decides: a CSV's header, or the fields of the first JSON object. Names of files do
not matter.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, islice
from math import inf, isfinite
from pathlib import Path
from random import Random

from kvota.traffic.arrival import Arrival
from kvota.traffic.servegen import read_clients, servegen_arrivals
from kvota.traffic.traces import (
    MOONCAKE_BUCKET_S,
    PassedOver,
    TraceError,
    open_trace,
    read_azure,
    read_bailian,
    read_burstgpt,
    read_mooncake,
    read_own_journal,
    read_sharegpt,
    readable,
    spread,
)

DAY_S = 86_400.0
_SHOWN_CHARACTERS = 80  # of a first line that is of no known format
_LOOK_AHEAD = 256  # requests that show whether times are whole buckets
_DISORDER_S = 1.0  # by which times may go back: requests logged when they ended, clocks set
_ROUNDING_S = 0.005  # that the conversation trace's times are off them


class TraceFormat(StrEnum):
    """The value is what the format is called for people."""

    AZURE = "Azure"
    MOONCAKE = "Mooncake"
    BAILIAN = "Bailian"
    BURSTGPT = "BurstGPT"
    SERVEGEN = "ServeGen"
    SHAREGPT = "ShareGPT lengths"
    JOURNAL = "kvota journal"


# What the first line must have: the columns of a CSV, the fields of a JSON object.
_COLUMNS = {
    TraceFormat.AZURE: {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    TraceFormat.BURSTGPT: {"Timestamp", "Request tokens", "Response tokens"},
    TraceFormat.SHAREGPT: {"num_prefill_tokens", "num_decode_tokens"},
}
_FIELDS = {
    TraceFormat.JOURNAL: {"v", "at", "outcome"},
    TraceFormat.BAILIAN: {"chat_id", "parent_chat_id", "timestamp", "hash_ids"},
    TraceFormat.MOONCAKE: {"timestamp", "input_length", "output_length", "hash_ids"},
    TraceFormat.SERVEGEN: {"windows", "dataset"},
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of one file, by time. `arrivals` is read as it is walked, once."""

    path: Path
    format: TraceFormat
    arrivals: Iterator[Arrival]
    passed_over: PassedOver = field(default_factory=PassedOver)  # complete once all are read

    @property
    def has_times(self) -> bool:
        """Its times are recorded ones, and not made up."""
        return self.format not in (TraceFormat.SHAREGPT, TraceFormat.SERVEGEN)


def open_traffic(
    path: Path,
    *,
    max_tokens: int | None = None,
    seed: int = 1,
    poisson_rps: float = 5.0,
    from_s: float = 0.0,
    until_s: float = DAY_S,
    spreads: bool = True,
) -> Traffic:
    """The requests of a file of any known format. Raises TraceError, now or while it is read.

    `max_tokens` is what clients allow (None: what each answer had). `seed` decides what a file
    leaves to chance: lengths of ServeGen's clients, between `from_s` and `until_s` after midnight;
    ShareGPT's times, at `poisson_rps`; and with `spreads` the moments within the buckets to which
    a Mooncake trace has rounded its times down.
    """
    found = format_of(path)
    rng = Random(f"trace {seed}")
    passed_over = PassedOver()
    arrivals: Iterator[Arrival]
    match found:
        case TraceFormat.AZURE:
            arrivals = read_azure(path, max_tokens=max_tokens)
        case TraceFormat.MOONCAKE:
            arrivals = read_mooncake(path, max_tokens=max_tokens)
            arrivals = _spread_if_rounded(arrivals, rng) if spreads else arrivals
        case TraceFormat.BAILIAN:
            arrivals = read_bailian(path, max_tokens=max_tokens)
        case TraceFormat.BURSTGPT:
            arrivals = read_burstgpt(path, max_tokens=max_tokens, passed_over=passed_over)
        case TraceFormat.SHAREGPT:
            arrivals = read_sharegpt(path, rate_rps=poisson_rps, rng=rng, max_tokens=max_tokens)
        case TraceFormat.JOURNAL:
            arrivals = read_own_journal(path, max_tokens=max_tokens, passed_over=passed_over)
        case TraceFormat.SERVEGEN:
            clients = read_clients(path)
            arrivals = iter(
                servegen_arrivals(
                    clients, rng, start_s=from_s, end_s=until_s, max_tokens=max_tokens
                )
            )
    return Traffic(path, found, _in_order(path, arrivals), passed_over)


def _in_order(path: Path, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
    """Times that never go back; by a little they may, and then are taken as the same.

    Raises TraceError for more, and for a file that ends in the middle.
    """
    before_s = -inf
    with readable(path):
        for num, one in enumerate(arrivals, start=1):
            if not (isfinite(one.at_s) and one.at_s >= before_s - _DISORDER_S):
                raise TraceError(
                    f"{path}: its request {num} is at {one.at_s:g} s, and the one before it at "
                    f"{before_s:g} s. Sort the file by time."
                )
            before_s = max(before_s, one.at_s)
            yield one if one.at_s == before_s else replace(one, at_s=before_s)


def format_of(path: Path) -> TraceFormat:
    """Raises TraceError, saying what the file begins with, when it is of no known format."""
    first = _first_line(path)
    columns = {name.strip() for name in first.split(",")}
    for known, needed in _COLUMNS.items():
        if needed <= columns:
            return known
    fields = _fields_of(first)
    for known, needed in _FIELDS.items():
        if needed <= fields:
            return known
    raise TraceError(f"{path}: {_what_it_is(first, fields)}; {_KNOWN}.")


_KNOWN = (
    "not a journal of kvota, nor an Azure, Mooncake, ServeGen, Bailian, BurstGPT or ShareGPT trace"
)


def _what_it_is(first: str, fields: set[str]) -> str:
    if not first.strip():
        return "it is empty"
    if fields:
        return f"its first line is JSON with the fields {', '.join(sorted(fields))}"
    shown = first.strip()[:_SHOWN_CHARACTERS]
    return f"its first line is {shown!r}"


def _first_line(path: Path) -> str:
    with readable(path), open_trace(path) as file:
        return file.readline()


def _fields_of(line: str) -> set[str]:
    try:
        row = json.loads(line)
    except ValueError:
        return set()
    return set(row) if isinstance(row, dict) else set()


def _spread_if_rounded(arrivals: Iterator[Arrival], rng: Random) -> Iterator[Arrival]:
    """Times that all are whole buckets were rounded; others are left as they are."""
    ahead = list(islice(arrivals, _LOOK_AHEAD))
    everything = chain(ahead, arrivals)
    if len(ahead) > 1 and all(abs(one.at_s - _bucket(one)) <= _ROUNDING_S for one in ahead):
        whole = (replace(one, at_s=_bucket(one)) for one in everything)
        return spread(whole, MOONCAKE_BUCKET_S, rng)
    return everything


def _bucket(arrival: Arrival) -> float:
    return round(arrival.at_s / MOONCAKE_BUCKET_S) * MOONCAKE_BUCKET_S
