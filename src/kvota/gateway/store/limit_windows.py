"""What keys have taken of late: requests and tokens of the last minute, and places held now.

    second      │ 0     1     2        …                60    61
    taken       │ 300   .     200                       .     .
    in window   │ 300   300   500                       500   200      limit 500: a request of 300
                                                                       fits again at second 61

A moving window, because a fixed one lets twice the limit through around its edge. Amounts are kept
by the second they were taken in, and a second counts until its last moment is `window_s` old. So
no `window_s` ever holds more than the limit, memory is bounded by 61 numbers, and the moment at
which a given cost fits again is known. (The moving windows of the library `limits` keep an entry
per token and cannot give back; one hit there costs several times what a whole request in two
scopes costs here, entering and settling: `python -m bench.door`.)

Why not hits of single limits one after another: a request needs room in up to six limits at once
(requests, tokens, places; of the key, and of the key on this model). Either it takes from all or
from none, or refused requests would use up the limits of those that could run.
"""

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple, Protocol

from kvota.core.clock import Clock
from kvota.core.errors import Limit
from kvota.gateway.caller import KeyLimits

WINDOW_S: Final = 60
PLACE_RETRY_S: Final = 1.0  # nobody knows when a request ends


class Scope(NamedTuple):
    """One set of limits that a request falls under. Names are unique within their key."""

    name: str
    limits: KeyLimits


class Order(NamedTuple):
    """What a request wants, in all its scopes at once. `place` is unique to it."""

    key_id: str
    scopes: Sequence[Scope]
    tokens: int
    place: str


class Used(NamedTuple):
    """How much of one scope is in use. `reset_s`: until its whole window is free again."""

    requests: int
    tokens: int
    reset_s: float


class Taken(NamedTuple):
    """The order is booked. `second` is the bucket that it went to, on the store's clock."""

    second: int
    used: Sequence[Used]  # one per scope of the order, with the order in it


class Short(NamedTuple):
    """Nothing is booked. Everything asked for fits after `retry_after_s`, as far as is known."""

    limit: Limit  # the one that frees last
    scope: int  # index into the order's scopes
    retry_after_s: float
    used: Sequence[Used]


class LimitStore(Protocol):
    """Remembers what is taken. Calls raise StoreUnusable when it is out of reach."""

    @property
    def is_local(self) -> bool:
        """In this process: calls never wait, and never fail."""

    async def take(self, order: Order) -> Taken | Short: ...

    async def settle(self, order: Order, second: int, *, tokens: int, requests: int) -> None:
        """End an order that was taken in `second`: its place is free, its amounts are corrected.

        The corrections may be negative. What is given back goes to the second it was taken from,
        if that still counts; what is taken in addition counts from now.
        """

    async def renew(self, orders: Sequence[Order]) -> None:
        """These are still running: keep their places."""

    async def close(self) -> None: ...


class Window:
    """Amounts by the second. Times must not go backwards."""

    __slots__ = ("_by_second", "_newest", "_oldest_ends_s", "_window_s", "total")

    def __init__(self, window_s: int) -> None:
        self._window_s = window_s
        self._by_second: dict[int, int] = {}  # in the order of time
        self._newest = 0  # of these seconds
        self._oldest_ends_s = inf  # when the first of them will leave
        self.total = 0

    def advance(self, now: float) -> None:
        """Forget what is no longer in the window."""
        while now >= self._oldest_ends_s:
            self.total -= self._by_second.pop(next(iter(self._by_second)))
            oldest = next(iter(self._by_second), None)
            self._oldest_ends_s = inf if oldest is None else self._end_of(oldest)

    def add(self, second: int, amount: int) -> None:
        if not self._by_second:
            self._oldest_ends_s = self._end_of(second)
        self._by_second[second] = self._by_second.get(second, 0) + amount
        self._newest = second
        self.total += amount

    def give_back(self, second: int, amount: int) -> None:
        """Undo a part of what was added in `second`; nothing if that has left the window."""
        held = self._by_second.get(second, 0)
        returned = amount if amount < held else held
        if returned:
            self._by_second[second] = held - returned
            self.total -= returned

    def room_at(self, excess: int) -> float:
        """When `excess` of what is in the window will have left it."""
        assert self.total >= excess > 0
        for second, amount in self._by_second.items():
            excess -= amount
            if excess <= 0:
                return self._end_of(second)
        raise AssertionError("the total is more than the sum of its parts")

    def empty_at(self, now: float) -> float:
        return self._end_of(self._newest) if self._by_second else now

    def _end_of(self, second: int) -> float:
        return second + 1 + self._window_s


class _ScopeState:
    """One scope's windows and places."""

    __slots__ = ("places", "requests", "tokens")

    def __init__(self, window_s: int) -> None:
        self.requests = Window(window_s)
        self.tokens = Window(window_s)
        self.places: set[str] = set()

    def lacks(self, limits: KeyLimits, tokens: int, now: float) -> list[tuple[float, Limit]]:
        """Which limits have no room, each with the time when it will."""
        lacking: list[tuple[float, Limit]] = []
        window, limit = self.requests, limits.requests_per_minute
        if limit is not None and window.total >= limit:
            lacking.append((window.room_at(window.total + 1 - limit), Limit.REQUESTS))
        window, limit = self.tokens, limits.tokens_per_minute
        if limit is not None and window.total + tokens > limit:
            lacking.append((window.room_at(window.total + tokens - limit), Limit.TOKENS))
        places = limits.concurrent_requests
        if places is not None and len(self.places) >= places:
            lacking.append((now + PLACE_RETRY_S, Limit.CONCURRENCY))
        return lacking

    def used(self, now: float) -> Used:
        requests, tokens = self.requests, self.tokens
        empty_at = max(requests.empty_at(now), tokens.empty_at(now), now)
        return Used(requests.total, tokens.total, empty_at - now)


_States = list[tuple[Scope, _ScopeState]]  # of an order, in the order of its scopes


class MemoryLimitStore:
    """For one gateway. Its places end with the process, so none can leak.

    Grows with the number of keys and models that limits were set for, not with traffic.
    """

    is_local = True

    def __init__(self, clock: Clock, window_s: int = WINDOW_S) -> None:
        self._clock = clock
        self._window_s = window_s
        self._scopes: dict[tuple[str, str], _ScopeState] = {}

    async def take(self, order: Order) -> Taken | Short:
        now = self._clock.now()
        states = self._states(order, now)
        short = _shortage(order.tokens, states, now)
        if short is not None:
            return short
        second = int(now)
        for scope, state in states:
            if scope.limits.requests_per_minute is not None:
                state.requests.add(second, 1)
            if scope.limits.tokens_per_minute is not None:
                state.tokens.add(second, order.tokens)
            if scope.limits.concurrent_requests is not None:
                state.places.add(order.place)
        return Taken(second, [state.used(now) for _, state in states])

    async def settle(self, order: Order, second: int, *, tokens: int, requests: int) -> None:
        now = self._clock.now()
        for scope, state in self._states(order, now):
            state.places.discard(order.place)
            if scope.limits.requests_per_minute is not None:
                _correct(state.requests, second, requests, now)
            if scope.limits.tokens_per_minute is not None:
                _correct(state.tokens, second, tokens, now)

    async def renew(self, orders: Sequence[Order]) -> None:
        """Nothing to do: places here do not run out."""

    async def close(self) -> None:
        """Nothing to do."""

    def _states(self, order: Order, now: float) -> _States:
        states = []
        for scope in order.scopes:
            name = (order.key_id, scope.name)
            state = self._scopes.get(name)
            if state is None:
                state = self._scopes[name] = _ScopeState(self._window_s)
            state.requests.advance(now)
            state.tokens.advance(now)
            states.append((scope, state))
        return states


def _shortage(tokens: int, states: _States, now: float) -> Short | None:
    """Why an order of `tokens` cannot be taken, and when it could; None if it can."""
    worst: tuple[float, int, Limit] | None = None
    for index, (scope, state) in enumerate(states):
        for at, kind in state.lacks(scope.limits, tokens, now):
            if worst is None or at > worst[0]:
                worst = (at, index, kind)
    if worst is None:
        return None
    at, index, kind = worst
    return Short(kind, index, at - now, [state.used(now) for _, state in states])


def _correct(window: Window, second: int, amount: int, now: float) -> None:
    if amount < 0:
        window.give_back(second, -amount)
    elif amount > 0:
        window.add(int(now), amount)
