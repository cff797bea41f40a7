"""What a key may take per minute and at once: reserved at arrival, corrected at the end.

    admission = await limits.enter(caller, model, estimated_tokens)      RateLimited: nothing taken
    try: … finally: await admission.settle(prompt + output tokens)       also streams, also aborted

Reserving the estimate before anything runs is what keeps requests that arrive together from
passing one and the same last bit of room. The store may be shared (Redis). When it cannot be
reached, this gateway enforces the limits alone, from an empty start, and tries again
`RETRY_STORE_S` later: limits are not what a service should fail on.
"""

import asyncio
import functools
import itertools
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from kvota.core.clock import Clock
from kvota.core.errors import InvalidRequest, Limit, RateLimited
from kvota.gateway.caller import Caller
from kvota.gateway.store.database import StoreUnusable
from kvota.gateway.store.limit_windows import (
    LimitStore,
    MemoryLimitStore,
    Order,
    Scope,
    Short,
    Taken,
    Used,
)

RETRY_STORE_S: Final = 5.0
RENEW_EVERY_S: Final = 10.0  # a third of a place's lease

Headers = list[tuple[bytes, bytes]]
_Left = tuple[int | None, int | None]  # a limit, and what remains of it
_UNLIMITED: Final[_Left] = (None, None)
_Correction = Callable[[int, int], Awaitable[None]]  # tokens and requests, more or fewer


class Standing(NamedTuple):
    """Where a caller stands with its limits: the tighter of its scopes. None: no such limit."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_s: float = 0.0  # until the windows are empty, if nothing more is asked

    def headers(self) -> Headers:
        """OpenAI's names for it."""
        fields: Headers = []
        reset = b"%ds" % math.ceil(self.reset_s)
        if self.limit_requests is not None:
            fields += (
                (b"x-ratelimit-limit-requests", b"%d" % self.limit_requests),
                (b"x-ratelimit-remaining-requests", b"%d" % (self.remaining_requests or 0)),
                (b"x-ratelimit-reset-requests", reset),
            )
        if self.limit_tokens is not None:
            fields += (
                (b"x-ratelimit-limit-tokens", b"%d" % self.limit_tokens),
                (b"x-ratelimit-remaining-tokens", b"%d" % (self.remaining_tokens or 0)),
                (b"x-ratelimit-reset-tokens", reset),
            )
        return fields


class KeyLimitReached(RateLimited):
    """A limit of the key is reached. `standing.headers()` belong on the answer."""

    def __init__(
        self, limit: Limit, message: str, *, retry_after_s: float, standing: Standing
    ) -> None:
        super().__init__(limit, message, retry_after_s=retry_after_s)
        self.standing = standing


class Admission:
    """A request's share of its key's limits, until it is settled or withdrawn."""

    __slots__ = ("_correct", "_estimated_tokens", "_scopes", "_used", "is_ended")

    def __init__(
        self,
        correct: "_Correction | None",
        estimated_tokens: int,
        scopes: Sequence[Scope],
        used: Sequence[Used],
    ) -> None:
        self._correct = correct
        self._estimated_tokens = estimated_tokens
        self._scopes = scopes
        self._used = used
        self.is_ended = False

    @property
    def standing(self) -> Standing:
        """As it was when the request was admitted."""
        return _standing(self._scopes, self._used)

    async def settle(self, actual_tokens: int) -> None:
        """The request has ended, having used so many tokens. Only the first call counts.

        Completes even when the caller's task is cancelled meanwhile. Raises nothing: a store out
        of reach costs the correction, and a place there ends with its lease.
        """
        await self._finish(actual_tokens - self._estimated_tokens, 0)

    async def withdraw(self) -> None:
        """As if it had never been asked: for what the service itself refused."""
        await self._finish(-self._estimated_tokens, -1)

    async def _finish(self, tokens: int, requests: int) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        if self._correct is not None:
            await self._correct(tokens, requests)


class RateLimits:
    """One per gateway. Run `keep_places` beside it, and `close` it at the end."""

    def __init__(
        self,
        store: LimitStore,
        clock: Clock,
        *,
        on_degraded: Callable[[StoreUnusable], None] = lambda _: None,
    ) -> None:
        """`on_degraded` hears every call that the store has failed."""
        self._store = store
        self._spare = MemoryLimitStore(clock)
        self._clock = clock
        self._on_degraded = on_degraded
        self._shunned_until = -math.inf
        self._place_prefix = secrets.token_hex(6)  # places of several gateways meet in one store
        self._place_numbers = itertools.count()
        self._running: dict[str, Order] = {}
        self._settling: set[asyncio.Task[None]] = set()

    @property
    def is_degraded(self) -> bool:
        """This gateway enforces the limits alone, because the store was out of reach."""
        return self._clock.now() < self._shunned_until

    async def enter(
        self, caller: Caller, model: str, estimated_tokens: int, *,
        aliases: Sequence[str] = (), field: str = "max_tokens",
    ) -> Admission:  # fmt: skip
        """Take one request, the tokens and a place, from the key and from the key on this model.

        Raises KeyLimitReached with the time when it would fit, and InvalidRequest where it never
        would, which names the `field` that a client can make less of. `model` must be a served
        name: what is counted per model is kept.
        """
        scopes = _scopes(caller, model, aliases)
        if not scopes:
            return Admission(None, estimated_tokens, (), ())
        _require_possible(scopes, estimated_tokens, field)
        order = Order(
            key_id=caller.key_id,
            scopes=scopes,
            tokens=estimated_tokens,
            place=f"{self._place_prefix}-{next(self._place_numbers)}",
        )
        store, answer = await self._take(order)
        if isinstance(answer, Short):
            raise _reached(scopes, answer)
        self._running[order.place] = order
        correct = functools.partial(self._end, store, order, answer.second)
        return Admission(correct, estimated_tokens, scopes, answer.used)

    async def keep_places(self, every_s: float = RENEW_EVERY_S) -> None:
        """Renew the leases of places in a shared store until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            if self._running and not self._store.is_local:
                try:
                    await self._store.renew(list(self._running.values()))
                except StoreUnusable as error:
                    self._degrade(error)

    async def close(self) -> None:
        """Wait for corrections under way, and let go of the store."""
        if self._settling:
            await asyncio.wait(self._settling)
        await self._store.close()

    async def _take(self, order: Order) -> tuple[LimitStore, Taken | Short]:
        if not self.is_degraded:
            if math.isfinite(self._shunned_until):
                self._shun()  # this request alone finds out whether the store is back
            try:
                answer = await self._store.take(order)
            except StoreUnusable as error:
                self._degrade(error)
            else:
                self._shunned_until = -math.inf
                return self._store, answer
        return self._spare, await self._spare.take(order)

    async def _end(
        self, store: LimitStore, order: Order, second: int, tokens: int, requests: int
    ) -> None:
        del self._running[order.place]
        if store.is_local:
            await store.settle(order, second, tokens=tokens, requests=requests)
            return
        task = asyncio.create_task(self._correct(store, order, second, tokens, requests))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        await asyncio.shield(task)

    async def _correct(
        self, store: LimitStore, order: Order, second: int, tokens: int, requests: int
    ) -> None:
        try:
            await store.settle(order, second, tokens=tokens, requests=requests)
        except StoreUnusable as error:
            self._degrade(error)

    def _degrade(self, error: StoreUnusable) -> None:
        self._shun()
        self._on_degraded(error)

    def _shun(self) -> None:
        self._shunned_until = self._clock.now() + RETRY_STORE_S


def _scopes(caller: Caller, model: str, aliases: Sequence[str]) -> list[Scope]:
    scopes = []
    if not caller.limits.is_unlimited:
        scopes.append(Scope("key", caller.limits))
    of_model = caller.limits_on(model, *aliases)
    if not of_model.is_unlimited:
        scopes.append(Scope(f"model:{model}", of_model))
    return scopes


def _require_possible(scopes: Sequence[Scope], tokens: int, field: str) -> None:
    """A request that alone is over a limit gets no time to come back: none would help."""
    for scope in scopes:
        limit = scope.limits.tokens_per_minute
        if limit is not None and tokens > limit:
            raise InvalidRequest(
                f"The request may use {tokens} tokens, all that goes in and out together, and this "
                f"key may use {limit} per minute{_where(scope)}. Ask for less with {field}.",
                param=field,
            )


def _reached(scopes: Sequence[Scope], short: Short) -> KeyLimitReached:
    scope = scopes[short.scope]
    numbers = {
        Limit.REQUESTS: (scope.limits.requests_per_minute, "requests per minute"),
        Limit.TOKENS: (scope.limits.tokens_per_minute, "tokens per minute"),
        Limit.CONCURRENCY: (scope.limits.concurrent_requests, "requests at once"),
    }
    number, of_what = numbers[short.limit]
    return KeyLimitReached(
        short.limit,
        f"This API key may have {number} {of_what}{_where(scope)}, and that is reached. "
        f"Try again in {math.ceil(short.retry_after_s)} s.",
        retry_after_s=short.retry_after_s,
        standing=_standing(scopes, short.used),
    )


def _where(scope: Scope) -> str:
    kind, _, model = scope.name.partition(":")
    return f" on {model}" if kind == "model" else ""


def _standing(scopes: Sequence[Scope], used: Sequence[Used]) -> Standing:
    requests = tokens = _UNLIMITED
    reset_s = 0.0
    for scope, one in zip(scopes, used, strict=True):
        requests = _tighter(requests, scope.limits.requests_per_minute, one.requests)
        tokens = _tighter(tokens, scope.limits.tokens_per_minute, one.tokens)
        reset_s = max(reset_s, one.reset_s)
    return Standing(*requests, *tokens, reset_s)


def _tighter(known: _Left, limit: int | None, used: int) -> _Left:
    """Limit and what remains of it, of the one with the least remaining."""
    if limit is None:
        return known
    remaining = limit - used if limit > used else 0
    is_tighter = known[1] is None or (remaining, limit) < (known[1], known[0])
    return (limit, remaining) if is_tighter else known
