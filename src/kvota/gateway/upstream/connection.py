"""The HTTP client of one backend: bounded in connections, in time and in bytes.

    async with upstream.open("/v1/chat/completions", body, headers, deadline_s=…) as reply:
        while piece := await reply.read(): ...

Leaving the block, by whatever way, ends the request at the backend: an answer that was read to its
end gives its connection back, any other is closed at once, so that the backend stops computing.

A request is sent once; whoever wants another attempt asks for one. The only exception is a kept
connection that the backend was just closing (llama.cpp's server does so without a word): what is
cut there at once and unanswered is sent again on the next.

Errors are those of `failures.py`, and RequestTimeout when the request's own deadline has come.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Final

import aiohttp
from yarl import URL

from kvota.core.clock import Clock
from kvota.core.errors import ConfigError, RequestTimeout
from kvota.gateway.upstream.failures import AttemptFailed, FailureKind, failure_of

ERROR_BODY_BYTES_MAX: Final = 64 * 1024
ERROR_BODY_TIMEOUT_S: Final = 2.0
STALE_WITHIN_S: Final = 1.0  # a kept connection that was stale is cut so soon after the request
STALE_TRIES: Final = 3
_NO_HEADERS: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings:
    """Where a backend is and how patient we are with it. Raises ConfigError."""

    name: str  # in logs, metrics and the header x-kvota-backend
    url: str  # http(s)://host:port, with the path before /v1 if there is one
    unix_socket: str | None = None  # connect there instead; the URL's host is only for the header
    api_key: str | None = field(default=None, repr=False)
    verify_tls: bool = True
    connections_max: int = 1024
    connect_timeout_s: float = 5.0  # also the wait for a place among connections_max
    first_byte_timeout_s: float = 120.0  # to the status, and again to the first content
    idle_timeout_s: float = 60.0  # between two pieces of an answer
    # Below the 5 s after which uvicorn, hence vLLM, closes an idle connection: a request must not
    # meet a connection that is just being closed.
    keep_alive_s: float = 3.0
    line_bytes_max: int = 4 * 2**20  # of one event in a stream
    body_bytes_max: int = 64 * 2**20  # of a whole answer

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"The url of backend {self.name} must begin with http:// or https://, "
                f"got {self.url!r}."
            )
        for name in ("connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of backend {self.name} must be above 0.")
        if self.connections_max < 1:
            raise ConfigError(f"connections_max of backend {self.name} must be at least 1.")


class Upstream:
    """One backend. Built anywhere; used on one event loop; `close` it there."""

    def __init__(self, settings: UpstreamSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._base = settings.url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        return self.settings.name

    @asynccontextmanager
    async def open(
        self,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        *,
        method: str = "POST",
        deadline_s: float | None = None,
        first_byte_timeout_s: float | None = None,
    ) -> AsyncIterator["UpstreamReply"]:
        """Send a request, and wait for a good status. `deadline_s` is in seconds of the clock.

        Raises AttemptFailed, RejectedByBackend or RequestTimeout.
        """
        wait_s = first_byte_timeout_s or self.settings.first_byte_timeout_s
        response = await self._ask(method, path, body, headers, deadline_s, wait_s)
        reply = UpstreamReply(response, self.settings, self._clock, deadline_s)
        try:
            if not 200 <= response.status < 300:
                content = await reply.error_body()
                raise failure_of(response.status, reply.headers, content, backend=self.name)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise reply.failure(FailureKind.MALFORMED, "answered compressed, unasked")
            yield reply
        finally:
            reply.close()

    async def fetch(
        self,
        path: str,
        *,
        timeout_s: float,
        body: bytes | None = None,
        bytes_max: int | None = None,
    ) -> bytes:
        """The whole answer to a small question (GET without a body), within `timeout_s`."""
        deadline_s = self._clock.now() + timeout_s
        method = "GET" if body is None else "POST"
        try:
            async with self.open(path, body, method=method, deadline_s=deadline_s) as reply:
                return await reply.body(bytes_max)
        except RequestTimeout:
            raise self._failure(
                FailureKind.FIRST_BYTE_TIMEOUT, f"did not answer {path} within {timeout_s:g} s"
            ) from None

    async def close(self) -> None:
        """Close every connection, busy or not. Nothing can be opened any more."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        deadline_s: float | None,
        wait_s: float,
    ) -> aiohttp.ClientResponse:
        url = URL(self._base + path, encoded=True)
        for tries_left in reversed(range(STALE_TRIES)):
            way, began_s = _Way(), self._clock.now()
            asking = self._open_session().request(
                method, url, data=body, headers=headers, allow_redirects=False,
                trace_request_ctx=way,
            )  # fmt: skip
            try:
                return await self._answered(asking, wait_s, _left_s(deadline_s, self._clock))
            except AttemptFailed as failed:
                is_stale = way.is_kept and self._clock.now() - began_s < STALE_WITHIN_S
                if not (is_stale and tries_left and failed.kind_of_failure is FailureKind.CUT):
                    raise
        raise AssertionError("the last try returns or raises")

    async def _answered(
        self, asking: Awaitable[aiohttp.ClientResponse], wait_s: float, left_s: float
    ) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout(min(wait_s, left_s)):
                return await asking
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise self._failure(FailureKind.CONNECT, f"cannot be reached: {error}") from error
        except TimeoutError:
            if left_s <= wait_s:
                raise _too_late() from None
            raise self._failure(
                FailureKind.FIRST_BYTE_TIMEOUT, f"did not answer within {wait_s:g} s"
            ) from None
        except aiohttp.ClientResponseError as error:
            raise self._failure(FailureKind.MALFORMED, "does not speak HTTP") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._failure(FailureKind.CUT, "closed the connection unanswered") from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise self._failure(FailureKind.CONNECT, "is being taken away")
        if self._session is None:
            settings = self.settings
            self._session = aiohttp.ClientSession(
                connector=_connector(settings),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_standing_headers(settings),
                timeout=aiohttp.ClientTimeout(total=None, connect=settings.connect_timeout_s),
                trust_env=False,
                auto_decompress=False,
                trace_configs=[_way_tracing()],
            )
        return self._session

    def _failure(self, kind: FailureKind, what: str) -> AttemptFailed:
        return AttemptFailed(
            kind, f"The backend {self.name} {what}.", backend=self.name, before_first_byte=True
        )


class UpstreamReply:
    """An answer that is coming in. `headers` have lower-case names."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        settings: UpstreamSettings,
        clock: Clock,
        deadline_s: float | None,
    ) -> None:
        self._response = response
        self._content = response.content
        self._clock = clock
        self._deadline_s = deadline_s
        self.settings = settings
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        # Content has come: from here on another backend cannot take over. Set by whoever reads
        # the stream, for a role or a comment is not content.
        self.has_content = False

    async def read(self) -> bytes:
        """What has arrived, at least one byte; empty at the end. Raises as `open` does."""
        try:
            ready = self._content.read_nowait(-1)
            if not (ready or self._content.at_eof()):
                return await self._wait()
        except (aiohttp.ClientError, OSError) as error:
            raise self.failure(FailureKind.CUT, "cut the connection") from error
        if ready and _left_s(self._deadline_s, self._clock) <= 0:
            raise _too_late()  # it may never pause
        return ready

    async def _wait(self) -> bytes:
        settings = self.settings
        patience_s = settings.idle_timeout_s if self.has_content else settings.first_byte_timeout_s
        left_s = _left_s(self._deadline_s, self._clock)
        try:
            async with asyncio.timeout(min(patience_s, left_s)):
                return await self._content.readany()
        except aiohttp.ClientError:
            raise
        except TimeoutError:
            if left_s <= patience_s:
                raise _too_late() from None
            if self.has_content:
                raise self.failure(
                    FailureKind.IDLE_TIMEOUT, f"sent nothing for {patience_s:g} s"
                ) from None
            raise self.failure(
                FailureKind.FIRST_BYTE_TIMEOUT, f"sent no content within {patience_s:g} s"
            ) from None

    async def body(self, bytes_max: int | None = None) -> bytes:
        """All of it. Raises AttemptFailed when it is over `bytes_max`, or the settings' limit."""
        limit = bytes_max or self.settings.body_bytes_max
        parts, size = [], 0
        while piece := await self.read():
            parts.append(piece)
            size += len(piece)
            if size > limit:
                raise self.failure(FailureKind.TOO_LARGE, f"sent more than {limit:,} bytes")
        return b"".join(parts)

    async def error_body(self) -> bytes:
        """As much of it as helps to say what is wrong."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(ERROR_BODY_TIMEOUT_S):
                while size < ERROR_BODY_BYTES_MAX and (piece := await self.read()):
                    parts.append(piece)
                    size += len(piece)
        except (TimeoutError, AttemptFailed, RequestTimeout):
            pass  # the status says enough
        return b"".join(parts)[:ERROR_BODY_BYTES_MAX]

    def close(self) -> None:
        """End it: the connection is kept if all of the answer has been read, else closed now.

        A `read` that waits raises AttemptFailed.
        """
        if self._content.is_eof():
            self._response.release()
        else:
            self._response.close()

    def failure(self, kind: FailureKind, what: str) -> AttemptFailed:
        name = self.settings.name
        return AttemptFailed(
            kind,
            f"The backend {name} {what}.",
            backend=name,
            before_first_byte=not self.has_content,
            status=self.status,
        )


@dataclass(slots=True)
class _Way:
    """How a request went out."""

    is_kept: bool = False  # on a connection that had been used before


def _way_tracing() -> aiohttp.TraceConfig:
    async def note_kept(
        session: aiohttp.ClientSession,
        context: SimpleNamespace,
        params: aiohttp.TraceConnectionReuseconnParams,
    ) -> None:
        context.trace_request_ctx.is_kept = True

    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(note_kept)
    return tracing


def _connector(settings: UpstreamSettings) -> aiohttp.BaseConnector:
    limit, keep_s = settings.connections_max, settings.keep_alive_s
    if settings.unix_socket is not None:
        return aiohttp.UnixConnector(settings.unix_socket, limit=limit, keepalive_timeout=keep_s)
    tls: ssl.SSLContext | bool = settings.verify_tls
    return aiohttp.TCPConnector(limit=limit, keepalive_timeout=keep_s, ssl=tls)


def _standing_headers(settings: UpstreamSettings) -> dict[str, str]:
    headers = {
        "user-agent": "kvota",
        "accept": "application/json, text/event-stream",
        "accept-encoding": "identity",
        "content-type": "application/json",
    }
    if settings.api_key is not None:
        headers["authorization"] = f"Bearer {settings.api_key}"
    return headers


def _left_s(deadline_s: float | None, clock: Clock) -> float:
    return float("inf") if deadline_s is None else max(deadline_s - clock.now(), 0.0)


def _too_late() -> RequestTimeout:
    return RequestTimeout("The answer was not complete before the request's deadline.")
