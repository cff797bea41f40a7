"""The books of a gateway after a chaos run: whatever does not add up, in words.

Clients, journal, metrics and usage are four counts of the same requests. `settled` waits, because a
client hears its answer's end before the gateway has written it down.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp

from bench.chaos_clients import CHAT, Ledger
from bench.chaos_gateway import CONCURRENCY, GatewayProcess
from kvota.core.errors import Outcome
from kvota.telemetry.journal import JournalLine, read_journal

SETTLE_MAX_S: Final = 60.0
_PREFIX: Final = "kvota_gateway"
_GAUGES: Final = (
    "requests_open",
    "backend_requests_open",
    "backend_requests_running",
    "backend_requests_waiting",
)
_LOGGED_FAULTS: Final = (
    "Traceback",
    "internal_error",
    "usage not written",
    "never awaited",
    "Exception",
)


async def faults_after(
    gateway: GatewayProcess, session: aiohttp.ClientSession, ledger: Ledger
) -> list[str]:
    """Everything that is wrong once nothing is asked any more and all backends are well."""
    faults = list(ledger.faults)
    for name in _GAUGES:
        faults += await _zero(gateway, session, f"{_PREFIX}_{name}")
    faults += await settled(lambda: _still_active(gateway))
    faults += await settled(lambda: _journal_faults(gateway, ledger))
    faults += await settled(lambda: _count_faults(gateway, session))
    faults += await settled(lambda: _dead_models(gateway, session))
    faults += await _places_kept(gateway, session)
    return faults


async def settled(look: Callable[[], Awaitable[list[str]]]) -> list[str]:
    """What `look` still finds after a while; nothing as soon as it finds nothing."""
    end_s = time.monotonic() + SETTLE_MAX_S
    while (found := await look()) and time.monotonic() < end_s:  # noqa: ASYNC110 - over HTTP
        await asyncio.sleep(0.2)
    return found


def log_faults(gateway: GatewayProcess) -> list[str]:
    lines = gateway.log.read_text(errors="replace").splitlines()
    found = [one for one in lines if any(word in one for word in _LOGGED_FAULTS)]
    return [f"in the log: {one[:300]}" for one in found[:5]]


async def _zero(gateway: GatewayProcess, session: aiohttp.ClientSession, name: str) -> list[str]:
    async def look() -> list[str]:
        value = await gateway.metric(session, name)
        return [] if value == 0 else [f"{name} is {value:g} with nothing under way"]

    return await settled(look)


async def _still_active(gateway: GatewayProcess) -> list[str]:
    return [
        f"{one.name} still works on {one.num_active} answers that nobody waits for"
        for one in gateway.backends
        if one.num_active
    ]


async def _journal_faults(gateway: GatewayProcess, ledger: Ledger) -> list[str]:
    """Every request that was answered is there once, and those that left at most once."""
    seen = Counter(line.id for line in _journal(gateway))
    faults = [f"{one}: ended {n} times" for one, n in seen.items() if n > 1]
    missing = ledger.answered - seen.keys()
    unknown = seen.keys() - ledger.answered - ledger.left
    faults += [f"{one}: answered and not in the journal" for one in sorted(missing)]
    return faults + [f"{one}: in the journal and never asked" for one in sorted(unknown)]


def _journal(gateway: GatewayProcess) -> list[JournalLine]:
    return list(read_journal(gateway.journal.read_bytes().splitlines()))


async def _count_faults(gateway: GatewayProcess, session: aiohttp.ClientSession) -> list[str]:
    """The journal, the counter of ended requests and the usage of all keys agree."""
    outcomes = Counter(line.outcome for line in _journal(gateway))
    counted = await gateway.metric(session, f"{_PREFIX}_requests_total")
    usage = (await gateway.page(session, "/admin/usage"))["data"]
    kept = sum(row["requests"] for row in usage)
    known = outcomes.total() - outcomes[Outcome.DENIED.value]
    faults = []
    if counted != outcomes.total():
        faults.append(f"{counted:g} requests counted, {outcomes.total()} in the journal")
    if not known <= kept <= outcomes.total():  # a model denied to a known key is usage
        faults.append(f"{kept} requests in usage, {known} of known keys in the journal")
    return faults


async def _dead_models(gateway: GatewayProcess, session: aiohttp.ClientSession) -> list[str]:
    """Models that do not answer although all is well again."""
    faults = []
    for model in sorted(set(gateway.models) - {"nothing"}):
        status = await _status(gateway, session, model, gateway.keys.good)
        if status != 200:
            faults.append(f"model {model} answers {status} although all is well again")
    return faults


async def _places_kept(gateway: GatewayProcess, session: aiohttp.ClientSession) -> list[str]:
    """The key with a concurrency limit has all its places back."""
    model, key = gateway.models[0], gateway.keys.few_at_once
    asked = [_status(gateway, session, model, key) for _ in range(CONCURRENCY)]
    refused = [status for status in await asyncio.gather(*asked) if status == 429]
    return [f"{len(refused)} of {CONCURRENCY} places of a key were not given back"] * bool(refused)


async def _status(
    gateway: GatewayProcess, session: aiohttp.ClientSession, model: str, key: str
) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"authorization": f"Bearer {key}"}
    async with session.post(gateway.url + CHAT, json=body, headers=headers) as response:
        await response.read()
        return response.status
