"""One HTTP/1.1 connection to a backend: a request goes out whole, its answer comes in pieces.

    send(request) ─▶ head() ─▶ piece() · piece() · … ─▶ is_complete ─▶ send(next request) · close()

llhttp reads what comes (through httptools, as at our own door) with the leniencies that clients
commonly have. Everything that arrived in one read is one piece. A reader that falls behind stops
the socket at `BUFFERED_BYTES_MAX`. One task at a time may wait.
"""

import asyncio
from math import inf
from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

BUFFERED_BYTES_MAX: Final = 256 * 1024
_EARLY_S: Final = 0.005  # a timer may fire a little too soon
HEAD_BYTES_MAX: Final = 64 * 1024  # of a head, and of all else that is no body, at a time


class ChannelError(Exception):
    """No more of an answer comes."""


class ChannelLost(ChannelError):
    """The connection ended before the answer did."""


class NotHttp(ChannelError):
    """What came in place of an answer's head is not one."""


class Channel(asyncio.Protocol):
    """Made by `loop.create_connection`; `close` it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # without a call of ours for each chunk
        self._parser = HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._give_up_s = inf  # when whoever waits has waited enough
        self._look: asyncio.TimerHandle | None = None
        self._looks_s = inf  # when it looks whether that is so
        self._num_bytes = 0  # that brought what is in _pieces
        self._num_other_bytes = 0  # since the request, or the last of the body: heads, trailers
        self._is_paused = False
        self._error: ChannelError | None = None
        self._has_head = False
        self._is_to_end = False  # the answer ends with the connection
        self._keeps_alive = False  # as the answer says
        self.num_requests = 0
        self.is_complete = True  # the answer has arrived to its end
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    @property
    def is_reusable(self) -> bool:
        """Another request may follow.

        Not on one that was answered while its body still went out: the backend may never read it.
        """
        is_over = self.is_complete and not self._pieces
        if not (is_over and self._keeps_alive and self._error is None):
            return False
        assert self._transport is not None
        return self._transport.get_write_buffer_size() == 0

    @property
    def is_unanswered(self) -> bool:
        """Not a byte has come in answer to the request."""
        return not (self._has_head or self._num_other_bytes)

    def send(self, request: bytes) -> None:
        """Begin the next exchange."""
        assert self._transport is not None
        assert self.is_complete, "an answer is still coming"
        self.num_requests += 1
        self.is_complete = self._has_head = self._is_to_end = self._keeps_alive = False
        self.status, self.headers, self._num_other_bytes = 0, [], 0
        self._transport.write(request)

    async def head(self, wait_s: float) -> None:
        """Wait for `status` and `headers`. Raises TimeoutError, ChannelLost or NotHttp."""
        if not self._has_head:
            await self._wait(wait_s)

    async def piece(self, wait_s: float) -> bytes:
        """What has arrived of the body, at least a byte; empty at its end. Raises as `head`."""
        if not (self._pieces or self.is_complete):
            await self._wait(wait_s)
        pieces = self._pieces
        content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._num_bytes = 0
        if self._is_paused:
            self._is_paused = False
            assert self._transport is not None
            self._transport.resume_reading()
        return content

    def close(self) -> None:
        """End it at once, whatever is under way. Whoever waits hears ChannelLost."""
        self._fail(ChannelLost("it was closed here"))
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self, wait_s: float) -> None:
        if self._error is not None:
            raise self._error
        waiter = self._waiter = self._loop.create_future()
        self._give_up_s = self._loop.time() + wait_s
        if self._give_up_s < self._looks_s:
            self._look_at(self._give_up_s)
        try:
            await waiter
        finally:
            self._waiter = None

    def _look_at(self, time_s: float) -> None:
        if self._look is not None:
            self._look.cancel()
        self._looks_s = time_s
        self._look = self._loop.call_at(time_s, self._look_at_time)

    def _look_at_time(self) -> None:
        """One timer for wait after wait: it is early for all but those that are too long."""
        self._look, self._looks_s = None, inf
        if self._waiter is None or self._waiter.done():
            return
        if self._give_up_s - self._loop.time() > _EARLY_S:
            self._look_at(self._give_up_s)
        else:
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: ChannelError) -> None:
        if self._error is None:
            self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._error)

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self.is_complete:  # nobody has asked
            self.close()
            return
        self._num_other_bytes += len(data)
        num_pieces = len(self._pieces)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._cannot_read(error)
            return
        if len(self._pieces) > num_pieces:
            self._num_other_bytes = 0
            self._hold_back(len(data))
        if self._num_other_bytes > HEAD_BYTES_MAX:
            self._cannot_read(ValueError("its head, or what follows its body, is too long"))
        elif self._pieces or self.is_complete:
            self._wake()

    def _hold_back(self, num_bytes: int) -> None:
        """So many more have come for a reader that may be slow."""
        self._num_bytes += num_bytes
        if self._num_bytes > BUFFERED_BYTES_MAX and not self._is_paused:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if self._has_head and self._is_to_end and error is None:
            self.is_complete = True
            self._wake()
        self._fail(ChannelLost(str(error or "it was closed there")))

    def _cannot_read(self, error: Exception) -> None:
        """What follows an answer that is complete is not read, only never asked again."""
        assert self._transport is not None
        self._fail(ChannelLost(str(error)) if self._has_head else NotHttp(str(error)))
        self._transport.abort()

    # --- what the parser calls

    def on_message_begin(self) -> None:
        if self.is_complete:  # else it would be taken for the next request's
            raise HttpParserError("two answers to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else a trailer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers = []  # of an interim answer; the real one follows
            return
        self.status, self._has_head = status, True
        self._num_other_bytes = 0
        named = dict(self.headers)
        is_chunked = b"chunked" in named.get(b"transfer-encoding", b"").lower()
        self._is_to_end = not (is_chunked or b"content-length" in named)
        self._wake()

    def on_message_complete(self) -> None:
        if self._has_head:  # else an interim answer
            self.is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()
