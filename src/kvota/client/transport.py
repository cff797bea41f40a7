"""Patience as a transport of httpx2, under an SDK that knows nothing of it.

Every request of the SDK passes here. What it asks (`stream`, `max_tokens`, `model`) is read from
its JSON body; a body of another kind is sent as it is, with the timeouts of a stream. A timeout
other than `Patience.unsaid_s` is the caller's own and stays.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx2
import msgspec

from kvota.client.patience import (
    FELL_BACK,
    Ending,
    Patience,
    RetryBudget,
    is_worth_a_retry,
    wait_s,
)

# Nothing of an answer can have come: the request may be sent again whatever it was.
_BEFORE_ANSWER = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class _Asked(msgspec.Struct):
    """What of a body matters here."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Next:
    """Send again after `wait_s`, the given request."""

    wait_s: float
    request: httpx2.Request


class _Course:
    """The tries of one request: what to send first, and what after each ending."""

    def __init__(self, request: httpx2.Request, patience: Patience, fallback_model: str | None):
        self._patience = patience
        self._asked = _asked(request)
        self._fallback_model = fallback_model
        self._num_retries = 0
        self._has_fallen_back = False
        self.request = _with_timeouts(request, self._asked, patience)

    def after(
        self, ending: Ending, budget: RetryBudget, chance: Random, now_unix: float
    ) -> _Next | None:
        """What to do next; None: this ending is the caller's."""
        if not is_worth_a_retry(ending) or self._has_fallen_back:
            return None
        if self._num_retries < self._patience.num_retries:
            pause_s = wait_s(ending, self._num_retries + 1, self._patience, chance, now_unix)
            if pause_s is not None and budget.spend():
                self._num_retries += 1
                return _Next(pause_s, self.request)
        return self._fall_back(ending)

    def _fall_back(self, ending: Ending) -> _Next | None:
        model = self._fallback_model
        has_other = model is not None and self._asked is not None and self._asked.model != model
        if not has_other or (ending.status is not None and ending.status not in FELL_BACK):
            return None
        self._has_fallen_back = True
        body = msgspec.json.decode(self.request.content)
        body["model"] = model
        return _Next(0.0, _with_body(self.request, body))


class PatientTransport(httpx2.BaseTransport):
    """Wraps another transport. May be used by several threads."""

    def __init__(
        self,
        inner: httpx2.BaseTransport,
        patience: Patience,
        *,
        fallback_model: str | None = None,
        chance: Random | None = None,
        sleep: Callable[[float], None] = time.sleep,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._inner = inner
        self._patience = patience
        self._fallback_model = fallback_model
        self._budget = RetryBudget(patience)
        self._chance = chance or Random()
        self._sleep = sleep
        self._unix_time = unix_time

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        request.read()
        course = _Course(request, self._patience, self._fallback_model)
        self._budget.earn()
        send = course.request
        while True:
            response: httpx2.Response | None = None
            failure: Exception | None = None
            try:
                response = self._inner.handle_request(send)
            except _BEFORE_ANSWER as error:
                failure = error
            following = course.after(
                _ending(response), self._budget, self._chance, self._unix_time()
            )
            if following is None:
                return _given(response, failure)
            if response is not None:
                response.close()
            self._sleep(following.wait_s)
            send = following.request

    def close(self) -> None:
        self._inner.close()


class AsyncPatientTransport(httpx2.AsyncBaseTransport):
    """The same for asyncio."""

    def __init__(
        self,
        inner: httpx2.AsyncBaseTransport,
        patience: Patience,
        *,
        fallback_model: str | None = None,
        chance: Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._inner = inner
        self._patience = patience
        self._fallback_model = fallback_model
        self._budget = RetryBudget(patience)
        self._chance = chance or Random()
        self._sleep = sleep
        self._unix_time = unix_time

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await request.aread()
        course = _Course(request, self._patience, self._fallback_model)
        self._budget.earn()
        send = course.request
        while True:
            response: httpx2.Response | None = None
            failure: Exception | None = None
            try:
                response = await self._inner.handle_async_request(send)
            except _BEFORE_ANSWER as error:
                failure = error
            following = course.after(
                _ending(response), self._budget, self._chance, self._unix_time()
            )
            if following is None:
                return _given(response, failure)
            if response is not None:
                await response.aclose()
            await self._sleep(following.wait_s)
            send = following.request

    async def aclose(self) -> None:
        await self._inner.aclose()


def _ending(response: httpx2.Response | None) -> Ending:
    if response is None:
        return Ending(None, {})
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Ending(response.status_code, headers)


def _given(response: httpx2.Response | None, failure: Exception | None) -> httpx2.Response:
    if response is not None:
        return response
    assert failure is not None
    raise failure


def _asked(request: httpx2.Request) -> _Asked | None:
    try:
        return msgspec.json.decode(request.content, type=_Asked)
    except msgspec.MsgspecError:
        return None


def _with_timeouts(
    request: httpx2.Request, asked: _Asked | None, patience: Patience
) -> httpx2.Request:
    """The same request with how long its socket may be silent, where its caller did not say."""
    is_stream = asked is None or bool(asked.stream)
    most = None if asked is None else asked.max_completion_tokens or asked.max_tokens
    given: dict[str, Any] = dict(request.extensions.get("timeout") or {})
    ours = {
        "connect": patience.connect_s,
        "read": patience.read_s(is_stream=is_stream, max_tokens=most),
    }
    for name, seconds in ours.items():
        if given.get(name, patience.unsaid_s) == patience.unsaid_s:
            given[name] = seconds
    request.extensions = {**request.extensions, "timeout": given}
    return request


def _with_body(request: httpx2.Request, body: dict[str, Any]) -> httpx2.Request:
    headers = httpx2.Headers(request.headers)
    for name in ("content-length", "transfer-encoding"):
        headers.pop(name, None)
    return httpx2.Request(
        request.method,
        request.url,
        headers=headers,
        content=msgspec.json.encode(body),
        extensions=request.extensions,
    )
