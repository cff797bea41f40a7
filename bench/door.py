"""What the door costs the hot path, in microseconds of one core.

    python -m bench.door [--redis URL]

Every figure is the best of `ROUNDS` rounds, because anything else on the machine only adds. The
moving window of the library `limits` runs in the same rounds, for the reason why it is not used.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter

from kvota.core.clock import SystemClock
from kvota.gateway.abuse import AbuseSettings, AbuseWatch
from kvota.gateway.auth import Door
from kvota.gateway.caller import Caller, KeyLimits
from kvota.gateway.filters.content import Filters, FilterSettings, load_filters
from kvota.gateway.limits import RateLimits
from kvota.gateway.store.database import open_database, sqlite_url
from kvota.gateway.store.keys import KEY_TABLES, KeyStore, NewKey
from kvota.gateway.store.limit_windows import MemoryLimitStore
from kvota.gateway.store.redis_limits import RedisLimitStore
from kvota.gateway.store.usage import USAGE_TABLES, UsageStore
from kvota.gateway.usage import UsageBook, UsageLine
from kvota.wire.openai import CompletionRequest

ROUNDS: Final = 7
NUM_KEYS: Final = 1000
MANY: Final = 10**9
LIMITS: Final = KeyLimits(
    requests_per_minute=MANY, tokens_per_minute=MANY, concurrent_requests=MANY
)
CALLER: Final = Caller(key_id="kv-1", tenant="t", limits=LIMITS, model_limits={"m": LIMITS})
PROMPT: Final = "How do I reset the password of the staging database? Please be brief. " * 15

Step = Callable[[], Awaitable[object]]


async def main(redis_url: str | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        steps = _steps(Path(name))
        if redis_url is not None:
            shared = RateLimits(RedisLimitStore(redis_url), SystemClock())
            steps["limits: enter and settle, 2 scopes, Redis"] = (200, lambda: _pass(shared))
        best = dict.fromkeys(steps, float("inf"))
        for _ in range(ROUNDS):
            for title, (times, step) in steps.items():
                best[title] = min(best[title], await _cost_us(times, step))
    for title, cost_us in best.items():
        print(f"{title:<48} {cost_us:8.1f} µs")


async def _cost_us(times: int, step: Step) -> float:
    started = time.perf_counter()
    for _ in range(times):
        await step()
    return (time.perf_counter() - started) / times * 1e6


def _steps(directory: Path) -> dict[str, tuple[int, Step]]:
    """What is measured: how often in a round, and one time of it."""
    database = open_database(sqlite_url(directory / "kvota.db"), KEY_TABLES, USAGE_TABLES)
    store = KeyStore(database)
    key = [store.create(NewKey(tenant="t"), 1.0)[1] for _ in range(NUM_KEYS)][-1]
    door = Door(store, may_be_open=False)
    door.refresh()
    headers = {b"host": b"h", b"authorization": b"Bearer " + key.encode()}
    watch = AbuseWatch(AbuseSettings())
    watch.failed(0.0, address="10.0.0.2")
    local = RateLimits(MemoryLimitStore(SystemClock()), SystemClock())
    book = UsageBook(directory / "usage", UsageStore(database))
    line = UsageLine(key_id=key[:15], tenant="t", model="m", day=20_000, prompt_tokens=300)
    filters = load_filters(FilterSettings(block_lists=("credentials", "chat-markup")))
    guard = filters.guard()
    moving, item = MovingWindowRateLimiter(MemoryStorage()), RateLimitItemPerMinute(MANY)
    return {
        "nothing: an empty step": (5000, _sync(lambda: None)),
        "door: admit, 1,000 keys": (5000, _sync(lambda: door.admit(headers, 2.0))),
        "abuse: check": (5000, _sync(lambda: watch.check(0.0, address="10.0.0.1", key_id="k"))),
        "limits: enter and settle, 2 scopes, memory": (2000, lambda: _pass(local)),
        "usage: add": (5000, _sync(lambda: book.add(line))),
        "filters: a prompt of 1,050 characters": (100, _sync(lambda: _search(filters))),
        "filters: a delta of 5 characters": (5000, _sync(lambda: guard.push("hello"))),
        "library limits: hit of a moving window, 500 tokens": (50, lambda: _hit(moving, item)),
    }


async def _hit(moving: MovingWindowRateLimiter, item: RateLimitItemPerMinute) -> None:
    await moving.hit(item, "k", cost=500)
    await asyncio.sleep(0)  # the task that every hit starts has its turn, as in a server


def _sync(call: Callable[[], object]) -> Step:
    async def step() -> None:
        call()

    return step


async def _pass(limits: RateLimits) -> None:
    admission = await limits.enter(CALLER, "m", 500)
    await admission.settle(300)


def _search(filters: Filters) -> None:
    filters.check_request(CompletionRequest(prompt=PROMPT))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", metavar="URL")
    asyncio.run(main(parser.parse_args().redis))
