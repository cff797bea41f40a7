"""The one place where errors become HTTP: status, OpenAI's error body, and when to come back."""

import math
from random import Random
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvota.core.errors import (
    Forbidden,
    KvotaError,
    MethodNotAllowed,
    NotFound,
    Outcome,
    RateLimited,
    Refusal,
    Refused,
    RequestCancelled,
    RequestError,
    RequestTimeout,
    Unauthorized,
)
from kvota.wire.responses import ErrorBody, ErrorResponse

RETRY_AFTER_MAX_S: Final = 120  # clients give up instead of waiting longer
RETRY_JITTER: Final = 0.2  # so that those refused together do not come back together

RawHeaders = list[tuple[bytes, bytes]]


def error_response(error: KvotaError) -> ErrorResponse:
    """OpenAI's error body; all four fields are always present."""
    param = error.param if isinstance(error, RequestError) else None
    return ErrorResponse(
        ErrorBody(message=error.message, type=error.kind, param=param, code=error_code(error))
    )


def error_code(error: KvotaError) -> str:
    if isinstance(error, Refused):
        return error.reason.value
    if isinstance(error, RateLimited):
        return error.limit.value
    return error.problem.value if isinstance(error, Unauthorized) else error.code


def error_headers(error: KvotaError, chance: Random) -> RawHeaders:
    """What tells a client whether and when to try again."""
    headers: RawHeaders = [(b"content-type", b"application/json")]
    if isinstance(error, RequestError | RequestCancelled):
        headers.append((b"x-should-retry", b"false"))
    elif error.retryable:
        headers.append((b"x-should-retry", b"true"))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, RateLimited):
        # Exact: the window frees at that moment, and only for this caller.
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if isinstance(error, Refused):
        headers.append((b"retry-after", b"%d" % retry_after_s(error.retry_after_s, chance)))
        if error.reason is Refusal.DRAINING:
            headers.append((b"connection", b"close"))
    return headers


def retry_after_s(estimate_s: float, chance: Random) -> int:
    """Whole seconds, 1 to 120, spread by ±20 % around the estimate."""
    spread = estimate_s * chance.uniform(1 - RETRY_JITTER, 1 + RETRY_JITTER)
    return min(RETRY_AFTER_MAX_S, max(1, math.ceil(spread)))


def outcome_of(error: KvotaError) -> Outcome:
    """How a request ended that failed before or without the engine saying so."""
    if isinstance(error, Unauthorized | Forbidden):
        return Outcome.DENIED
    if isinstance(error, RequestError):
        return Outcome.INVALID
    if isinstance(error, RateLimited):
        return Outcome.RATE_LIMITED
    if isinstance(error, Refused):
        if error.reason is Refusal.QUEUE_TIMEOUT:
            return Outcome.QUEUE_TIMEOUT
        return Outcome.REFUSED
    if isinstance(error, RequestTimeout):
        return Outcome.REQUEST_TIMEOUT
    if isinstance(error, RequestCancelled):
        return Outcome.CLIENT_CLOSED
    return Outcome.ENGINE_ERROR


def forget_frames(error: BaseException) -> None:
    """Let go of the calls that `error`, which has been answered, came through.

    Their variables hold the request, megabytes perhaps, and most hold the error as well: a cycle,
    which stays until the collector looks. It counts objects, not bytes, and looks too late.
    """
    known = [error]
    for one in known:
        one.__traceback__ = None
        known += [e for e in (one.__cause__, one.__context__) if e is not None and e not in known]


def our_mistake() -> KvotaError:
    """A bug, as its client hears of it."""
    return KvotaError("Something broke inside the server. This is our mistake.")


class ErrorPages:
    """Answers in OpenAI's form for what never reached an endpoint: paths, methods, our bugs."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance

    def response(self, error: KvotaError) -> Response:
        headers = {k.decode(): v.decode() for k, v in error_headers(error, self._chance)}
        body = msgspec.json.encode(error_response(error))
        return Response(body, status_code=error.status, headers=headers)

    def known(self, request: HttpRequest, error: Exception) -> Response:
        """An endpoint's own error."""
        assert isinstance(error, KvotaError), error
        return self.response(error)

    def http(self, request: HttpRequest, error: Exception) -> Response:
        """Starlette's own 404 and 405."""
        assert isinstance(error, HTTPException), error
        path = request.url.path
        if error.status_code == 405:
            response = self.response(
                MethodNotAllowed(f"{request.method} is not allowed on {path[:256]}.")
            )
            response.headers.update(error.headers or {})
            return response
        return self.response(NotFound(f"There is nothing at {path[:256]}."))

    def crash(self, request: HttpRequest, error: Exception) -> Response:
        """A bug of ours. The cause goes to the log, not to the client."""
        return self.response(our_mistake())
