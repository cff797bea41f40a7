"""The same windows and places in Redis (7 or newer), shared by several gateways.

One script call per order, so it is all or nothing between gateways too, and one round trip. Time
is Redis's own unless a clock is handed in, so gateways need not agree about it. All names of a key
share a hash tag and so a slot of a cluster:

    kvota:{kv-3f9a…}:<scope>:w    hash, r<second> and t<second> → amount; gone after the window
    kvota:{kv-3f9a…}:<scope>:p    sorted set, place → when its lease ends

A place is a lease that its gateway renews. When a gateway dies its places end by themselves, at
most `lease_s` later.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

from kvota.core.errors import ConfigError, Limit
from kvota.gateway.caller import KeyLimits
from kvota.gateway.store.database import StoreUnusable
from kvota.gateway.store.limit_windows import PLACE_RETRY_S, WINDOW_S, Order, Short, Taken, Used

LEASE_S: Final = 30
TIMEOUT_S: Final = 0.5

# Lua's numbers are doubles, and what a script returns is cut to whole numbers: times that have a
# fraction travel as text. ARGV: time or "", window, lease, place; the rest is said where read.
_COMMON: Final = """
local now = tonumber(ARGV[1])
if not now then
  local t = redis.call('TIME')
  now = t[1] + t[2] / 1000000
end
local window, lease, place = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local second = math.floor(now)
"""

# KEYS: window and places of each scope. ARGV 5: tokens; then per scope its limits on requests,
# tokens and places ("" for none). Returns 1, second | 0, kind, scope, wait; then what is used.
_TAKE: Final = (
    _COMMON
    + """
local tokens = tonumber(ARGV[5])
local used, worst, worst_kind, worst_scope = {}, -1, '', 0

local function read(key)
  local amounts = {r = {}, t = {}}
  local total, newest = {r = 0, t = 0}, -1
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local kind, at = string.sub(flat[i], 1, 1), tonumber(string.sub(flat[i], 2))
    if at + 1 + window <= now then
      redis.call('HDEL', key, flat[i])
    else
      local amount = tonumber(flat[i + 1])
      table.insert(amounts[kind], {at, amount})
      total[kind] = total[kind] + amount
      newest = math.max(newest, at)
    end
  end
  return amounts, total, newest
end

local function lacks(kind, scope, at)
  if at > worst then worst, worst_kind, worst_scope = at, kind, scope end
end

local function check(kind, name, scope, amounts, total, cost, limit)
  if not limit or total + cost <= limit then return end
  local excess = total + cost - limit
  table.sort(amounts, function(a, b) return a[1] < b[1] end)
  for _, entry in ipairs(amounts) do
    excess = excess - entry[2]
    if excess <= 0 then return lacks(name, scope, entry[1] + 1 + window) end
  end
end

for scope = 1, #KEYS / 2 do
  local windows, places = KEYS[2 * scope - 1], KEYS[2 * scope]
  local base = 3 + 3 * scope
  local amounts, total, newest = read(windows)
  check('r', 'requests', scope, amounts.r, total.r, 1, tonumber(ARGV[base]))
  check('t', 'tokens', scope, amounts.t, total.t, tokens, tonumber(ARGV[base + 1]))
  local limit = tonumber(ARGV[base + 2])
  if limit then
    redis.call('ZREMRANGEBYSCORE', places, '-inf', now)
    if redis.call('ZCARD', places) >= limit then lacks('places', scope, now + PLACE_RETRY_S) end
  end
  local reset = 0
  if newest >= 0 then reset = newest + 1 + window - now end
  table.insert(used, {total.r, total.t, tostring(reset)})
end

if worst >= 0 then
  return {0, worst_kind, worst_scope - 1, tostring(worst - now), used}
end
for scope = 1, #KEYS / 2 do
  local windows, places = KEYS[2 * scope - 1], KEYS[2 * scope]
  local base = 3 + 3 * scope
  if tonumber(ARGV[base]) then
    redis.call('HINCRBY', windows, 'r' .. second, 1)
    used[scope][1] = used[scope][1] + 1
  end
  if tonumber(ARGV[base + 1]) then
    redis.call('HINCRBY', windows, 't' .. second, tokens)
    used[scope][2] = used[scope][2] + tokens
  end
  if tonumber(ARGV[base]) or tonumber(ARGV[base + 1]) then
    redis.call('EXPIRE', windows, window + 2)
    used[scope][3] = tostring(second + 1 + window - now)
  end
  if tonumber(ARGV[base + 2]) then
    redis.call('ZADD', places, now + lease, place)
    redis.call('EXPIRE', places, math.ceil(lease) + 2)
  end
end
return {1, second, used}
""".replace("PLACE_RETRY_S", str(PLACE_RETRY_S))
)

# KEYS as above. ARGV 5: the second the order was booked in; 6 and 7: corrections of requests and
# tokens; then per scope 1 or 0: whether requests, and whether tokens, are counted there.
_SETTLE: Final = (
    _COMMON
    + """
local booked = tonumber(ARGV[5])

local function correct(key, kind, amount)
  if amount > 0 then
    redis.call('HINCRBY', key, kind .. second, amount)
    redis.call('EXPIRE', key, window + 2)
  elseif amount < 0 then
    local held = tonumber(redis.call('HGET', key, kind .. booked) or 0)
    local returned = math.min(held, -amount)
    if returned > 0 then redis.call('HINCRBY', key, kind .. booked, -returned) end
  end
end

for scope = 1, #KEYS / 2 do
  local windows = KEYS[2 * scope - 1]
  local base = 6 + 2 * scope
  redis.call('ZREM', KEYS[2 * scope], place)
  if ARGV[base] == '1' then correct(windows, 'r', tonumber(ARGV[6])) end
  if ARGV[base + 1] == '1' then correct(windows, 't', tonumber(ARGV[7])) end
end
"""
)

# KEYS: places of each scope. XX: one that has ended meanwhile is not brought back.
_RENEW: Final = (
    _COMMON
    + """
for _, places in ipairs(KEYS) do
  redis.call('ZADD', places, 'XX', now + lease, place)
  redis.call('EXPIRE', places, math.ceil(lease) + 2)
end
"""
)

_KINDS: Final = {
    b"requests": Limit.REQUESTS,
    b"tokens": Limit.TOKENS,
    b"places": Limit.CONCURRENCY,
}


class RedisLimitStore:
    """For gateways that share their limits. Raises StoreUnusable when Redis does not answer."""

    is_local = False

    def __init__(
        self,
        url: str,
        *,
        window_s: int = WINDOW_S,
        lease_s: float = LEASE_S,
        now_unix: Callable[[], float] | None = None,
    ) -> None:
        """Connects at the first call. `now_unix`: a clock in place of Redis's own. ConfigError."""
        try:
            # Imported here: an extra that most installations do without.
            import redis.asyncio
        except ModuleNotFoundError:
            raise ConfigError(
                "Shared limits need the Redis client: pip install 'kvota[redis]'."
            ) from None
        try:
            self._redis = redis.asyncio.Redis.from_url(
                url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
            )
        except ValueError as error:
            raise ConfigError(f"The URL of Redis is wrong: {error}") from None
        self._errors = (redis.RedisError, OSError)
        self._window_s, self._lease_s, self._now_unix = window_s, lease_s, now_unix
        self._take = self._redis.register_script(_TAKE)
        self._settle = self._redis.register_script(_SETTLE)
        self._renew = self._redis.register_script(_RENEW)

    async def take(self, order: Order) -> Taken | Short:
        limits = [text for scope in order.scopes for text in _limits(scope.limits)]
        with self._told_as_unusable():
            answer = await _run(
                self._take, _names(order), [*self._opening(order.place), order.tokens, *limits]
            )
        used = [_used(row) for row in answer[-1]]
        if answer[0] == 1:
            return Taken(answer[1], used)
        _, kind, scope, wait_s, _ = answer
        return Short(_KINDS[kind], scope, float(wait_s), used)

    async def settle(self, order: Order, second: int, *, tokens: int, requests: int) -> None:
        counted = [
            int(limit is not None)
            for scope in order.scopes
            for limit in (scope.limits.requests_per_minute, scope.limits.tokens_per_minute)
        ]
        with self._told_as_unusable():
            await _run(
                self._settle,
                _names(order),
                [*self._opening(order.place), second, requests, tokens, *counted],
            )

    async def renew(self, orders: Sequence[Order]) -> None:
        with self._told_as_unusable():
            for order in orders:
                places = [
                    f"{_name(order, scope.name)}:p"
                    for scope in order.scopes
                    if scope.limits.concurrent_requests is not None
                ]
                if places:
                    await _run(self._renew, places, self._opening(order.place))

    async def close(self) -> None:
        await self._redis.aclose()

    def _opening(self, place: str) -> list[Any]:
        now = "" if self._now_unix is None else self._now_unix()
        return [now, self._window_s, self._lease_s, place]

    @contextmanager
    def _told_as_unusable(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise StoreUnusable(f"Redis does not answer as it should: {error}") from error


async def _run(script: Any, names: list[str], arguments: list[Any]) -> Any:
    return await cast(Awaitable[Any], script(keys=names, args=arguments))


def _name(order: Order, scope: str) -> str:
    return f"kvota:{{{order.key_id}}}:{scope}"


def _names(order: Order) -> list[str]:
    return [f"{_name(order, scope.name)}:{part}" for scope in order.scopes for part in ("w", "p")]


def _limits(limits: KeyLimits) -> list[str | int]:
    return [
        "" if limit is None else limit
        for limit in (
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.concurrent_requests,
        )
    ]


def _used(row: Sequence[Any]) -> Used:
    return Used(requests=row[0], tokens=row[1], reset_s=max(0.0, float(row[2])))
