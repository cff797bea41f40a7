"""Chaos: a gateway under load while everything around it breaks.

    python -m bench.chaos [--minutes 3] [--seed 7] [--clients 24]

Backends are killed, fall ill, stall, reset, and answer with garbage; the own node is killed and
hung; clients leave; the settings are reloaded, a third of the times with a broken file. Then all is
quiet, and the books must balance: every request has ended exactly once, gauges and the ledgers of
desks and limits are at zero, nothing hangs, no 5xx but 502, 503 and 504, and SIGTERM ends it well.

Exits with 1 when anything is wrong, and says what. What happens is drawn from the seed; how it
interleaves is the machine's.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import aiohttp
import psutil

from bench.chaos_backends import ChaoticBackend, Monkey, serving
from bench.chaos_checks import faults_after, log_faults
from bench.chaos_clients import CHAT, Ledger, Menu, Worker
from bench.chaos_gateway import GatewayProcess

FAULTS_SHOWN_MAX: Final = 20
FRONTING_BACKENDS: Final = ("a", "b", "c")
SERVING_BACKENDS: Final = ("spare-1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of one arena."""

    name: str
    ledger: Ledger
    num_kills: int
    num_node_troubles: int
    num_reloads: int
    longest_s: float  # the whole run, to the exit of the process
    resident_bytes: int
    faults: list[str]

    def lines(self) -> list[str]:
        endings = self.ledger.endings
        text = ", ".join(f"{n} {kind}" for kind, n in sorted(endings.items()))
        return [
            f"{self.name}: {self.ledger.num_requests:,} requests in {self.longest_s:.0f} s; {text}",
            f"    {self.num_kills} backend kills, {self.num_node_troubles} node kills and hangs, "
            f"{self.num_reloads} reloads; {self.resident_bytes / 2**20:.0f} MiB at the end",
            *(f"    WRONG  {one}" for one in self.faults[:FAULTS_SHOWN_MAX]),
            f"    {len(self.faults)} faults",
        ]


async def run_arena(name: str, seed: int, load_s: float, num_clients: int) -> Report:
    """One gateway from its start to its end."""
    began_s = time.monotonic()
    names = FRONTING_BACKENDS if name == "fronting" else SERVING_BACKENDS
    backends = [ChaoticBackend(one, Random(f"{seed} {name} {one}")) for one in names]
    ledger = Ledger()
    async with serving(backends):
        gateway = GatewayProcess(name, backends, Random(f"{seed} {name} gateway"))
        try:
            await gateway.start()
            faults, resident = await _storm(gateway, ledger, seed, load_s, num_clients)
            status = await gateway.stop()
            if status != 0:
                faults.append(f"SIGTERM: exit status {status}, not 0")
            faults += log_faults(gateway)
        finally:
            gateway.kill()
            gateway.clean()
    return Report(
        name=name,
        ledger=ledger,
        num_kills=sum(one.num_kills for one in backends),
        num_node_troubles=gateway.num_node_troubles,
        num_reloads=gateway.num_reloads,
        longest_s=time.monotonic() - began_s,
        resident_bytes=resident,
        faults=faults,
    )


async def _storm(
    gateway: GatewayProcess, ledger: Ledger, seed: int, load_s: float, num_clients: int
) -> tuple[list[str], int]:
    """Load and trouble for a while, then quiet. What is wrong then, and the process's memory."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        async with _beside(*_troubles(gateway, seed)):
            end_s = time.monotonic() + load_s
            await load(
                _menu(gateway), ledger, session, seed, num_clients,
                lambda number: time.monotonic() < end_s,
            )  # fmt: skip
        for one in gateway.backends:
            one.is_calm = True
        gateway.calm()
        faults = await faults_after(gateway, session, ledger)
    return faults, psutil.Process(gateway.pid).memory_info().rss


async def load(
    menu: Menu,
    ledger: Ledger,
    session: aiohttp.ClientSession,
    seed: int,
    num_clients: int,
    may_ask: Callable[[int], bool],
) -> None:
    """Clients that ask as long as each `may_ask`; returns when all they asked has ended."""
    async with asyncio.TaskGroup() as clients:
        for number in range(num_clients):
            name = f"c{number}"
            worker = Worker(name, menu, Random(f"{seed} {name}"), ledger)
            clients.create_task(worker.run(session, may_ask))


def _troubles(gateway: GatewayProcess, seed: int) -> list[Coroutine[Any, Any, None]]:
    monkey = Monkey(list(gateway.backends), Random(f"{seed} {gateway.name} monkey"), every_s=5.0)
    troubles = [monkey.run(), gateway.reload_now_and_then(every_s=3.0)]
    if gateway.has_node:
        troubles.append(gateway.trouble_node(every_s=8.0))
    return troubles


def _menu(gateway: GatewayProcess) -> Menu:
    menu = Menu(url=gateway.url, keys=gateway.keys.asked_with, models=gateway.models)
    if gateway.has_node:  # the light one knows no other path, and one choice
        return replace(menu, paths=(CHAT,), choices_max=1)
    return menu


@contextlib.asynccontextmanager
async def _beside(*chores: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(chore) for chore in chores]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for one in ended:
        if isinstance(one, Exception):
            raise one


async def run(seed: int, minutes: float, num_clients: int) -> list[Report]:
    """Both arenas, side by side."""
    arenas = [
        run_arena("fronting", seed, minutes * 60, num_clients),
        run_arena("serving", seed, minutes * 60, max(1, num_clients // 2)),
    ]
    return await asyncio.gather(*arenas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--clients", type=int, default=24)
    flags = parser.parse_args()
    print(f"seed {flags.seed}, {flags.minutes:g} minutes, {flags.clients} clients", flush=True)
    reports = asyncio.run(run(flags.seed, flags.minutes, flags.clients))
    for report in reports:
        print("\n".join(report.lines()))
    total = Counter({one.name: len(one.faults) for one in reports}).total()
    print("every request ended once, and the books balance" if not total else f"{total} faults")
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
