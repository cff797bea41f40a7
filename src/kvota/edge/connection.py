"""One HTTP connection, with limits that hold before any request exists.

uvicorn's protocol reads headers of any size for any time. Here a connection that sends too many
bytes of headers, dawdles over them, or speaks something else than HTTP is answered in the same
JSON as every other error and closed; and beyond a number of open connections new ones are refused.
A request may ask about its connection and have it cut (`exchange.ClientConnection`).

    nothing, or a part of the headers        closed after HEADERS_TIMEOUT_S
    a part of the body                       the application answers (`exchange.py`), or the answer
                                             was there before: then closed LINGER_S later
    the whole request, and no other          closed after KEEP_ALIVE_S (`listening.py`)

What trickles in does not wind these clocks up again.
"""

import asyncio
from asyncio import TimerHandle
from collections.abc import Callable
from typing import Any

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from kvota.edge.exchange import CONNECTION

HEADERS_BYTES_MAX = 64 * 1024
HEADERS_TIMEOUT_S = 20.0
LINGER_S = 5.0  # closed at once, the answer might be lost to a client that still sends
CONNECTIONS_MAX = 4096


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's httptools protocol with limits on headers, their time, and connections."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._num_header_bytes = 0
        self._is_reading_headers = False
        self._headers_timer: TimerHandle | None = None
        self._tell_lost: Callable[[], None] | None = None
        self._is_lost = False
        self._joining: _JoiningTransport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._joining = _JoiningTransport(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            self._refuse(503, "too_many_connections", "Too many connections are open.")
            return
        self._start_timer(HEADERS_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._is_lost = True
        if self._tell_lost is not None:
            self._tell_lost()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._headers_timer is None and not self._is_in_body():
            self._start_timer(HEADERS_TIMEOUT_S)
        super().data_received(data)
        if self._is_reading_headers:
            self._num_header_bytes += len(data)
            self._check_headers(self._num_header_bytes)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: {"it": self}}
        self._num_header_bytes = 0
        self._is_reading_headers = True

    def on_headers_complete(self) -> None:
        self._is_reading_headers = False
        self._stop_timer()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._check_headers(num_bytes):
            super().on_headers_complete()
            if self.cycle is not None:
                self.cycle.transport = self._joining  # type: ignore[assignment]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        cycle = self.cycle  # with its body on the way, there can be no later one in the pipeline
        if cycle.response_complete and cycle.more_body and not self.transport.is_closing():
            self._start_timer(LINGER_S)

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets the same kind of answer as every other mistake."""
        self._refuse(400, "invalid_request", msg)

    # --- exchange.ClientConnection

    def cut(self) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # an answer that stops here is not the application's bug
        self.transport.abort()

    def has_body(self) -> bool:
        return self.cycle is not None and not self.cycle.more_body

    def is_writable(self) -> bool:
        return not self.flow.write_paused

    def hold_head(self) -> None:
        assert self._joining is not None
        self._joining.holds_next = True

    def when_lost(self, tell: Callable[[], None] | None) -> None:
        self._tell_lost = tell
        if tell is None:
            return
        self.flow.resume_reading()  # a large body may have stopped it, and then nothing is noticed
        if self._is_lost:
            tell()

    # --- limits

    def _is_in_body(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._headers_timer = self.loop.call_later(seconds, self._headers_late)

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _headers_late(self) -> None:
        self._headers_timer = None
        if not self._is_in_body() and not self.transport.is_closing():
            self.transport.close()

    def _check_headers(self, num_bytes: int) -> bool:
        """False, and the connection is refused, when there are too many bytes of headers."""
        is_fine = num_bytes <= HEADERS_BYTES_MAX
        if not is_fine:
            self._refuse(
                431,
                "headers_too_large",
                f"The request's headers are over {HEADERS_BYTES_MAX:,} bytes.",
            )
        return is_fine

    def _refuse(self, status: int, code: str, message: str) -> None:
        if self.transport.is_closing():
            return
        kind = "overloaded_error" if status == 503 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            + (b"retry-after: 1\r\n" if status == 503 else b"")
            + b"content-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


class _JoiningTransport:
    """The transport as an answer sees it: its head may wait for its body, to save a system call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self.holds_next = False

    def write(self, data: bytes) -> None:
        if self.holds_next:
            self.holds_next = False
            self._held = data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        if self._held:
            self.write(b"")
        self._transport.close()
