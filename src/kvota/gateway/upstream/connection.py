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
from base64 import b64encode
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from math import inf
from typing import Final
from urllib.parse import unquote, urlsplit

from kvota.core.clock import Clock
from kvota.core.errors import ConfigError, RequestTimeout
from kvota.gateway.upstream.channel import Channel, ChannelError, ChannelLost, NotHttp
from kvota.gateway.upstream.failures import AttemptFailed, FailureKind, failure_of
from kvota.gateway.upstream.pool import Pool, address_of

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
        """Raises ConfigError for a URL that names no host and port."""
        self.settings = settings
        self._clock = clock
        self._pool = _pool(settings)
        self._path = urlsplit(settings.url).path.rstrip("/")
        self._standing = _standing_head(settings)
        self._num_standing_breaks = self._standing.count("\n")
        self._is_closed = False

    @property
    def name(self) -> str:
        return self.settings.name

    def open(
        self,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        *,
        method: str = "POST",
        deadline_s: float | None = None,
        first_byte_timeout_s: float | None = None,
    ) -> AbstractAsyncContextManager["UpstreamReply"]:
        """Send a request, and wait for a good status. `deadline_s` is in seconds of the clock.

        Raises AttemptFailed, RejectedByBackend or RequestTimeout.
        """
        wait_s = first_byte_timeout_s or self.settings.first_byte_timeout_s
        return Open(self._good(self._ask(method, path, body, headers, deadline_s, wait_s)))

    async def _good(self, asking: Coroutine[None, None, "UpstreamReply"]) -> "UpstreamReply":
        reply = await asking
        try:
            if not 200 <= reply.status < 300:
                content = await reply.error_body()
                raise failure_of(reply.status, reply.headers, content, backend=self.name)
            if reply.headers.get("content-encoding", "identity") != "identity":
                raise reply.failure(FailureKind.MALFORMED, "answered compressed, unasked")
        except BaseException:  # cancelled as well: nobody else gets it, to close it
            reply.close()
            raise
        return reply

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
        self._pool.close()
        await asyncio.sleep(0)  # the event loop lets go of a socket in its next round

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        deadline_s: float | None,
        wait_s: float,
    ) -> "UpstreamReply":
        """The answer once its status is there, whatever it is; `close` it."""
        request = self._request(method, path, body, headers)
        for tries_left in reversed(range(STALE_TRIES)):
            channel = await self._channel(wait_s, deadline_s)
            is_kept, began_s = channel.num_requests > 0, self._clock.now()
            try:
                channel.send(request)
                await self._head(channel, wait_s, deadline_s)
            except BaseException as error:  # cancelled as well: its answer is for nobody
                self._pool.give_back(channel)
                is_cut = isinstance(error, ChannelLost)
                is_soon = self._clock.now() - began_s < STALE_WITHIN_S
                if is_cut and is_kept and is_soon and channel.is_unanswered and tries_left:
                    self._pool.close_idle()  # as stale as this one, maybe
                    continue
                if is_cut:
                    what = "closed the connection unanswered"
                    raise self._failure(FailureKind.CUT, what) from error
                raise
            return UpstreamReply(channel, self._pool, self.settings, self._clock, deadline_s)
        raise AssertionError("the last try returns or raises")

    async def _channel(self, wait_s: float, deadline_s: float | None) -> Channel:
        """A connection, within the first of all limits."""
        if self._is_closed:
            raise self._failure(FailureKind.CONNECT, "is being taken away")
        left_s = _left_s(deadline_s, self._clock)
        patience_s = min(self.settings.connect_timeout_s, wait_s)
        if left_s <= 0:
            raise _too_late()
        try:
            return await self._pool.take(min(patience_s, left_s))
        except TimeoutError as error:
            if left_s <= patience_s:
                raise _too_late() from None
            what = f"cannot be reached: {error or f'no connection within {patience_s:g} s'}"
            raise self._failure(FailureKind.CONNECT, what) from error
        except (OSError, UnicodeError) as error:
            raise self._failure(FailureKind.CONNECT, f"cannot be reached: {error}") from error

    async def _head(self, channel: Channel, wait_s: float, deadline_s: float | None) -> None:
        left_s = _left_s(deadline_s, self._clock)
        try:
            await channel.head(min(wait_s, left_s))
        except TimeoutError:
            if left_s <= wait_s:
                raise _too_late() from None
            raise self._failure(
                FailureKind.FIRST_BYTE_TIMEOUT, f"did not answer within {wait_s:g} s"
            ) from None
        except NotHttp as error:
            raise self._failure(FailureKind.MALFORMED, "does not speak HTTP") from error

    def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> bytes:
        lines = [f"{method} {self._path}{path} HTTP/1.1", self._standing]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None or method != "GET":
            lines.append(f"content-length: {len(body or b'')}")
        head = "\r\n".join(lines)
        num_breaks = len(lines) - 1 + self._num_standing_breaks
        if head.count("\n") != num_breaks or head.count("\r") != num_breaks:
            raise ValueError("a header with a line break in it")  # it would be another header
        return head.encode() + b"\r\n\r\n" + (body or b"")

    def _failure(self, kind: FailureKind, what: str) -> AttemptFailed:
        return AttemptFailed(
            kind, f"The backend {self.name} {what}.", backend=self.name, before_first_byte=True
        )


class Open:
    """The block in which an answer is read: it begins once `asking` has one, and closes it."""

    __slots__ = ("_asking", "_reply")

    def __init__(self, asking: Coroutine[None, None, "UpstreamReply"]) -> None:
        self._asking = asking

    async def __aenter__(self) -> "UpstreamReply":
        reply = self._reply = await self._asking
        return reply

    async def __aexit__(self, *_: object) -> None:
        self._reply.close()


class UpstreamReply:
    """An answer that is coming in. `headers` have lower-case names."""

    def __init__(
        self,
        channel: Channel,
        pool: Pool,
        settings: UpstreamSettings,
        clock: Clock,
        deadline_s: float | None,
    ) -> None:
        self._channel = channel
        self._pool = pool
        self._clock = clock
        self._deadline_s = deadline_s
        self._is_closed = False
        self.settings = settings
        self.status = channel.status
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1")  # any bytes, as HTTP has them
            for name, value in channel.headers
        }
        # Content has come: from here on another backend cannot take over. Set by whoever reads
        # the stream, for a role or a comment is not content.
        self.has_content = False
        self.is_said = False  # all that matters; set by whoever reads

    @property
    def is_at_end(self) -> bool:
        """All of it has arrived."""
        return self._channel.is_complete

    async def read(self) -> bytes:
        """What has arrived, at least one byte; empty at the end. Raises as `open` does."""
        channel = self._channel
        if channel.is_complete:
            return await channel.piece(inf)  # at once
        settings, left_s = self.settings, _left_s(self._deadline_s, self._clock)
        patience_s = settings.idle_timeout_s if self.has_content else settings.first_byte_timeout_s
        if left_s <= 0:
            raise _too_late()  # it may never pause
        try:
            return await channel.piece(min(patience_s, left_s))
        except ChannelError as error:
            raise self.failure(FailureKind.CUT, "cut the connection") from error
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
        """End it: the connection is kept if all of the answer has been read, else closed now; where
        all is said and its end is on its way, once that has come or does not come soon.

        A `read` that waits raises AttemptFailed. Idempotent.
        """
        if not self._is_closed:  # else the connection may be somebody else's by now
            self._is_closed = True
            self._pool.give_back(self._channel, sees_end=self.is_said)

    def failure(self, kind: FailureKind, what: str) -> AttemptFailed:
        name = self.settings.name
        return AttemptFailed(
            kind,
            f"The backend {name} {what}.",
            backend=name,
            before_first_byte=not self.has_content,
            status=self.status,
        )


def _pool(settings: UpstreamSettings) -> Pool:
    try:
        address = address_of(
            settings.url, unix_socket=settings.unix_socket, verify_tls=settings.verify_tls
        )
    except ValueError as error:
        raise ConfigError(
            f"The url of backend {settings.name} is wrong ({error}): {settings.url!r}."
        ) from None
    return Pool(
        address,
        connections_max=settings.connections_max,
        keep_alive_s=settings.keep_alive_s,
    )


def _standing_head(settings: UpstreamSettings) -> str:
    """The lines that are the same in every request."""
    parts = urlsplit(settings.url)
    headers = {
        "host": parts.netloc.rpartition("@")[2],
        "user-agent": "kvota",
        "accept": "application/json, text/event-stream",
        "accept-encoding": "identity",
        "content-type": "application/json",
    }
    if settings.api_key is not None:
        headers["authorization"] = f"Bearer {settings.api_key}"
    elif parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    return "\r\n".join(f"{name}: {value}" for name, value in headers.items())


def _left_s(deadline_s: float | None, clock: Clock) -> float:
    if deadline_s is None:
        return inf
    left_s = deadline_s - clock.now()
    return left_s if left_s > 0 else 0.0


def _too_late() -> RequestTimeout:
    return RequestTimeout("The answer was not complete before the request's deadline.")
