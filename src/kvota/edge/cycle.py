"""One request on a connection, and its answer: ASGI's two calls, and the same without messages.

    the parser    take(body) · end_body()
    an app        receive() · send(message)               ASGI, as everybody speaks it
    an Exchange   take_body() · answer(opening, content)  at once, without a wait

The head of an answer goes out together with what follows it. What would make two answers of one,
a line break in a header or more bytes than were stated, is our own bug: it raises.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from itertools import chain
from typing import Final, Protocol

from starlette.types import ASGIApp, Message, Scope

UNREAD_BYTES_MAX: Final = 64 * 1024  # of a body that the application has not asked for
SEND_TIMEOUT_S = 60.0  # for a client to take something
RawHeader = tuple[bytes, bytes]
Opening = tuple[int, Iterable[RawHeader]]  # status and headers

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_LENGTH: Final = b"content-length: "
_ENCODING: Final = b"transfer-encoding: "
_CONNECTION: Final = b"connection: "
_FRAMING: Final = frozenset({_LENGTH, _ENCODING, _CONNECTION})
_WITHOUT_CONTENT: Final = frozenset({204, 304})
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PLAIN: Final = bytes([9, *range(32, 127), *range(128, 256)])  # what a line of a head may hold
_log = logging.getLogger("uvicorn.error")


class Carrier(Protocol):
    """The connection, as a cycle uses it."""

    is_write_paused: bool

    @property
    def held_bytes(self) -> int:
        """Of all bodies on all connections whose requests have no whole answer yet."""

    @property
    def standing_headers(self) -> list[RawHeader]:
        """Of every answer."""

    def write(self, content: bytes) -> None: ...
    def close(self) -> None: ...
    def is_closing(self) -> bool: ...
    def abort(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    async def drained(self) -> None: ...

    def answered(self, cycle: "Cycle") -> None:
        """All of its answer has been written."""

    def crashed(self, cycle: "Cycle") -> None:
        """Its application has left it without an answer."""


class Cycle:
    """`run` it once. Is an `exchange.ClientConnection`."""

    __slots__ = (
        "_carrier", "_head", "_is_chunked", "_is_direct", "_is_head_request", "_is_old", "_left",
        "_news", "_num_unread", "_owes_continue", "_tell_lost", "_unread", "body_bytes", "has_body",
        "has_head", "has_news", "is_complete", "is_lost", "is_out", "keeps_alive",
    )  # fmt: skip

    def __init__(
        self, carrier: Carrier, *, method: str, version: str, keeps_alive: bool, owes_continue: bool
    ) -> None:
        self._carrier = carrier
        self.keeps_alive = keeps_alive  # the connection, after the answer
        self._owes_continue = owes_continue
        self._is_head_request = method == "HEAD"
        self._is_old = version != "1.1"  # knows no chunks
        self.is_lost = False  # whatever is still said reaches nobody
        self._tell_lost: Callable[[], None] | None = None
        # the request's body
        self._unread: list[bytes] = []
        self._num_unread = 0
        self.body_bytes = 0  # that have arrived
        self.has_body = False  # all of it has arrived
        self.has_news = False  # that `receive` has not told
        self._news: asyncio.Event | None = None  # made by the first who waits
        # the answer
        self.has_head = False  # status and headers have been chosen,
        self.is_out = False  # and written
        self.is_complete = False
        self._is_direct = False
        self._head = b""
        self._is_chunked = False
        self._left: int | None = None  # bytes of a stated length

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Let the application answer. Whatever it raises ends here, in the log."""
        try:
            await app(scope, self.receive, self.send)
        except BaseException as error:  # the boundary: nobody is above us
            _log.error("Exception in ASGI application\n", exc_info=error)
        else:
            if self.is_complete or self.is_lost:
                return
            _log.error("ASGI callable returned without completing response.")
        if not self.is_complete and not self.is_lost:
            self._carrier.crashed(self)

    # --- the request's body

    def take(self, content: bytes) -> None:
        if self.is_complete:
            return  # nobody will ask
        self._unread.append(content)
        self._num_unread += len(content)
        self.body_bytes += len(content)
        if self._num_unread > UNREAD_BYTES_MAX:
            self._carrier.pause_reading()
        self._tell()

    def end_body(self) -> None:
        self.has_body = True
        self._tell()

    def take_body(self) -> bytes:
        """What has arrived and was not read, without waiting; all that is left if `has_body`."""
        unread = self._unread
        content = unread[0] if len(unread) == 1 else b"".join(unread)
        unread.clear()
        self._num_unread = 0
        self.has_news = False
        return content

    @property
    def held_bytes(self) -> int:
        return self._carrier.held_bytes

    async def receive(self) -> Message:
        if self._owes_continue and not self._carrier.is_closing():
            self._owes_continue = False
            self._carrier.write(_CONTINUE)
        if not (self.has_news or self.is_lost or self.is_complete):
            self._carrier.resume_reading()
            if self._news is None:
                self._news = asyncio.Event()
            self._news.clear()
            await self._news.wait()
        if self.is_lost or self.is_complete:
            return {"type": "http.disconnect"}
        self._carrier.resume_reading()
        return {"type": "http.request", "body": self.take_body(), "more_body": not self.has_body}

    def _tell(self) -> None:
        self.has_news = True
        if self._news is not None:
            self._news.set()

    # --- the answer

    async def send(self, message: Message) -> None:
        if self._carrier.is_write_paused and not self.is_lost:
            await self._drained()
        if self.is_lost or self._is_direct:
            return  # answered past whoever says this: it is a page about our crash
        kind = message["type"]
        if kind != ("http.response.body" if self.has_head else "http.response.start"):
            raise RuntimeError(f"unexpected ASGI message {kind!r}")
        if kind == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
        elif self.is_complete:
            raise RuntimeError("the response was complete already")
        else:
            self._add(message.get("body", b""), more=message.get("more_body", False))

    async def _drained(self) -> None:
        """An Exchange has waited itself; what is sent without one waits here."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._carrier.drained()
        except TimeoutError:
            self.cut()

    def answer(self, opening: Opening, content: bytes, *, more: bool) -> None:
        """A piece of the answer, after `opening` if it is the first. Never waits."""
        if self.is_lost:
            return
        self._is_direct = True
        if not self.has_head:
            self._begin(*opening)
        self._add(content, more=more)

    def _begin(self, status: int, headers: Iterable[RawHeader]) -> None:
        if self._owes_continue and not self.has_body:
            self.keeps_alive = False  # whether its body comes after all, nobody can know
        lines = [_status_line(status)]
        says_close = False
        for name, value in chain(self._carrier.standing_headers, headers):
            label = _label(name)
            lines.append(label + value)
            if label in _FRAMING:
                says_close |= self._note_framing(label, value)
        if not self._is_chunked and self._left is None:
            self._choose_framing(status, lines)
        if not (self.keeps_alive or says_close):
            lines.append(b"connection: close")
        head = b"\r\n".join(lines)
        if head.translate(None, _PLAIN) != b"\r\n" * (len(lines) - 1):
            raise RuntimeError("a response header holds a line break or a control character")
        self._head = head + b"\r\n\r\n"
        self.has_head = True
        self._owes_continue = False

    def _note_framing(self, label: bytes, value: bytes) -> bool:
        """True where it says that the connection ends."""
        if label == _LENGTH and not self._is_chunked:
            self._left = int(value)
        elif label == _ENCODING and value.lower() == b"chunked":
            self._is_chunked, self._left = True, None
        elif label == _CONNECTION:
            is_end = b"close" in [token.strip() for token in value.lower().split(b",")]
            self.keeps_alive = self.keeps_alive and not is_end
            return is_end
        return False

    def _choose_framing(self, status: int, lines: list[bytes]) -> None:
        """Where the application has not."""
        if status in _WITHOUT_CONTENT or self._is_head_request:
            self._left = 0
        elif self._is_old:
            self.keeps_alive = False  # its end is the connection's
        else:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked")

    def _add(self, content: bytes, *, more: bool) -> None:
        if self._is_head_request:
            content, self._left = b"", 0
        elif self._is_chunked:
            content = _chunk(content) if more else _chunk(content) + b"0\r\n\r\n"
        elif self._left is not None:
            self._left -= len(content)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the response is not as long as its content-length says")
        if self._head or content:
            self._carrier.write(self._head + content)
            self._head, self.is_out = b"", True
        if not more:
            self.is_complete = True
            self._tell()
            self._carrier.answered(self)

    # --- the connection

    def lose(self) -> None:
        """The connection is gone."""
        if self.is_lost:
            return
        self.is_lost = True
        self._tell()
        if self._tell_lost is not None:
            self._tell_lost()

    def cut(self) -> None:
        """As `exchange.ClientConnection` says."""
        self.is_lost = True  # an answer that stops here is not the application's bug
        self._tell()
        self._carrier.abort()

    def is_writable(self) -> bool:
        return not self._carrier.is_write_paused

    async def writable(self) -> None:
        if self._carrier.is_write_paused:
            await self._carrier.drained()

    def when_lost(self, tell: Callable[[], None] | None) -> None:
        self._tell_lost = tell
        if tell is None:
            return
        self._carrier.resume_reading()  # a large body may have stopped it; then nothing is noticed
        if self.is_lost:
            tell()


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""


@lru_cache(maxsize=256)
def _label(name: bytes) -> bytes:
    """What a header's line begins with. Raises RuntimeError for what is no name."""
    if _NAME.fullmatch(name) is None:
        raise RuntimeError(f"{name!r} is no header's name")
    return name.lower() + b": "


@lru_cache(maxsize=64)
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b" % (status, phrase.encode())
