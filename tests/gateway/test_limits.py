"""Limits through their public face, in memory and in a real Redis, under a clock of our own."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest
import redis.asyncio

from kvota.core.clock import ManualClock
from kvota.core.errors import InvalidRequest, KvotaError, Limit
from kvota.gateway.caller import Caller, KeyLimits
from kvota.gateway.limits import Admission, KeyLimitReached, RateLimits, Standing
from kvota.gateway.store.database import StoreUnusable
from kvota.gateway.store.limit_windows import (
    LimitStore,
    MemoryLimitStore,
    Order,
    Scope,
    Short,
    Taken,
)
from kvota.gateway.store.redis_limits import RedisLimitStore

START = 1_000_000.0
LEASE_S = 30


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture(params=["memory", "redis"])
def new_store(request: pytest.FixtureRequest, clock: ManualClock) -> Callable[[], LimitStore]:
    """Makes a store; in Redis, all of them are one."""
    if request.param == "memory":
        return lambda: MemoryLimitStore(clock)
    url: Any = request.getfixturevalue("redis_url")
    return lambda: RedisLimitStore(url, now_unix=clock.now, lease_s=LEASE_S)


@pytest.fixture
async def limits(
    new_store: Callable[[], LimitStore], clock: ManualClock
) -> AsyncIterator[RateLimits]:
    limits = RateLimits(new_store(), clock, on_degraded=_must_not_be)
    yield limits
    await limits.close()


def caller(
    limits: KeyLimits | None = None, model_limits: Mapping[str, KeyLimits] | None = None
) -> Caller:
    return Caller(
        key_id="kv-1",
        tenant="t",
        limits=limits or KeyLimits(),
        model_limits=model_limits or {},
    )


async def refused(limits: RateLimits, who: Caller, tokens: int = 1, model: str = "m") -> Any:
    with pytest.raises(KeyLimitReached) as reached:
        await limits.enter(who, model, tokens)
    return reached.value


async def test_a_key_without_limits_may_do_anything(limits: RateLimits) -> None:
    for _ in range(50):
        admission = await limits.enter(caller(), "m", 10**9)
        assert admission.standing.headers() == []
        await admission.settle(5)


async def test_requests_per_minute_are_counted_and_free_when_it_was_said(
    limits: RateLimits, clock: ManualClock
) -> None:
    who = caller(KeyLimits(requests_per_minute=3))
    for _ in range(3):
        await (await limits.enter(who, "m", 0)).settle(0)
        clock.advance(10.25)
    error = await refused(limits, who)
    assert error.limit is Limit.REQUESTS
    assert error.retry_after_s == pytest.approx(61 - 30.75)
    clock.advance(error.retry_after_s - 0.01)
    await refused(limits, who)
    clock.advance(0.01)
    await limits.enter(who, "m", 0)
    await refused(limits, who)


async def test_tokens_of_prompt_and_output_are_counted_whatever_the_estimate(
    limits: RateLimits,
) -> None:
    who = caller(KeyLimits(tokens_per_minute=1000))
    for _ in range(2):
        admission = await limits.enter(who, "m", 300 + 200)
        await admission.settle(300 + 200)
    assert admission.standing.remaining_tokens == 0
    error = await refused(limits, who, tokens=1)
    assert error.limit is Limit.TOKENS
    assert error.standing.headers() == [
        (b"x-ratelimit-limit-tokens", b"1000"),
        (b"x-ratelimit-remaining-tokens", b"0"),
        (b"x-ratelimit-reset-tokens", b"61s"),
    ]


async def test_what_was_not_used_is_given_back(limits: RateLimits) -> None:
    who = caller(KeyLimits(tokens_per_minute=1000))
    first = await limits.enter(who, "m", 1000)
    await refused(limits, who, tokens=1)
    await first.settle(400)
    await refused(limits, who, tokens=601)
    await limits.enter(who, "m", 600)


async def test_what_was_used_beyond_the_estimate_counts_from_now(
    limits: RateLimits, clock: ManualClock
) -> None:
    who = caller(KeyLimits(tokens_per_minute=1000))
    first = await limits.enter(who, "m", 100)
    clock.advance(50)
    await first.settle(900)
    error = await refused(limits, who, tokens=800)
    assert error.retry_after_s == pytest.approx(61)
    clock.advance(11)  # the estimate has left the window, the rest has not
    await limits.enter(who, "m", 200)
    await refused(limits, who, tokens=1)


async def test_a_correction_of_a_minute_ago_gives_nothing_twice(
    limits: RateLimits, clock: ManualClock
) -> None:
    who = caller(KeyLimits(tokens_per_minute=1000))
    long_running = await limits.enter(who, "m", 1000)
    clock.advance(61)
    await limits.enter(who, "m", 1000)
    await long_running.settle(10)
    await refused(limits, who, tokens=1)


async def test_settling_twice_counts_once(limits: RateLimits) -> None:
    who = caller(KeyLimits(tokens_per_minute=100, concurrent_requests=1))
    first = await limits.enter(who, "m", 100)
    await first.settle(50)
    await first.settle(0)
    await first.withdraw()
    assert first.is_ended
    await refused(limits, who, tokens=51)
    await limits.enter(who, "m", 50)


async def test_a_withdrawn_request_was_never_asked(limits: RateLimits) -> None:
    who = caller(KeyLimits(requests_per_minute=1, tokens_per_minute=10, concurrent_requests=1))
    for _ in range(3):
        await (await limits.enter(who, "m", 10)).withdraw()
    await limits.enter(who, "m", 10)


async def test_only_so_many_run_at_once(limits: RateLimits) -> None:
    who = caller(KeyLimits(concurrent_requests=2))
    running = [await limits.enter(who, "m", 5) for _ in range(2)]
    error = await refused(limits, who)
    assert (error.limit, error.retry_after_s) == (Limit.CONCURRENCY, pytest.approx(1.0))
    await running[0].settle(5)
    await limits.enter(who, "m", 5)
    await refused(limits, who)


async def test_a_model_has_limits_of_its_own_inside_those_of_the_key(limits: RateLimits) -> None:
    who = caller(KeyLimits(requests_per_minute=3), {"big": KeyLimits(requests_per_minute=1)})
    await limits.enter(who, "big", 1)
    error = await refused(limits, who, model="big")
    assert "on big" in error.message
    assert error.standing.remaining_requests == 0
    await limits.enter(who, "small", 1)
    await limits.enter(who, "small", 1)
    error = await refused(limits, who, model="small")
    assert "on small" not in error.message


async def test_a_refused_request_takes_nothing_from_any_limit(limits: RateLimits) -> None:
    who = caller(
        KeyLimits(requests_per_minute=2, tokens_per_minute=100, concurrent_requests=5),
        {"m": KeyLimits(tokens_per_minute=50)},
    )
    for _ in range(5):
        with pytest.raises(InvalidRequest):
            await limits.enter(who, "m", 51)
    await limits.enter(who, "m", 50)
    for _ in range(5):
        await refused(limits, who, tokens=1)
    admission = await limits.enter(who, "other", 50)
    assert admission.standing.remaining_requests == 0


async def test_of_several_missing_limits_the_one_that_frees_last_is_told(
    limits: RateLimits, clock: ManualClock
) -> None:
    who = caller(KeyLimits(requests_per_minute=2, tokens_per_minute=100))
    await limits.enter(who, "m", 10)
    clock.advance(20)
    await limits.enter(who, "m", 80)
    error = await refused(limits, who, tokens=30)
    assert error.limit is Limit.TOKENS
    assert error.retry_after_s == pytest.approx(61)
    clock.advance(error.retry_after_s)
    await limits.enter(who, "m", 30)


async def test_what_can_never_fit_is_not_told_to_come_back(limits: RateLimits) -> None:
    who = caller(KeyLimits(tokens_per_minute=100))
    with pytest.raises(InvalidRequest, match="100 per minute") as impossible:
        await limits.enter(who, "m", 101)
    assert impossible.value.param == "max_tokens"


async def test_keys_do_not_share_limits(limits: RateLimits) -> None:
    one = KeyLimits(requests_per_minute=1)
    for key_id in ("kv-1", "kv-2", "kv-3"):
        await limits.enter(Caller(key_id=key_id, tenant="t", limits=one), "m", 1)
    await refused(limits, caller(one))


async def test_of_many_at_the_same_instant_only_those_that_fit_come_in(
    new_store: Callable[[], LimitStore], clock: ManualClock
) -> None:
    """Two gateways, a budget for one request, twenty of them; then the one that ran fails."""
    shared = new_store()
    stores = [shared, shared if shared.is_local else new_store()]
    gateways = [RateLimits(store, clock, on_degraded=_must_not_be) for store in stores]
    who = caller(KeyLimits(tokens_per_minute=500))
    asked = [gateways[number % 2].enter(who, "m", 500) for number in range(20)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    admitted = [answer for answer in answers if isinstance(answer, Admission)]
    assert len(admitted) == 1
    assert sum(isinstance(answer, KeyLimitReached) for answer in answers) == 19
    await admitted[0].settle(0)
    again = await asyncio.gather(
        *(gateways[number % 2].enter(who, "m", 500) for number in range(20)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, Admission) for answer in again) == 1
    for gateway in gateways:
        await gateway.close()


async def test_a_cancelled_request_still_gives_back(limits: RateLimits) -> None:
    who = caller(KeyLimits(tokens_per_minute=100, concurrent_requests=1))
    is_in = asyncio.Event()

    async def serve() -> None:
        admission = await limits.enter(who, "m", 100)
        try:
            is_in.set()
            await asyncio.Event().wait()
        finally:
            await admission.settle(30)

    task = asyncio.create_task(serve())
    await is_in.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await limits.enter(who, "m", 70)


async def test_redis_and_memory_agree_about_everything(redis_url: str, clock: ManualClock) -> None:
    """The same random requests in both; also where Redis keeps a hash in no order at all."""
    await _set_redis(redis_url, "hash-max-listpack-entries", 0)
    chance = random.Random(11)
    stores: list[LimitStore] = [
        MemoryLimitStore(clock),
        RedisLimitStore(redis_url, now_unix=clock.now, lease_s=10_000),  # memory has no leases
    ]
    scopes = (
        Scope("key", KeyLimits(requests_per_minute=40, tokens_per_minute=2000)),
        Scope("model:m", KeyLimits(tokens_per_minute=1500, concurrent_requests=6)),
    )
    running: list[tuple[Order, int]] = []
    for number in range(400):
        clock.advance(chance.choice([0.0, 0.25, 1.5, 4.0]))
        if running and chance.random() < 0.45:
            order, second = running.pop(chance.randrange(len(running)))
            change = chance.randint(-order.tokens, 20)
            for store in stores:
                await store.settle(order, second, tokens=change, requests=-(number % 3 == 0))
            continue
        tokens = chance.randint(0, 300)
        order = Order(key_id="k", scopes=scopes, tokens=tokens, place=f"p{number}")
        ours, theirs = [await store.take(order) for store in stores]
        _require_same(ours, theirs)
        if isinstance(ours, Taken):
            running.append((order, ours.second))
    for store in stores:
        await store.close()


async def test_a_correction_goes_through_when_the_waiting_task_is_cancelled(
    redis_url: str, clock: ManualClock
) -> None:
    store = RedisLimitStore(redis_url, now_unix=clock.now)
    limits = RateLimits(store, clock, on_degraded=_must_not_be)
    who = caller(KeyLimits(concurrent_requests=1))
    admission = await limits.enter(who, "m", 1)
    settling = asyncio.create_task(admission.settle(1))
    await asyncio.sleep(0)
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    await limits.close()  # waits for it
    after = RateLimits(RedisLimitStore(redis_url, now_unix=clock.now), clock)
    await after.enter(who, "m", 1)
    await after.close()


async def test_places_of_a_gateway_that_died_are_free_after_their_lease(
    redis_url: str, clock: ManualClock
) -> None:
    dead, alive = (
        RateLimits(RedisLimitStore(redis_url, now_unix=clock.now, lease_s=LEASE_S), clock)
        for _ in range(2)
    )
    who = caller(KeyLimits(concurrent_requests=1))
    await dead.enter(who, "m", 1)
    clock.advance(LEASE_S - 1)
    await refused(alive, who)
    clock.advance(1)
    await alive.enter(who, "m", 1)
    for gateway in (dead, alive):
        await gateway.close()


async def test_places_of_a_long_request_are_kept_by_renewing(
    redis_url: str, clock: ManualClock
) -> None:
    store = RedisLimitStore(redis_url, now_unix=clock.now, lease_s=LEASE_S)
    limits = RateLimits(store, clock, on_degraded=_must_not_be)
    who = caller(KeyLimits(concurrent_requests=1))
    admission = await limits.enter(who, "m", 1)
    clock.advance(LEASE_S - 1)
    renewed = asyncio.Event()
    renew = store.renew

    async def watched(orders: Sequence[Order]) -> None:
        await renew(orders)
        renewed.set()

    store.renew = watched  # type: ignore[method-assign]
    keeping = asyncio.create_task(limits.keep_places(every_s=0.001))
    await renewed.wait()
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    clock.advance(LEASE_S - 1)
    await refused(limits, who)
    await admission.settle(1)
    await limits.enter(who, "m", 1)
    await limits.close()


async def test_renewing_brings_no_place_back_that_has_ended_meanwhile(
    redis_url: str, clock: ManualClock
) -> None:
    """It held its key's place for half a minute, with nothing running."""
    store = RedisLimitStore(redis_url, now_unix=clock.now, lease_s=LEASE_S)
    limits = RateLimits(store, clock, on_degraded=_must_not_be)
    who = caller(KeyLimits(concurrent_requests=1))
    admission = await limits.enter(who, "m", 1)
    orders = list(limits._running.values())
    await admission.settle(1)
    await store.renew(orders)
    await limits.enter(who, "m", 1)
    await limits.close()


async def test_redis_keeps_time_itself_and_forgets_by_itself(redis_url: str) -> None:
    limits = RateLimits(
        RedisLimitStore(redis_url, window_s=2), ManualClock(), on_degraded=_must_not_be
    )
    who = caller(KeyLimits(requests_per_minute=1))
    await limits.enter(who, "m", 1)
    error = await refused(limits, who)
    assert 0 < error.retry_after_s <= 3
    async with asyncio.timeout(60):
        while not await _is_admitted(limits, who):  # noqa: ASYNC110 - Redis's clock decides
            await asyncio.sleep(0.05)
    await limits.close()


async def test_without_its_store_a_gateway_enforces_limits_alone_and_comes_back() -> None:
    clock, failures = ManualClock(START), list[KvotaError]()
    store = UnreliableStore(clock)
    limits = RateLimits(store, clock, on_degraded=failures.append)
    who = caller(KeyLimits(requests_per_minute=1, concurrent_requests=5))
    before = await limits.enter(who, "m", 1)
    store.is_down = True
    await limits.enter(who, "m", 1)  # counted from an empty start
    assert limits.is_degraded
    await refused(limits, who)
    assert len(failures) == 1  # the store is left alone for a while
    await before.settle(1)  # raises nothing
    assert len(failures) == 2
    store.is_down = False
    clock.advance(5)
    assert not limits.is_degraded
    await refused(limits, who)
    await limits.close()


async def test_one_request_alone_finds_out_whether_the_store_is_back() -> None:
    clock = ManualClock(START)
    store = UnreliableStore(clock)
    limits = RateLimits(store, clock)
    who = caller(KeyLimits(requests_per_minute=100))
    store.is_down = True
    await limits.enter(who, "m", 1)
    clock.advance(5)
    store.num_asked = 0
    await asyncio.gather(*(limits.enter(who, "m", 1) for _ in range(10)))
    assert store.num_asked == 1
    store.is_down = False
    clock.advance(5)
    await limits.enter(who, "m", 1)
    await asyncio.gather(*(limits.enter(who, "m", 1) for _ in range(10)))
    assert store.num_asked == 12


async def test_a_redis_that_is_not_there_is_told_as_a_failure_of_the_store() -> None:
    store = RedisLimitStore("unix:///nowhere/redis.sock")
    order = Order(key_id="k", scopes=(), tokens=1, place="p")
    with pytest.raises(StoreUnusable, match="Redis does not answer"):
        await store.take(order)
    await store.close()


def test_headers_say_only_what_is_limited() -> None:
    assert Standing().headers() == []
    names = [name for name, _ in Standing(limit_requests=5, remaining_requests=2).headers()]
    assert names == [
        b"x-ratelimit-limit-requests",
        b"x-ratelimit-remaining-requests",
        b"x-ratelimit-reset-requests",
    ]


class UnreliableStore(MemoryLimitStore):
    is_local = False
    is_down = False
    num_asked = 0

    async def take(self, order: Order) -> Taken | Short:
        self._require_up()
        return await super().take(order)

    async def settle(self, order: Order, second: int, *, tokens: int, requests: int) -> None:
        self._require_up()
        await super().settle(order, second, tokens=tokens, requests=requests)

    def _require_up(self) -> None:
        self.num_asked += 1
        if self.is_down:
            raise StoreUnusable("down")


def _require_same(ours: Taken | Short, theirs: Taken | Short) -> None:
    """Times may differ in their last digits, for they have travelled as text."""
    assert type(ours) is type(theirs)
    for mine, other in zip(ours.used, theirs.used, strict=True):
        assert (mine.requests, mine.tokens) == (other.requests, other.tokens)
    if isinstance(ours, Short) and isinstance(theirs, Short):
        assert (ours.limit, ours.scope) == (theirs.limit, theirs.scope)
        assert ours.retry_after_s == pytest.approx(theirs.retry_after_s, abs=1e-3)
    else:
        assert ours[0] == theirs[0]


async def _set_redis(url: str, name: str, value: int) -> None:
    client = redis.asyncio.Redis.from_url(url)
    await client.config_set(name, value)
    await client.aclose()


async def _is_admitted(limits: RateLimits, who: Caller) -> bool:
    try:
        await limits.enter(who, "m", 1)
    except KeyLimitReached:
        return False
    return True


def _must_not_be(error: StoreUnusable) -> None:
    raise AssertionError(error.message)
