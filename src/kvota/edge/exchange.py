"""One HTTP request and its response, on raw ASGI.

    receive ─▶ body() ─▶ … work … ─▶ respond()            one JSON answer
                  │                └▶ write() · write()    a stream, opened by its first write
                  └▶ watched(): a disconnect calls `on_gone`, and so does a reader that stalls

A reader stalls when it takes nothing for `send_timeout_s`. Its connection is cut at once: closing
it in good order would wait for the very reader, and keep what it has not taken for as long.

Whatever was sent stays sent: `fail()` is an HTTP error before the first byte and an error event
after it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Protocol

import msgspec
from starlette.types import Message, Receive, Scope, Send

from kvota.core.errors import (
    BodyTooLarge,
    ClientClosed,
    InvalidRequest,
    Refusal,
    Refused,
    UnsupportedMediaType,
)
from kvota.edge.problems import RawHeaders
from kvota.edge.settings import EdgeSettings
from kvota.wire import sse

# The ASGI extension that hands over the ClientConnection; see connection.py.
CONNECTION: Final = "kvota.connection"
SMALL_BODY_BYTES: Final = 64 * 1024  # there is always room for one
CROWDED_S: Final = 2.0  # until bodies that others have sent will have been read
PIECE_BYTES: Final = 64 * 1024  # an answer is handed over in pieces, so that a stall shows

_JSON: Final = (b"content-type", b"application/json")
Opening = tuple[int, Iterable[tuple[bytes, bytes]]]  # status and headers


class ClientConnection(Protocol):
    """What a server of ours does for a request, past ASGI: all of it at once, or not at all."""

    has_body: bool  # all of the request has arrived. False: not yet, or nobody knows

    @property
    def held_bytes(self) -> int:
        """Of the bodies of all requests on this server that have no whole answer yet."""

    async def receive(self) -> Message:
        """ASGI's. Where another stands in its place, `take_body` would go past that."""

    async def send(self, message: Message) -> None:
        """ASGI's. Where another stands in its place, `answer` would go past that."""

    def take_body(self) -> bytes:
        """What has arrived of it and was not read."""

    def is_writable(self) -> bool:
        """An answer will not pile up here: the client takes it."""

    async def writable(self) -> None:
        """Wait until it does, or is gone."""

    def answer(self, opening: Opening, content: bytes, *, more: bool) -> None:
        """Write a piece of the answer, after `opening` if it is the first. To nobody: no error."""

    def cut(self) -> None:
        """End the connection at once, with whatever has not been sent yet."""

    def when_lost(self, tell: Callable[[], None] | None) -> None:
        """Call `tell` once the client has gone; at once if it has. None: nobody asks any more."""


class Exchange:
    """`headers` are added to whatever answer is sent. Used by one task, plus its companions."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: EdgeSettings) -> None:
        self._receive = receive
        self._send = send
        self._settings = settings
        connection = self._connection = _connection_of(scope)
        # Nobody between us and the server wants to see what is said: CORS does, for one.
        self._hears_all = connection is not None and receive == connection.receive
        self._says_all = connection is not None and send == connection.send
        self._sending: asyncio.Lock | None = None  # made by the first who has to wait
        self._last_write_s = asyncio.get_running_loop().time()
        self.request_headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.headers: RawHeaders = []
        self.on_gone: Callable[[], None] = _nobody_asks
        self.is_started = False  # an answer has been chosen: no other status is possible
        self.is_gone = False
        self.is_stalled = False  # gone because it took nothing for too long
        self._is_open = False  # status and headers have been passed on
        self._is_answered = False  # all of it has: who leaves now misses nothing

    # --- the request

    async def body(self) -> bytes:
        """The whole body. Raises BodyTooLarge and Refused while reading, ClientClosed,
        InvalidRequest."""
        self._check_content_type()
        limit = self._settings.max_body_bytes
        declared = self.request_headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        if self._connection is not None and self._connection.has_body:
            if self._hears_all:
                content = self._connection.take_body()
                self._check_size(len(content))
                return content
            return await self._read_body()  # without a pause
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await self._read_body()
        except TimeoutError:
            raise InvalidRequest(
                f"The body did not arrive within {self._settings.body_timeout_s:g} s."
            ) from None

    async def _read_body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_gone = True
                raise ClientClosed("The client went away before its request was complete.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            self._check_size(size)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _check_size(self, size: int) -> None:
        """Of so much of a body, by itself and beside those of all others."""
        settings, connection = self._settings, self._connection
        if size > settings.max_body_bytes:
            raise _too_large(settings.max_body_bytes)
        if size <= SMALL_BODY_BYTES or connection is None:
            return
        if connection.held_bytes - size > settings.max_bodies_bytes:
            raise Refused(
                Refusal.QUEUE_FULL,
                f"The bodies of other requests take {settings.max_bodies_bytes / 2**20:g} MiB, the "
                "limit of all together. There is no room for another large one.",
                retry_after_s=CROWDED_S,
            )

    def _check_content_type(self) -> None:
        given = self.request_headers.get(b"content-type", b"")
        if given != b"application/json" and _media_type(given) not in (b"", b"application/json"):
            raise UnsupportedMediaType("The content type must be application/json.")
        encoding = self.request_headers.get(b"content-encoding", b"identity").lower()
        if encoding not in (b"", b"identity"):
            raise UnsupportedMediaType("Compressed bodies are not read; send plain JSON.")

    def watched(self) -> AbstractAsyncContextManager[None]:
        """Notice within the block that the client goes away. After body()."""
        if self._connection is None:
            return beside(self.watch())
        return _Watched(self._connection, self._leave)

    async def watch(self) -> None:
        """Wait for the client to go away. Run beside the work, after body()."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        if not self.is_gone:
            self.is_gone = True
            if not self._is_answered:
                self.on_gone()

    # --- the response

    async def respond(self, status: int, body: msgspec.Struct, headers: Iterable[Any] = ()) -> None:
        """Send a complete JSON answer. Raises ClientClosed when nobody takes it."""
        await self.send_whole(status, msgspec.json.encode(body), headers)

    async def send_whole(self, status: int, content: bytes, headers: Iterable[Any] = ()) -> None:
        """Send a complete answer that is encoded already. Raises as `respond`."""
        length = (b"content-length", b"%d" % len(content))
        fields = dict((_JSON, *headers, length)).items()  # each name once: the last of it
        self.is_started = True
        for start in range(0, max(len(content), 1), PIECE_BYTES):
            end = start + PIECE_BYTES
            piece, more = content[start:end], end < len(content)
            await self._deliver(piece, more=more, opening=(status, fields))

    async def write(self, content: bytes, *, last: bool = False) -> None:
        """Send a piece of a stream; the first one sends status 200 and the headers before it.

        Raises ClientClosed when the client is gone or takes nothing for `send_timeout_s`.
        """
        if self.is_gone:
            raise ClientClosed("The client went away before its answer was complete.")
        self.is_started = True
        await self._deliver(content, more=not last, opening=(200, sse.HEADERS))
        self._last_write_s = asyncio.get_running_loop().time()

    async def keep_alive(self, remark: Callable[[], str]) -> None:
        """Bridge silences with comments, until cancelled or the client is gone.

        `remark` gives the text of each comment when its time has come. Runs beside the stream's
        work from the moment the request is accepted.
        """
        loop = asyncio.get_running_loop()
        every_s = self._settings.heartbeat_s
        while not self.is_gone:
            quiet_s = loop.time() - self._last_write_s
            if quiet_s >= every_s:
                with contextlib.suppress(ClientClosed):  # on_gone has been called
                    await self.write(sse.comment(remark()))
                quiet_s = 0.0
            await asyncio.sleep(every_s - quiet_s)

    async def _deliver(self, content: bytes, *, more: bool, opening: Opening) -> None:
        """Pass it on in order, each piece whole; sends wait while the client does not read."""
        connection, sending = self._connection, self._sending
        is_free = sending is None or not sending.locked()
        if is_free and connection is not None and connection.is_writable():
            await self._pass(content, more=more, opening=opening)  # without a pause
            return
        if sending is None:
            sending = self._sending = asyncio.Lock()
        try:
            async with sending, asyncio.timeout(self._settings.send_timeout_s):
                if connection is not None:
                    await connection.writable()
                await self._pass(content, more=more, opening=opening)
        except TimeoutError:
            self.is_stalled = True
            self._leave()
            if connection is not None:  # else it stays until the client closes it
                connection.cut()
            raise ClientClosed(
                f"The client read nothing for {self._settings.send_timeout_s:g} s."
            ) from None

    async def _pass(self, content: bytes, *, more: bool, opening: Opening) -> None:
        if not self._is_open:
            opening = opening[0], (*opening[1], *self.headers)
        if self._says_all:
            assert self._connection is not None
            self._connection.answer(opening, content, more=more)
        else:
            if not self._is_open:
                head = {"status": opening[0], "headers": list(opening[1])}
                await self._send({"type": "http.response.start", **head})
            await self._send({"type": "http.response.body", "body": content, "more_body": more})
        self._is_open = True
        self._is_answered = not more


class _Watched:
    """As long as the block runs, `leave` is called when the connection is lost."""

    def __init__(self, connection: ClientConnection, leave: Callable[[], None]) -> None:
        self._connection = connection
        self._leave = leave

    async def __aenter__(self) -> None:
        self._connection.when_lost(self._leave)

    async def __aexit__(self, *_: object) -> None:
        self._connection.when_lost(None)


def _media_type(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over the limit of {limit} bytes.")


def _connection_of(scope: Scope) -> ClientConnection | None:
    """None on a server that is not ours."""
    extension = (scope.get("extensions") or {}).get(CONNECTION)
    connection: ClientConnection | None = extension["it"] if extension else None
    return connection


def _nobody_asks() -> None:
    """What happens on a disconnect before any work has begun."""


@asynccontextmanager
async def beside(companion: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `companion` as long as the block runs; an exception of its own ends with it."""
    task = asyncio.create_task(companion)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
