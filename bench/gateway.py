"""What a gateway costs, beside a bare pass-through and LiteLLM's proxy, all in one run.

    python -m bench.gateway [--seconds 1.5] [--rounds 10] [--only NAME]

Everything of ours is on: keys, limits, filters, desk, usage, journal, metrics, a log line for each
request. The same load from the same process asks the same fake backend through each proxy, one
after the other, in rounds. The table has the medians of the rounds. A ratio is the median of the
rounds' own ratios, because both sides of a round see the same machine: a shared one is fast and
slow for seconds, and of a few long rounds the best is a fast one for one proxy and a slow one for
the other. Costs are CPU seconds of the proxy's process, not time on the clock.

Exits with 1 when an aim is missed.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from bench.gateway_load import (
    LoadFailed,
    ask_together,
    chat_request,
    close,
    hold_streams,
    latencies_s,
)
from bench.gateway_proxies import (
    LITELLM,
    LITELLMS,
    OURS,
    PASS_THROUGH,
    SHORT_TOKENS,
    Proxy,
    ProxyFailed,
    fake_backend,
    kvota_gateway,
    litellm,
    pass_through,
)
from bench.machine import sentence
from tests.support.fake_backend import MODEL

NUM_CLIENTS: Final = 16
NUM_STREAMS: Final = 32
NUM_LATENCIES: Final = 200
TOKEN_S: Final = 0.005  # between two tokens of a stream, so that each comes by itself
STREAM_TOKENS: Final = 256
IDLE_STREAMS: Final = 1000
SLOW_TOKEN_S: Final = 30.0  # between two tokens of an idle stream
SHARE_MIN: Final = 0.35  # of the pass-through's, on requests and on streamed tokens
LITELLM_FACTOR_MIN: Final = 12.0
LATENCY_FACTOR_MAX: Final = 2.5
IDLE_BYTES_MAX: Final = 150 * 10**6


@dataclass(slots=True)
class Row:
    """A value per round. Rates are per CPU second of the proxy."""

    name: str
    requests: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    added_s: list[float] = field(default_factory=list)  # medians, beyond the backend itself
    resident_bytes: int = 0  # after the load
    idle_bytes: int | None = None  # with the idle streams open

    def cells(self) -> tuple[str, ...]:
        idle = "" if self.idle_bytes is None else f"{self.idle_bytes / 1e6:,.0f} MB"
        return (
            self.name,
            f"{median(self.requests):,.0f}",
            f"{median(self.tokens):,.0f}",
            f"{median(self.added_s) * 1000:.2f} ms",
            f"{self.resident_bytes / 1e6:,.0f} MB",
            idle,
        )


@dataclass(frozen=True, slots=True)
class Aim:
    """One figure and what it has to be."""

    what: str
    value: float
    bound: float
    is_least: bool  # the bound is a minimum

    @property
    def is_met(self) -> bool:
        return self.value >= self.bound if self.is_least else self.value <= self.bound

    def line(self) -> str:
        sign = "≥" if self.is_least else "≤"
        verdict = "met" if self.is_met else "MISSED"
        return f"{verdict:<7} {self.what}: {self.value:,.2f} (aim {sign} {self.bound:,.2f})"


async def measure(proxy: Proxy, direct_port: int, seconds: float, row: Row) -> None:
    """One round of load, added to the row."""
    whole = chat_request(
        proxy.port, model=MODEL, key=proxy.key, max_tokens=SHORT_TOKENS, is_stream=False
    )
    await ask_together(proxy.port, whole, NUM_CLIENTS, 0.5)  # warm
    rate = await _per_cpu_s(proxy, lambda: ask_together(proxy.port, whole, NUM_CLIENTS, seconds))
    row.requests.append(rate)
    stream = chat_request(
        proxy.port, model=MODEL, key=proxy.key, max_tokens=STREAM_TOKENS, is_stream=True
    )
    rate = await _per_cpu_s(proxy, lambda: ask_together(proxy.port, stream, NUM_STREAMS, seconds))
    row.tokens.append(STREAM_TOKENS * rate)
    direct = chat_request(
        direct_port, model=MODEL, key=None, max_tokens=SHORT_TOKENS, is_stream=False
    )
    through = await latencies_s(proxy.port, whole, NUM_LATENCIES)
    without = await latencies_s(direct_port, direct, NUM_LATENCIES)
    row.added_s.append(median(through) - median(without))
    row.resident_bytes = max(row.resident_bytes, proxy.resident_bytes())


async def _per_cpu_s(proxy: Proxy, ask: Callable[[], "asyncio.Future[int] | object"]) -> float:
    """Answers per CPU second."""
    before_s = proxy.cpu_s()
    number = await ask()  # type: ignore[misc]
    return float(number) / max(proxy.cpu_s() - before_s, 0.01)


async def idle_bytes(proxy: Proxy) -> int:
    """Memory with IDLE_STREAMS open streams, each of which has had its first piece."""
    request = chat_request(
        proxy.port, model=MODEL, key=proxy.key, max_tokens=STREAM_TOKENS, is_stream=True
    )
    streams = await hold_streams(proxy.port, request, IDLE_STREAMS)
    await asyncio.sleep(1.0)
    try:
        return proxy.resident_bytes()
    finally:
        close(streams)


Way = Callable[[int], AbstractContextManager[Proxy]]
WAYS: Final[dict[str, Way]] = {
    PASS_THROUGH: pass_through,
    OURS: kvota_gateway,
    LITELLMS: litellm,
}


def rows(ways: dict[str, Way], seconds: float, num_rounds: int) -> Iterator[Row]:
    """All proxies run at once, and are loaded in turn, in every other round the other way round."""
    with ExitStack() as closing:
        backend = closing.enter_context(fake_backend(STREAM_TOKENS, TOKEN_S))
        proxies = []
        for name, way in ways.items():
            try:
                proxies.append(closing.enter_context(way(backend)))
            except ProxyFailed as failed:
                print(f"{name}: not run. {failed}", file=sys.stderr)
        measured = {one.name: Row(one.name) for one in proxies}
        for number in range(num_rounds):
            for one in proxies if number % 2 == 0 else reversed(proxies):
                asyncio.run(measure(one, backend, seconds, measured[one.name]))
    with ExitStack() as closing:
        slow = closing.enter_context(fake_backend(STREAM_TOKENS, SLOW_TOKEN_S))
        for name in (PASS_THROUGH, OURS):
            if name in measured:
                with ways[name](slow) as proxy:
                    measured[name].idle_bytes = asyncio.run(idle_bytes(proxy))
    yield from measured.values()


def aims(found: dict[str, Row]) -> Iterator[Aim]:
    ours, bare, other = (found.get(name) for name in (OURS, PASS_THROUGH, LITELLMS))
    if ours is None:
        return
    if bare is not None:
        share, tokens = times(ours.requests, bare.requests), times(ours.tokens, bare.tokens)
        yield Aim("requests, share of the pass-through's", share, SHARE_MIN, True)
        yield Aim("streamed tokens, share of the pass-through's", tokens, SHARE_MIN, True)
        added = times(ours.added_s, bare.added_s)
        yield Aim("added median, times the pass-through's", added, LATENCY_FACTOR_MAX, False)
    if other is not None:
        share, tokens = times(ours.requests, other.requests), times(ours.tokens, other.tokens)
        yield Aim("requests, times LiteLLM's", share, LITELLM_FACTOR_MIN, True)
        yield Aim("streamed tokens, times LiteLLM's", tokens, LITELLM_FACTOR_MIN, True)
    if ours.idle_bytes is not None:
        used, most = ours.idle_bytes / 1e6, IDLE_BYTES_MAX / 1e6
        yield Aim(f"memory with {IDLE_STREAMS:,} idle streams, MB", used, most, False)


def times(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' own ratios."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))


HEAD: Final = (
    "proxy", "requests/CPU s", "streamed tokens/CPU s", "added median", "memory",
    f"with {IDLE_STREAMS:,} idle streams",
)  # fmt: skip


def table(found: Sequence[Row]) -> str:
    lines = [HEAD, *(one.cells() for one in found)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=list(WAYS), action="append")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of every `finally`
    ways = {name: way for name, way in WAYS.items() if not flags.only or name in flags.only}
    if not LITELLM.exists() and ways.pop(LITELLMS, None) is not None:
        print(f"{LITELLMS}: not run; it is not installed in .venv-litellm (make bench-gateway)")
    began_s = time.monotonic()
    print(sentence(), flush=True)
    try:
        found = list(rows(ways, flags.seconds, flags.rounds))
    except LoadFailed as failed:
        sys.exit(f"a proxy answered otherwise: {failed}")
    print(table(found))
    judged = list(aims({one.name: one for one in found}))
    print("\n".join(one.line() for one in judged))
    print(f"{time.monotonic() - began_s:.0f} s; medians of {flags.rounds} rounds")
    sys.exit(0 if all(one.is_met for one in judged) else 1)


if __name__ == "__main__":
    main()
