"""One HTTP/1.1 connection, with limits that hold before any request exists.

    bytes ─▶ llhttp ─▶ Cycle (`cycle.py`), one for each request ─▶ the application, one at a time
                          └─▶ those sent ahead wait, and reading stops, and parsing too

A connection that sends too many bytes of headers, dawdles over them, or speaks something else than
HTTP is answered in the same JSON as every other error and closed; and beyond a number of open
connections new ones are refused.

    nothing, or a part of the headers        closed after HEADERS_TIMEOUT_S
    a part of the body                       the application answers (`exchange.py`), or the answer
                                             was there before: then closed LINGER_S later
    the whole request, and no other          closed after KEEP_ALIVE_S (`listening.py`)
    garbage, after requests                  those are answered, then it is closed

What trickles in does not wind these clocks up again. There is one alarm for all of them.

uvicorn starts and stops it all: this is a protocol class of `uvicorn.Config`.
"""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any, Final

import httptools
from starlette.types import ASGIApp, Scope
from uvicorn.config import Config
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from kvota.edge.alarm import Alarm
from kvota.edge.cycle import Cycle, RawHeader
from kvota.edge.exchange import CONNECTION
from kvota.edge.proxied import FORWARDED, apps
from kvota.edge.refusal import refusal
from kvota.edge.target import request_line

HEADERS_BYTES_MAX = 64 * 1024
HEADERS_TIMEOUT_S = 20.0
LINGER_S = 5.0  # closed at once, the answer might be lost to a client that still sends
CONNECTIONS_MAX = 4096
FLUSH_TIMEOUT_S = 60.0  # for the end of the last answer to be taken
AHEAD_MAX = 8  # requests behind the one that is answered, before reading stops
_SLICE_BYTES: Final = 4096  # of a read, parsed at once: it may hold two hundred requests
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})


class BoundedConnection(asyncio.Protocol):
    """Made by uvicorn for each client. A `cycle.Carrier`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._loop = _loop or asyncio.get_running_loop()
        self._server = server_state
        self._app_state = app_state
        self._keep_alive_s = config.timeout_keep_alive
        self._app, self._app_behind_proxy = apps(config)
        self._parser: Any = httptools.HttpRequestParser(self)
        # What follows a request that closes is no error of that request, which is answered. It is
        # not answered itself: RFC 9112, 9.6.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._transport: asyncio.Transport | None = None
        self.client: tuple[str, int] | None = None
        self._own: tuple[str, int | None] | None = None
        # the request whose head is being read
        self._is_in_head = False
        self._num_first = 0  # bytes of the slice in which it began, whatever else is in that
        self._num_head_bytes = 0  # of those after that, or in a row that were trailers at best
        self._num_read = 0  # of this slice of a read
        self._is_futile = False  # this slice has brought neither a request nor a part of a body
        self._url = b""
        self._headers: list[RawHeader] = []
        self._owes_continue = self._is_forwarded = False
        # the requests that were read
        self._newest: Cycle | None = None  # whose body is being read, or was read last
        self._running: Cycle | None = None
        self._ahead: deque[tuple[Cycle, ASGIApp, Scope]] = deque()
        self._is_deaf = False  # what comes is no HTTP, or nothing that is answered
        self._unparsed = b""  # has come, for when there is room for more requests
        # the transport
        self._is_read_paused = False
        self.is_write_paused = False
        self._writable: asyncio.Event | None = None  # made by the first who waits
        # time
        self._is_head_due = False
        self._alarm = Alarm(self._loop, self._time_is_up)

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._server.connections.add(self)  # type: ignore[arg-type]
        self.client, self._own = get_remote_addr(transport), get_local_addr(transport)
        if len(self._server.connections) > CONNECTIONS_MAX:
            self._refuse(503, "too_many_connections", "Too many connections are open.")
            return
        self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._alarm.end()
        self._is_deaf = True
        self._parser = None  # which holds us
        self.resume_writing()
        if self._running is not None:
            self._running.lose()
        self._ahead.clear()  # nobody has begun with them
        self._unparsed = b""
        self._newest = self._running = None

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()

    def eof_received(self) -> None:
        """Who sends no more is gone: nobody can tell the two apart."""
        if self._running is None:
            self.close()

    def pause_writing(self) -> None:
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if self._writable is not None:
            self._writable.set()

    # --- parsing

    def _parse(self) -> None:
        """What has come, as far as there is room for the requests in it."""
        data, start = self._unparsed, 0
        while start < len(data) and not (self._hears_nothing() or self._is_full()):
            end = start + _SLICE_BYTES
            self._parse_slice(data[start:end])
            start = end
        if self._hears_nothing():
            self._unparsed = b""
            return
        self._unparsed = data[start:]
        if self._running is None and not (self._is_head_due or self._lingers()):
            self._await_head()

    def _parse_slice(self, data: bytes) -> None:
        self._num_read, self._is_futile = len(data), True
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._give_up(400, "invalid_request", "Invalid HTTP request received.")
            return
        if self._is_futile:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > HEADERS_BYTES_MAX:
                self._refuse_head()

    def _hears_nothing(self) -> bool:
        return self._is_deaf or self.is_closing()

    def _parse_rest(self) -> None:
        self._parse()
        if not self._unparsed:
            self.resume_reading()

    # --- what the parser calls

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline(data[upgrade.args[0] :])

    def _decline(self, rest: bytes) -> None:
        """It is answered as if it had not asked, and then closed.

        llhttp takes its body for the other protocol; Java's client asks so for every request.
        """
        cycle = self._newest
        assert cycle is not None
        cycle.keeps_alive = False
        framing = [b"%b: %b\r\n" % line for line in self._headers if line[0] in _FRAMING]
        if not framing:
            self._hear_no_more()
            return
        cycle.has_body = False
        reader = SimpleNamespace(on_body=self.on_body, on_message_complete=self._end_declined)
        self._parser = httptools.HttpRequestParser(reader)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
        self._parser.feed_data(rest)

    def _end_declined(self) -> None:
        self.on_message_complete()
        self._hear_no_more()
        raise httptools.HttpParserError("nothing that follows belongs to it")

    def on_message_begin(self) -> None:
        self._is_in_head, self._is_futile = True, False
        self._num_first, self._num_head_bytes = self._num_read, 0
        self._url = b""
        self._headers = []
        self._owes_continue = self._is_forwarded = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer, which nobody may take for a header
        name = name.lower()
        self._headers.append((name, value))
        if name in FORWARDED:
            self._is_forwarded = True
        elif name == b"expect":
            self._owes_continue |= value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        self._is_in_head = self._is_futile = False
        num_bytes_max = self._num_first + self._num_head_bytes + self._num_read
        self._num_head_bytes = 0
        if num_bytes_max > HEADERS_BYTES_MAX:
            num_bytes = len(self._url) + sum(
                len(name) + len(value) for name, value in self._headers
            )
            if num_bytes > HEADERS_BYTES_MAX:
                self._refuse_head()
                raise httptools.HttpParserError("its head is too large")  # no more of it
        parser = self._parser
        scope: Scope = {
            **request_line(parser, self._url), "server": self._own, "client": self.client,
            "headers": self._headers, "state": self._app_state.copy(),
        }  # fmt: skip
        is_current = scope["http_version"] == "1.1"
        cycle = self._newest = Cycle(
            self, method=scope["method"], version=scope["http_version"],
            keeps_alive=is_current and parser.should_keep_alive(),
            owes_continue=is_current and self._owes_continue,
        )  # fmt: skip
        scope["extensions"] = {CONNECTION: {"it": cycle}}
        app = self._app_behind_proxy if self._is_forwarded else self._app
        if self._running is None:
            self._start(cycle, app, scope)
        else:
            self._ahead.append((cycle, app, scope))
            if self._is_full():
                self.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._is_futile, self._num_head_bytes = False, 0
        if self._newest is not None:
            self._newest.take(body)

    def on_message_complete(self) -> None:
        newest = self._newest
        if newest is not None:
            newest.end_body()
            if newest.is_complete and not newest.keeps_alive:
                self.close()

    # --- requests

    def _start(self, cycle: Cycle, app: ASGIApp, scope: Scope) -> None:
        self._running = cycle
        self._alarm.silence()
        self._is_head_due = False
        task = self._loop.create_task(self._run(cycle, app, scope))
        self._server.tasks.add(task)

    async def _run(self, cycle: Cycle, app: ASGIApp, scope: Scope) -> None:
        try:
            await cycle.run(app, scope)
        finally:
            task = asyncio.current_task(self._loop)
            assert task is not None
            self._server.tasks.discard(task)

    def answered(self, cycle: Cycle) -> None:
        self._server.total_requests += 1
        self._running = None
        if self.is_closing() or (self._is_deaf and not self._ahead):
            self.close()
        elif not cycle.keeps_alive:
            self._close_after_body()
        elif self._ahead:
            self._start(*self._ahead.popleft())
        else:
            self.resume_reading()
            self._await_next()

    def crashed(self, cycle: Cycle) -> None:
        if cycle.is_out:
            self.close()  # in the middle of its answer
        else:
            self._refuse(500, "internal_error", "Something broke inside the server.")

    def shutdown(self) -> None:
        """Asked by uvicorn: no more requests after those that are here, all of each."""
        if self._running is None:
            self.close()
        elif self._newest is None or self._newest.has_body:
            self._last().keeps_alive = False
        else:
            self._give_up(503, "draining", "The server is shutting down and waits for no body.")

    def _last(self) -> Cycle:
        assert self._running is not None
        return self._ahead[-1][0] if self._ahead else self._running

    @property
    def body_bytes(self) -> int:
        """Of the requests here that have no whole answer yet."""
        running = 0 if self._running is None else self._running.body_bytes
        return running + sum(cycle.body_bytes for cycle, _, _ in self._ahead)

    @property
    def held_bytes(self) -> int:
        return sum(one.body_bytes for one in self._server.connections)  # type: ignore[union-attr]

    def _is_full(self) -> bool:
        """Whoever waits for the client to leave, or for a body, hears nothing until it is not."""
        return len(self._ahead) >= AHEAD_MAX

    # --- limits

    def _await_head(self) -> None:
        self._is_head_due = True
        self._alarm.set(HEADERS_TIMEOUT_S)

    def _await_next(self) -> None:
        """An answer has been given, and nobody waits."""
        if self._lingers():
            self._alarm.set(LINGER_S)
        elif self._is_in_head:
            self._await_head()
        else:
            self._alarm.set(self._keep_alive_s)

    def _lingers(self) -> bool:
        """A body is still coming whose request was answered."""
        newest = self._newest
        return newest is not None and newest.is_complete and not newest.has_body

    def _close_after_body(self) -> None:
        """The client sees the end at once. Closed while it sends, it might lose the answer."""
        if self._lingers():
            assert self._transport is not None
            self._transport.write_eof()
            self.resume_reading()
            self._alarm.set(LINGER_S)
        else:
            self.close()

    def _time_is_up(self) -> None:
        if self.is_closing():
            self.abort()
        else:
            self.close()

    def _refuse_head(self) -> None:
        message = f"The request's headers are over {HEADERS_BYTES_MAX:,} bytes."
        self._give_up(431, "headers_too_large", message)

    def _give_up(self, status: int, code: str, message: str) -> None:
        """What has just come cannot be answered otherwise. What came before it is answered first,
        and then, to be safe, only closed.
        """
        if self._is_deaf:
            return
        running, newest = self._running, self._newest
        is_in_body = newest is not None and not newest.has_body
        if running is None:
            if is_in_body:
                self.close()  # it has its answer
            else:
                self._refuse(status, code, message)
        elif newest is not running and is_in_body:
            self._ahead.pop()
            self._hear_no_more()
        elif is_in_body:
            is_out = running.is_out
            running.lose()
            if is_out:
                self.close()
            else:
                self._refuse(status, code, message)
        else:
            self._hear_no_more()

    def _hear_no_more(self) -> None:
        """Answer what is there, and close."""
        self._is_deaf = True
        if self._running is None:
            self.close()
            return
        self._last().keeps_alive = False

    def _refuse(self, status: int, code: str, message: str) -> None:
        if not self.is_closing():
            self.write(refusal(status, code, message))
        self.close()

    # --- the transport, as a Carrier has it

    @property
    def standing_headers(self) -> list[RawHeader]:
        return self._server.default_headers

    def write(self, content: bytes) -> None:
        assert self._transport is not None
        self._transport.write(content)

    def is_closing(self) -> bool:
        assert self._transport is not None
        return self._transport.is_closing()

    def close(self) -> None:
        """Once what was written has gone out, or has not for FLUSH_TIMEOUT_S."""
        assert self._transport is not None
        self._is_deaf = True
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._alarm.set(FLUSH_TIMEOUT_S)

    def abort(self) -> None:
        assert self._transport is not None
        self._is_deaf = True
        self._transport.abort()

    def pause_reading(self) -> None:
        if not self._is_read_paused and not self.is_closing():
            assert self._transport is not None
            self._is_read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_read_paused and not (self.is_closing() or self._is_full()):
            if self._unparsed:
                self._loop.call_soon(self._parse_rest)
                return
            assert self._transport is not None
            self._is_read_paused = False
            self._transport.resume_reading()

    async def drained(self) -> None:
        """Return when the client has taken enough, or is gone."""
        if self._writable is None:
            self._writable = asyncio.Event()
        while self.is_write_paused:
            self._writable.clear()
            await self._writable.wait()
